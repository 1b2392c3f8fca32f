"""What lies in the place of a run's file: no link is followed, nothing waits, and nothing behind it changes."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import write_json
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder
from longstride.launcher.checkpoints.manifest import read_checkpoint_config
from longstride.launcher.checkpoints.saving import point_to, rewind_to, set_aside
from longstride.launcher.cluster.start import is_done, read_progress
from longstride.launcher.identity import trained_on
from longstride.launcher.output import metrics_file
from longstride.launcher.ranks.processes import Ranks, check_unlocked, run_lock
from longstride.launcher.reporting.loss import draw_loss
from longstride.launcher.reporting.records import (
    RunHistory,
    _read_incidents,
    _read_samples,
    _read_starts,
    read_positions,
)
from longstride.launcher.stops import StopFile
from longstride.launcher.training.recorder import LineFile
from longstride.launcher.training.resume import write_start
from tests.harness.lines import step_line

PRECIOUS = "precious\n"


def make_link(path: Path) -> None:
    """A link to a file that is not the run's."""
    path.symlink_to(path.parents[len(path.parts) - 1 - path.parts.index("run")].parent / "precious")


KINDS: dict[str, Callable[[Path], Any]] = {
    "link": make_link,
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


def take_lock(run: Path) -> None:
    """Holds the lock for a moment."""
    with run_lock(run, Ranks()):
        pass


def append(run: Path) -> None:
    """Appends a line to metrics.jsonl as a run does."""
    lines = LineFile(run / "metrics.jsonl", lambda _: None)
    lines.append("{}", "step 1")
    lines.close()


def record(run: Path) -> RunHistory:
    """A record of which nothing has been read."""
    return RunHistory(run, "run")


def read_data(run: Path) -> object:
    """Reads what the run was trained on, as all that compares data with it does."""
    checkpoint: Any = SimpleNamespace(
        folder=run / "checkpoints/step-00000001",
        config=SimpleNamespace(model=None),
        manifest=SimpleNamespace(stream={}),
    )
    return trained_on(checkpoint)


# Each file of a run folder, with everything that opens it by its name: to read, to append, to write it anew.
USES: dict[str, list[Callable[[Path], Any]]] = {
    ".lock": [take_lock, check_unlocked],
    "metrics.jsonl": [
        append,
        lambda run: list(metrics_file.read_lines(run)),
        lambda run: metrics_file.find_steps(run),
        lambda run: metrics_file.cut_metrics(run, 1, last="{}\n"),
        draw_loss,
        read_progress,
    ],
    "starts.jsonl": [lambda run: write_start(run, {"step": 1}), lambda run: _read_starts(record(run))],
    "config.json": [
        lambda run: is_done(run, None),
        read_checkpoint_config,
        lambda run: write_json(run / "config.json", {}),
    ],
    "data.json": [read_data, lambda run: write_json(run / "data.json", {})],
    ".over": [lambda run: is_done(run, 3), lambda run: write_json(run / ".over", 3)],
    "checkpoints/latest": [lambda run: point_to(run, 8)],
    "checkpoints/step-00000004": [lambda run: set_aside(run / "checkpoints/step-00000004")],
    "guards/step-00000001.json": [lambda run: _read_incidents(record(run))],
    "samples/step-00000001.txt": [lambda run: _read_samples(record(run))],
    "positions.json": [lambda run: read_positions(run / "positions.json", follow_links=False)],
    ".stop-1": [lambda run: StopFile(run / ".stop-1")(), lambda run: StopFile(run / ".stop-1").write("SIGTERM")],
    ".stop-1.begun": [lambda run: StopFile(run / ".stop-1").mark_begun()],
}
CASES = [(name, number) for name, uses in USES.items() for number in range(len(uses))]


@pytest.fixture
def bounded() -> Iterator[None]:
    """Ends a test that waits for a pipe, or reads a device without end."""

    def give_up(_: int, __: FrameType | None) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 5.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_nothing_behind_a_file_of_a_run_is_read_or_written(tmp_path: Path, name: str, number: int, kind: str) -> None:
    run, behind = tmp_path / "run", tmp_path / "precious"
    behind.write_text(PRECIOUS)
    (run / name).parent.mkdir(parents=True)
    KINDS[kind](run / name)
    try:
        USES[name][number](run)
    except TimeoutError:
        raise
    except (OSError, ConfigError) as error:
        assert len(str(error).splitlines()) == 1
        assert name in str(error)
    assert behind.read_text() == PRECIOUS
    assert not (run / name).with_name("nowhere").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_lock_that_is_no_file_is_refused_in_a_line(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "precious").write_text(PRECIOUS)
    KINDS[kind](run / ".lock")
    message = rf'^train\.output="{run}": {run}/\.lock: is a .+, not a plain file; remove it'
    for use in (take_lock, check_unlocked):
        with pytest.raises(ConfigError, match=message):
            use(run)


def test_folder_in_the_place_of_latest_is_refused_by_its_name(tmp_path: Path) -> None:
    pointer = tmp_path / "checkpoints/latest"
    pointer.mkdir(parents=True)
    for step in (0, 8):  # of a run that begins anew, and of one that resumes
        checkpoint_folder(tmp_path, 8).mkdir(exist_ok=True)
        with pytest.raises(OSError) as refused:
            rewind_to(tmp_path, step)
        assert str(pointer) in str(refused.value) and ".partial" not in str(refused.value)


@pytest.mark.parametrize(
    "line", ["[" * 1000, '{"step": []}', '{"step": {}}', "[1]", "7", '{"step": ' + "9" * 5000 + "}", '{"step": true}']
)
def test_progress_passes_over_lines_that_no_run_writes(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step_line(3, tokens=64))}\n{line}\n")
    (tmp_path / "config.json").write_text(line)
    assert read_progress(tmp_path).recorded == 3
    assert not is_done(tmp_path, None)
    (tmp_path / "config.json").write_text(f'{{"train": {line}}}')
    assert not is_done(tmp_path, None)
    with suppress(ConfigError):
        read_checkpoint_config(tmp_path)
