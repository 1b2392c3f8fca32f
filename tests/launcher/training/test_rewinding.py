"""What a guard's verdict does to the run folder, also where that has no room."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order.lanes import StreamState
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder, list_checkpoints, open_checkpoint
from longstride.launcher.checkpoints.saving import point_to
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run import RunSetup
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.models import ModelData
from longstride.launcher.output.file_names import CHECKPOINTS
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training import guards as guard_module
from longstride.launcher.training import recorder as metrics
from longstride.launcher.training.guards import GuardResponse, Guards, GuardStopError, Plateau, Verdict, read_incidents
from longstride.launcher.training.recorder import Recorder
from longstride.launcher.training.resume import prepare_folder
from tests.harness.lines import evaluation_line, step_line
from tests.launcher.checkpoints.test_retention import make_checkpoint

REWIND = Verdict("non_finite", "rewind", "the loss is nan")


class Folder:
    """A run at step 6, the checkpoints of steps 2 and 4, of which the newer is damaged, and its response to step 7."""

    def __init__(self, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.loaded = Path(config.train.output), list[int]()
        for step in (2, 4):
            make_checkpoint(self.run, step)
        (checkpoint_folder(self.run, 4) / "deepspeed/mp_rank_00_model_states.pt").write_bytes(b"damaged")
        point_to(self.run, 4)
        monkeypatch.setattr(
            guard_module, "load", lambda _, checkpoint, *__: self.loaded.append(checkpoint.manifest.step)
        )
        self.engine: Any = SimpleNamespace(global_steps=6, monitor=SimpleNamespace(enabled=False))
        self.recorder = Recorder(self.run, self.engine, True, 8)
        self.state = StreamState(fingerprint="0" * 64, seed=0, epoch=0, step=6, global_batch=1)
        guards = Guards(config.train.guards)
        run = RunSetup(config, Ranks(), TrainingData(config, Ranks()))
        self.response = GuardResponse(run, self.engine, guards, Plateau(run), self.recorder, self.state)
        for step in range(1, 7):
            self.recorder.write(step_line(step))

    def act(self, verdict: Verdict) -> bool:
        line = step_line(7, None, grad_norm=None, tokens=64, rank_nats=["nan"], guard=str(verdict))
        taken: Any = SimpleNamespace(part=SimpleNamespace(state=self.state), sample_ids=(5,))
        return self.response.act(verdict, line, taken, self.state) is not None

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / name).read_text().splitlines()]

    def names(self) -> set[str]:
        return {path.name for path in (self.run / CHECKPOINTS).iterdir()}


@pytest.fixture
def folder(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    folder = Folder(load_config(config_file, []), monkeypatch)
    yield folder
    folder.recorder.close()


def no_room(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_rewind_brings_the_folder_back_past_a_damaged_checkpoint(folder: Folder) -> None:
    assert folder.act(REWIND)
    assert folder.loaded == [2]
    assert [line["step"] for line in folder.lines()] == [1, 2]
    kept = folder.lines("metrics.before-rewind-1.jsonl")
    assert [line["step"] for line in kept] == list(range(1, 8))
    assert folder.names() == {"step-00000002", "step-00000004.replaced-1", "latest"}
    assert (folder.run / CHECKPOINTS / "latest").read_text() == "step-00000002\n"
    (incident,) = read_incidents(folder.run).values()
    assert kept[-1]["guard"] == f"{incident.outcome}: {incident.reason}" == "rewind: the loss is nan"


@pytest.mark.parametrize("way", ["resume", "rewind"])
def test_newest_checkpoint_has_its_lines_wherever_going_back_is_cut_short(
    folder: Folder, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before each rename in turn, and goes on with what it left."""
    deadly, renames = 0, 0

    def or_die(work: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def work_or_die(path: Path, target: Path) -> Path:
            nonlocal renames
            renames += 1
            if renames == deadly:
                raise KeyboardInterrupt
            return work(path, target)

        return work_or_die

    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, or_die(getattr(Path, name)))
    while deadly < 5:  # the pointer; the later checkpoint; the lines; config.json, of a resume; none
        deadly, renames = deadly + 1, 0
        try:
            if way == "rewind":
                folder.act(REWIND)
            else:
                data: Any = SimpleNamespace(identity=ModelData(modality_named("text"), {}))
                prepare_folder(replace(folder.response._run, data=data), open_checkpoint(folder.run, 2))
        except KeyboardInterrupt:
            pass
        newest, lines = list_checkpoints(folder.run)[0][0].manifest.step, [line["step"] for line in folder.lines()]
        assert set(range(1, newest + 1)) <= set(lines)
    assert (newest, lines) == (2, [1, 2])


@pytest.mark.parametrize("outcome", ["skip", "rewind", "stop"])
def test_incident_that_finds_no_room_changes_nothing_else(
    folder: Folder, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Path, _: object) -> Path:
        raise no_room(run / "guards/step-00000007.json")

    said = list[str]()
    monkeypatch.setattr(folder.recorder, "say", said.append)
    monkeypatch.setattr(guard_module, "write_incident", fail)
    verdict = Verdict("non_finite", outcome, "the loss is nan")
    if outcome == "stop":
        with pytest.raises(GuardStopError):
            folder.act(verdict)
    else:
        assert folder.act(verdict) == (outcome == "rewind")
    path = folder.run / "guards/step-00000007.json"
    told = f"step 7: {outcome}: the loss is nan; not written down: {path}: {os.strerror(errno.ENOSPC)}, with "
    assert said[0].startswith(told)
    assert [line["step"] for line in folder.lines()] == ([1, 2] if outcome == "rewind" else list(range(1, 8)))


def test_rewind_without_room_is_a_stop(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded, and line and incident say the same."""
    full = folder.run / "metrics.before-rewind-1.jsonl"

    def fail(_: Path, copy: Path, *, follow_symlinks: bool) -> None:
        copy.write_bytes(b"half")
        raise no_room(copy)

    monkeypatch.setattr("longstride.launcher.output.metrics_file.shutil.copy2", fail)
    with pytest.raises(GuardStopError, match=r"the run folder could not be rewound: .*No space left on device"):
        folder.act(REWIND)
    assert folder.loaded == [] and not full.exists()
    assert [line["step"] for line in folder.lines()] == list(range(1, 8))
    (incident,) = read_incidents(folder.run).values()
    assert folder.lines()[-1]["guard"] == f"{incident.outcome}: {incident.reason}"
    assert incident.outcome == "stop" and incident.rewound_to is None


def test_lines_that_wait_for_room_outlive_a_rewind(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written before the cut; where they cannot be, the run stops with them."""
    write = metrics.LineFile._write
    with monkeypatch.context() as patch:
        patch.setattr(metrics.LineFile, "_write", Mock(side_effect=OSError(28, "No space left on device")))
        folder.recorder.write(evaluation_line(2))
        with pytest.raises(OSError, match="No space left on device, and lines from step 2 on wait"):
            folder.recorder.rewind(2, step_line(7))
    assert metrics.LineFile._write is write
    folder.recorder.rewind(2, step_line(7))
    assert [(line["step"], line["split"]) for line in folder.lines()] == [(1, "train"), (2, "train"), (2, "validation")]


def test_rewind_without_a_whole_checkpoint_is_a_stop_in_line_and_incident(folder: Folder) -> None:
    (checkpoint_folder(folder.run, 2) / "deepspeed/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(GuardStopError):
        folder.act(REWIND)
    said = "stop: the loss is nan; there is no complete checkpoint to rewind to"
    (incident,) = read_incidents(folder.run).values()
    assert folder.lines()[-1]["guard"] == f"{incident.outcome}: {incident.reason}" == said
