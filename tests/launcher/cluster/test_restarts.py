"""Restarts: how often, from where, when given up, and what a lost launch has left. No process is started."""

import json
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster import start
from longstride.launcher.cluster.placement import NoHostAnswersError
from longstride.launcher.cluster.start import run_with_restarts
from longstride.launcher.cluster.supervisor import Launch, Outcome, StopRequest
from longstride.launcher.output import exit_codes
from tests.harness.lines import step_line, write_metrics

Attempt = Callable[[], int]
WAIT_FOR_STOP = start.wait_for_stop


def save(run: Path, step: int) -> None:
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def record(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_line(step)) + "\n")


class Played:
    """A run whose attempts are given as functions that leave their traces in the folder and return a code."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.attempts = run, list[Attempt]()
        self.resumed: list[str] = []
        self.begun: list[bool] = []  # whether each attempt took steps
        self.waited: list[float] = []
        self.vacated: list[Path] = []
        self.lost: Callable[[], str] = lambda: "with 2 processes"
        monkeypatch.setattr(start, "wait_for_stop", self._stop_comes)
        monkeypatch.setattr(start, "vacate", lambda _, stop_file, *__: self.vacated.append(stop_file))

    def go(self, attempts: list[Attempt], max_restarts: int, resume: str = "never") -> int:
        self.attempts = attempts
        self.resumed.clear()
        with closing(StopRequest()) as request:
            return run_with_restarts(self.run, resume, max_restarts, self, request, self._supervise, 1.0)

    def launch(self, resume: str) -> Launch:
        self.resumed.append(resume)
        return Launch([], {}, self.run / ".stop")

    def shrink(self) -> str:
        return self.lost()

    def end_elsewhere(self) -> None:
        pytest.fail("is for vacate, which is replaced")

    def _supervise(self, _: Launch) -> Outcome:
        number = len(self.resumed) - 1
        code, has_begun = self.attempts[number](), number < len(self.begun) and self.begun[number]
        return Outcome(code, "a process was ended by SIGKILL", has_begun=has_begun)

    def _stop_comes(self, request: StopRequest, seconds: float) -> bool:
        self.waited.append(seconds)
        return request.signal is not None


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_lost_run_goes_on_from_what_it_saved_and_says_so(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def first() -> int:
        record(tmp_path, 3)
        return exit_codes.HUNG

    def second() -> int:
        save(tmp_path, 4)
        return exit_codes.UNFORESEEN

    assert played.go([first, second, lambda: exit_codes.DONE], 5) == exit_codes.DONE
    assert played.resumed == ["never", "auto", "auto"]
    assert played.waited == [1.0, 1.0]
    assert capsys.readouterr().err.splitlines() == [
        "longstride: ended: a process was ended by SIGKILL; continuing from the start with 2 processes; "
        "restarts left: 4",
        "longstride: ended: a process was ended by SIGKILL; continuing from step 4 with 2 processes; restarts left: 3",
    ]


@pytest.mark.parametrize("code", [0, 2, 75, 76, 130])
def test_end_that_no_restart_could_mend_is_the_last(played: Played, code: int) -> None:
    assert played.go([lambda: code], 5) == code
    assert len(played.resumed) == 1


def test_restarts_are_counted(played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter(range(1, 9))

    def further() -> int:
        record(tmp_path, next(steps))
        return exit_codes.HUNG

    assert played.go([further] * 4, 3) == exit_codes.HUNG
    assert len(played.resumed) == 4
    assert capsys.readouterr().err.splitlines()[-1].endswith("all 3 restarts are used")
    assert played.go([further], 0) == exit_codes.HUNG


def test_run_that_comes_no_further_is_given_up(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeat the steps up to the one that kills the run; its lines are cut off and written again each time."""
    save(tmp_path, 4)

    def same() -> int:
        write_metrics(tmp_path, [step_line(7)])
        return exit_codes.UNFORESEEN

    assert played.go([same] * 9, 9, "auto") == exit_codes.UNFORESEEN
    assert len(played.resumed) == 4  # the first one brought step 7
    assert played.waited == [1.0, 2.0, 4.0]
    assert "3 attempts in a row did not get beyond step 4; no more restarts" in capsys.readouterr().err


def test_nothing_left_to_go_on_with_ends_the_run(played: Played, capsys: pytest.CaptureFixture[str]) -> None:

    def lost() -> str:
        raise ConfigError("no host answers")

    played.lost = lost
    assert played.go([lambda: exit_codes.HUNG], 5) == exit_codes.HUNG
    assert capsys.readouterr().err.endswith("a process was ended by SIGKILL; no host answers\n")


def test_host_lost_while_the_next_attempt_is_prepared_ends_the_run(
    played: Played, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Remove a host between its check and the launch. This is not the user's mistake, so the code is not 2."""
    launch = played.launch

    def launch_once(resume: str) -> Launch:
        if played.resumed:
            raise ConfigError("node2: no answer")
        return launch(resume)

    monkeypatch.setattr(played, "launch", launch_once)
    assert played.go([lambda: exit_codes.HUNG], 5) == exit_codes.HUNG
    assert capsys.readouterr().err.endswith("a process was ended by SIGKILL; node2: no answer\n")


def test_stop_between_attempts_ends_the_run(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return exit_codes.HUNG

    monkeypatch.setattr(start, "wait_for_stop", WAIT_FOR_STOP)
    assert played.go([stopped], 5) == exit_codes.REQUEUE
    assert len(played.vacated) == 1  # what it has left elsewhere stops as well


def test_host_that_is_cut_off_from_all_others_asks_them_again(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use up a restart, but no attempt without progress, as the ranks may train on."""
    asked: list[int] = []

    def lost() -> str:
        asked.append(len(played.vacated))
        if len(asked) < 5:
            raise NoHostAnswersError("no host answers")
        return "with 2 processes"

    played.lost = lost
    assert played.go([lambda: exit_codes.HUNG, lambda: exit_codes.DONE], 9) == exit_codes.DONE
    assert (played.resumed, asked, len(played.vacated)) == (["never", "auto"], [0] * 5, 1)
    assert played.waited == [1.0, *[60.0] * 4]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "longstride: ended: a process was ended by SIGKILL; no host answers; restarts left: 8"
    assert said[-1].endswith("no host answers; continuing from the start with 2 processes; restarts left: 4")
    asked.clear()
    played.resumed.clear()
    assert played.go([lambda: exit_codes.HUNG, lambda: exit_codes.DONE], 2) == exit_codes.HUNG
    assert capsys.readouterr().err.endswith("ended: no host answers; all 2 restarts are used\n")


@pytest.mark.parametrize("resume", ["4", "best", "never"])
def test_step_to_resume_from_is_kept_until_the_run_has_begun(played: Played, tmp_path: Path, resume: str) -> None:
    """A run that begins moves aside what lies beyond its step."""
    steps = iter(range(1, 5))

    def further() -> int:
        record(tmp_path, next(steps))
        return exit_codes.HUNG

    played.begun = [False, False, True, False]
    assert played.go([further] * 4, 3, resume) == exit_codes.HUNG
    again = "auto" if resume == "never" else resume
    assert played.resumed == [resume, again, again, "auto"]


class Elsewhere:
    """A launch whose rank 0 holds the folder until it sees the stop file, until it is killed, or for ever."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, *, ends_by: str) -> None:
        self.run, self.ends_by, self.holds, self.ended = run, ends_by, True, 0
        monkeypatch.setattr(start, "check_unlocked", self._check)
        monkeypatch.setattr(start, "_POLL_SECONDS", 0.01)
        monkeypatch.setattr(start, "_UNLOCK_SECONDS", 0.05)

    def vacate(self) -> None:
        with closing(StopRequest()) as request:
            start.vacate(self.run, self.run / ".stop-1", request, 0.05, self.end)

    def end(self) -> None:
        self.ended += 1
        self.holds = self.holds and self.ends_by != "end"

    def _check(self, run: Path) -> None:
        if self.ends_by == "file" and (run / ".stop-1").exists():
            self.holds = False
        if self.holds:
            raise ConfigError("another run writes there")


@pytest.mark.parametrize("ends_by", ["file", "end", "nothing"])
def test_next_attempt_waits_until_the_folder_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    elsewhere = Elsewhere(tmp_path, monkeypatch, ends_by=ends_by)
    if ends_by == "nothing":
        with pytest.raises(ConfigError, match="another run writes there"):
            elsewhere.vacate()
    else:
        elsewhere.vacate()
    assert elsewhere.ended == 1  # ranks other than 0 may be left
    assert not list(tmp_path.iterdir())


def test_free_folder_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere(tmp_path / "unborn", monkeypatch, ends_by="file")
    elsewhere.holds = False
    elsewhere.vacate()
    assert not (tmp_path / "unborn").exists()
