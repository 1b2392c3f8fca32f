"""A loader worker that is killed or stopped costs no step: its run saves, says so in a line, and can go on."""

import functools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import psutil
import pytest

from longstride.launcher.output import exit_codes
from tests.harness.processes.tended import longstride, tended
from tests.harness.runs import ROOT, configuration, metrics, plain_environment, spawn
from tests.hostile.commands import sampled
from tests.hostile.generators.lost_workers import WHATS, WHENS

STEP = 4  # at which the worker is lost; its evaluation is the only one on the way
PREFETCH = 2
SAMPLE = [("killed", "computing", 2), ("stopped", "waiting", 1)]
ALL = [*product(WHATS[:2], WHENS, (1, 2)), *((WHATS[2], when, ranks) for when in WHENS for ranks in (1, 2))]
Config = Callable[[Path], Path]


@pytest.fixture(scope="module")
def config(data: Path) -> Config:
    """Return a function that writes the configuration of a run with two loader workers per rank into a folder."""

    def write(output: Path) -> Path:
        content = configuration(data, output / "run")
        content["data"] |= {"workers": 2, "prefetch": PREFETCH, "worker_timeout_seconds": 2.0}
        content["train"] |= {"checkpoint_every": 0}
        path = output / "run.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture(scope="module")
def undisturbed(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function of the number of ranks that returns their undisturbed run."""

    @functools.cache
    def run(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        ended = spawn(["--config", str(config(folder))], ranks)
        assert ended.codes == [exit_codes.DONE] * ranks, ended.stderr
        return folder / "run"

    return run


def check_gone(note: Path) -> None:
    """Check that the rank that lost a worker has none left."""
    workers = [psutil.Process(pid) for pid in map(int, note.read_text().split()) if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("what", "when", "ranks"), sampled(ALL, SAMPLE))
def test_lost_worker_costs_no_step(
    config: Config, undisturbed: Callable[[int], Path], tmp_path: Path, what: str, when: str, ranks: int
) -> None:
    note, arguments = tmp_path / "note", ["--config", str(config(tmp_path)), "--resume", "auto"]
    ended = spawn(arguments, ranks, {"LOSE_WORKER": f"{what},{when},{ranks - 1},{STEP},{note}"})
    check_gone(note)
    assert "Traceback" not in "".join(ended.stderr), ended.stderr
    if what in ("killed", "stopped"):
        assert ended.codes == [exit_codes.HUNG] * ranks, ended.stderr
        lines = [line for text in ended.stderr for line in text.splitlines() if "lost a process" in line]
        how = "was ended by SIGKILL" if what == "killed" else "has delivered nothing for 2 s"
        pattern = rf"longstride: lost a process that reads data: rank {ranks - 1}: loader worker 1 of 2 .*{how}.*"
        assert len(lines) == 1 and re.fullmatch(pattern, lines[0]), ended.stderr
        (saved,) = (run.name for run in (tmp_path / "run/checkpoints").glob("step-*"))
        # What it had sent before is trained on first.
        assert STEP - (when == "waiting") <= int(saved.removeprefix("step-")) <= STEP + PREFETCH + 1
        assert f"{int(saved.removeprefix('step-'))}: saved before the run ends" in "".join(ended.stderr)
    else:
        assert ended.codes[-1] == -signal.SIGKILL, ended.stderr
    ended = spawn(arguments, ranks)
    assert ended.codes == [exit_codes.DONE] * ranks, ended.stderr
    assert metrics(tmp_path / "run") == metrics(undisturbed(ranks))


@pytest.mark.campaign
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_run_that_lost_a_worker_is_restarted(
    config: Config, undisturbed: Callable[[int], Path], tmp_path: Path, what: str
) -> None:
    note = tmp_path / "note"
    command = longstride(["--config", str(config(tmp_path)), "--max-restarts", "1"])
    with tended(command, tmp_path, {"LOSE_WORKER": f"{what},computing,1,{STEP},{note}"}) as run:
        assert run.end() == exit_codes.DONE, run.output
        assert run.all_ended(10)
    assert note.exists() and "Traceback" not in run.output
    assert metrics(tmp_path / "run") == metrics(undisturbed(2))


@pytest.mark.campaign
def test_replay_that_loses_a_worker_says_so(config: Config, tmp_path: Path) -> None:
    path = config(tmp_path)
    assert spawn(["--config", str(path)], 2).codes == [exit_codes.DONE] * 2
    lost = {"LOSE_WORKER": f"killed,computing,1,{STEP},{tmp_path / 'note'}"}
    ended = spawn(["--config", str(path), "--replay", "8"], 2, lost)
    assert ended.codes == [exit_codes.HUNG] * 2, ended.stderr
    assert "Traceback" not in "".join(ended.stderr)
    assert "lost a process that reads data: rank 1: loader worker 1 of 2" in ended.stderr[0]
    check_gone(tmp_path / "note")


_LEAVES = """
import itertools
from longstride.data_pipelines.order.workers import Workers
workers = Workers([itertools.count()], 1, 60.0)
workers.take()
print(workers._workers[0].process.pid)
"""


def test_program_that_ends_without_closing_its_workers_ends() -> None:
    """Test for a hang: workers ignore the signal by which multiprocessing ends them, and it waits for them."""
    environment = plain_environment() | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", _LEAVES], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and not ended.stderr
    assert not psutil.pid_exists(int(ended.stdout))
