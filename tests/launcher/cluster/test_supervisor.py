"""`longstride train` and its processes: stopped, killed and restarted; nothing is lost, and no process is left."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longstride.launcher.cluster.start import read_progress
from longstride.launcher.cluster.supervisor import outcome_of
from longstride.launcher.output import exit_codes
from tests.harness.processes.tended import Tended, deepspeed, longstride, tended
from tests.harness.runs import ROOT, metrics, spawn

Trained = Callable[..., Path]
Command = Callable[[list[str]], list[str]]

_STAND_INS = ROOT / "tests/harness/processes/stand_ins.py"
_MOMENTS = 20  # of a run to be stopped
_END_SECONDS = 60.0  # of processes on a machine with other work; a second or two on one without
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextlib.contextmanager
def stand_ins(folder: Path, **environment: str) -> Iterator[Tended]:
    """Start `longstride train` with stand-ins for the parts that take seconds to start; no process is left."""
    with tended([sys.executable, str(_STAND_INS), "parent", str(folder)], folder, environment) as going:
        assert going.wait_for(2)
        yield going
        assert not going.processes()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.campaign)])
def test_stop_is_handed_on_and_everything_ends(tmp_path: Path, number: signal.Signals) -> None:
    with stand_ins(tmp_path) as going:
        going.process.send_signal(number)
        assert going.end() == exit_codes.REQUEUE, going.output
        assert going.output.startswith("longstride: stopping at the next step; interrupt again to leave at once\n")
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [number.name] * 2
    assert not (tmp_path / ".stop-token").exists()


def test_stop_before_the_first_step_ends_everything_at_once(tmp_path: Path) -> None:
    """Ranks that import and compile hear no wish, and have nothing to save."""
    with stand_ins(tmp_path, UNBEGUN="1") as going:
        since = time.monotonic()
        going.process.send_signal(signal.SIGINT)
        assert going.end() == exit_codes.REQUEUE, going.output
        assert time.monotonic() - since < 3.0 + _END_SECONDS / 10
        assert "stopped before the first step" in going.output
    assert not list(tmp_path.glob("saved-*"))
    assert not list(tmp_path.glob(".stop*"))


def test_second_signal_leaves_at_once(tmp_path: Path) -> None:
    with stand_ins(tmp_path, SAVE_SECONDS="600") as going:
        going.process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        assert going.process.poll() is None
        going.process.send_signal(signal.SIGINT)
        assert going.end() == exit_codes.STOPPED, going.output
    assert not list(tmp_path.glob("saved-*"))


@pytest.mark.parametrize(
    ("victim", "code"),
    [
        ("parent", -signal.SIGKILL),
        ("deepspeed.launcher.launch", exit_codes.HUNG),
        pytest.param("deepspeed.launcher.runner", exit_codes.HUNG, marks=pytest.mark.campaign),
    ],
)
def test_lost_launcher_has_the_ranks_save_and_end(tmp_path: Path, victim: str, code: int) -> None:
    with stand_ins(tmp_path) as going:
        (pid,) = going.named(victim)
        os.kill(pid, signal.SIGKILL)
        assert going.end() == code, going.output
        if victim == "parent":  # which else returns only when nothing is left
            assert going.all_ended(_END_SECONDS), going.processes()
    # The launcher's part that watches the ranks may end the second one by its signal, once the first has ended.
    reasons = {(tmp_path / f"saved-{rank}").read_text() for rank in range(2)}
    assert "the end of its launcher" in reasons <= {"the end of its launcher", "SIGTERM"}


def test_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    """Leave its loader worker an orphan; the launcher ends the other rank."""
    with stand_ins(tmp_path) as going:
        os.kill(going.named(f"rank {tmp_path}")[0], signal.SIGKILL)
        assert going.end() == exit_codes.HUNG, going.output
        assert "code 247: a process was ended by SIGKILL" in going.output


def test_run_that_is_done_ends_by_code_0(tmp_path: Path) -> None:
    with stand_ins(tmp_path) as going:
        (tmp_path / "done").touch()
        assert going.end() == exit_codes.DONE, going.output


@pytest.mark.parametrize(
    ("code", "stopped_by", "whole", "expected"),
    [
        (0, None, True, exit_codes.DONE),
        (0, None, False, exit_codes.HUNG),  # the part that watches the ranks was killed
        (1, None, False, exit_codes.UNFORESEEN),
        (2, None, False, exit_codes.WRONG_INPUT),
        (75, signal.SIGTERM, False, exit_codes.REQUEUE),
        (76, None, False, exit_codes.GUARDED),
        (77, None, False, exit_codes.HUNG),
        (247, None, False, exit_codes.HUNG),  # DeepSpeed's word for a rank killed by -9
        (137, None, False, exit_codes.HUNG),  # mpirun's
        (241, signal.SIGTERM, False, exit_codes.REQUEUE),  # a rank that could not listen yet
        (241, None, False, exit_codes.HUNG),
        (-9, None, False, exit_codes.HUNG),
        (-9, signal.SIGINT, False, exit_codes.REQUEUE),
        (255, None, False, exit_codes.HUNG),  # ssh lost its host
        (255, signal.SIGHUP, False, exit_codes.HUNG),  # the same code, which does not say whether anything was saved
        (3, None, False, exit_codes.UNFORESEEN),
    ],
)
def test_outcome_is_a_documented_code(code: int, stopped_by: signal.Signals | None, whole: bool, expected: int) -> None:
    assert outcome_of(code, stopped_by, is_done=whole).code == expected


def run_arguments(config_file: Path, *more: str) -> list[str]:
    """Return the arguments of a run of eight steps that can be resumed, with loader workers."""
    return ["--config", str(config_file), "--resume", "auto", "data.workers=1", *more]


def stop_somewhere(start: Command, number: signal.Signals, moment: int, config_file: Path, whole: Path) -> int:
    """Stops a run at a moment, resumes it and checks that nothing is lost; returns the code of the stopped one.

    ``moment``: how many of the run's marks (begin, steps, evaluations, saves) go before.
    """
    run, arguments = config_file.parent / "run", run_arguments(config_file)
    delay = random.Random(moment).uniform(0, 0.06)
    with tended(start(arguments), config_file.parent) as going:
        assert going.wait_for(moment + 1)
        time.sleep(delay)
        if start is deepspeed and number is signal.SIGINT:  # from a terminal it reaches the whole group
            os.killpg(going.process.pid, number)
        else:
            going.process.send_signal(number)
        code = going.end()
        assert going.all_ended(_END_SECONDS), (going.processes(), going.output)
        output = going.output
    assert "Traceback" not in output or start is deepspeed, output
    if code == exit_codes.DONE:  # a stop in the last thing that a run does may come too late to make a difference
        assert metrics(run) == metrics(whole)
    check_saved(run, arguments, whole, output)
    return code


def check_saved(run: Path, arguments: list[str], whole: Path, output: str) -> None:
    """Checks that all finished steps are saved, and that the resumed run equals one that was never stopped."""
    progress = read_progress(run)
    assert progress.saved == progress.recorded, output
    ended = spawn(arguments, 2)
    assert ended.codes == [exit_codes.DONE] * 2, ended.stderr
    assert not list(run.glob("metrics.before-resume*"))
    assert not list(run.glob(".stop*"))
    assert metrics(run) == metrics(whole)


def moments(start: Command) -> list[object]:
    """Combine the campaign's moments with the signals in turn; the first is in the sample."""
    count = 17  # marks of a run of eight steps
    drawn = random.Random(start.__name__)
    cases: list[object] = []
    for index in range(_MOMENTS):
        moment = index if index < count else drawn.randrange(count)
        marks = () if index == 4 and start is longstride else (pytest.mark.campaign,)
        cases.append(pytest.param(_SIGNALS[index % 3], moment, marks=marks, id=f"{_SIGNALS[index % 3].name}-{moment}"))
    return cases


@pytest.mark.parametrize(("number", "moment"), moments(longstride))
def test_stop_of_longstride_train_loses_nothing(
    trained: Trained, config_file: Path, number: signal.Signals, moment: int
) -> None:
    code = stop_somewhere(longstride, number, moment, config_file, trained("zero0-fp32", 2))
    assert code == exit_codes.REQUEUE or (code == exit_codes.DONE and moment >= 13)


@pytest.mark.parametrize(("number", "moment"), moments(deepspeed))
def test_stop_of_deepspeed_loses_nothing(
    trained: Trained, config_file: Path, number: signal.Signals, moment: int
) -> None:
    """Stop DeepSpeed's runner: it dies of the signal, or returns 1, so the code does not say what was done."""
    stop_somewhere(deepspeed, number, moment, config_file, trained("zero0-fp32", 2))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
def test_killed_ranks_are_started_again_until_the_run_is_done(trained: Trained, config_file: Path, seed: int) -> None:
    """Kill either rank three times a run, in thirty random moments in all."""
    random_numbers, whole = random.Random(seed), trained("zero0-fp32", 2)
    run = config_file.parent / "run"
    arguments = run_arguments(config_file, "--max-restarts", "9")
    with tended(longstride(arguments), config_file.parent) as going:
        killed = 0
        while killed < 3 and going.wait_for(len(going.marks()) + random_numbers.randint(1, 6)):
            time.sleep(random_numbers.uniform(0, 0.06))
            ranks = going.ranks()
            if ranks:  # none: they are about to be started
                os.kill(random_numbers.choice(ranks), signal.SIGKILL)
                killed += 1
                assert going.wait_for_new("begin")
        assert going.end() == exit_codes.DONE, going.output
        assert going.all_ended(_END_SECONDS), going.processes()
        assert going.output.count("continuing from") >= killed, going.output
    assert killed
    assert metrics(run) == metrics(whole)


@pytest.mark.campaign
@pytest.mark.parametrize("moment", [3, 7])
@pytest.mark.parametrize(
    ("start", "victim", "codes"),
    [
        pytest.param(longstride, "supervised.py", {-signal.SIGKILL}, id="longstride train"),
        pytest.param(longstride, "deepspeed.launcher.runner", {exit_codes.HUNG}, id="its runner"),
        pytest.param(longstride, "deepspeed.launcher.launch", {exit_codes.HUNG}, id="its launch"),
        pytest.param(deepspeed, "bin/deepspeed", {-signal.SIGKILL}, id="deepspeed's runner"),
        pytest.param(deepspeed, "deepspeed.launcher.launch", {exit_codes.DONE}, id="deepspeed's launch"),
    ],
)
def test_killed_launcher_leaves_no_orphan_and_nothing_unsaved(
    trained: Trained, config_file: Path, start: Command, victim: str, codes: set[int], moment: int
) -> None:
    run, arguments = config_file.parent / "run", run_arguments(config_file)
    with tended(start(arguments), config_file.parent) as going:
        assert going.wait_for(moment + 1)
        (pid,) = going.named(victim)
        os.kill(pid, signal.SIGKILL)
        assert going.end() in codes, going.output
        assert going.all_ended(_END_SECONDS), (going.processes(), going.output)
        output = going.output
    check_saved(run, arguments, trained("zero0-fp32", 2), output)
