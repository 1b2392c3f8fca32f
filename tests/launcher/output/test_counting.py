"""What is told of work on its way."""

import sys

import pytest

from longstride.launcher.output import counting
from tests.launcher.conftest import Terminal


def work(clock: list[float], parts: int, *, shown: bool = True) -> None:
    """Parts of a hundred bytes, a second each."""
    counter = counting.WorkCounter("scoring", 100 * parts, "bytes", shown=shown)
    for _ in range(parts):
        clock[0] += 1
        counter.add(100)
    counter.close()


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    work(clock, 25)
    assert capsys.readouterr() == (
        "",
        "longstride: scoring: 1,000 of 2,500 bytes, about 15 s left\n"
        "longstride: scoring: 2,000 of 2,500 bytes, about 5 s left\n",
    )


def test_what_is_done_at_once_tells_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work(clock, 9)
    work(clock, 25, shown=False)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(clock, 1)
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar_that_is_wiped(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(clock, 4)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "scoring:  50 % " in shown and "200 of 400 bytes" in shown
    assert shown.rstrip(" ").endswith("\r") and not shown.split("\r")[-2].strip()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (599.7, "10 min"), (1500, "25 min"),
        (3599, "1 h"), (7980, "2 h 13 min"), (36000, "10 h"), (1036800, "12 d"), (4 * 3600 + 86400 * 3, "3 d 4 h"),
        (86400 * 1234, "1,234 d"), (1e15, "more than 1,000 years"), (float("inf"), "more than 1,000 years"),
    ],
)  # fmt: skip
def test_time_is_told_as_a_person_tells_it(seconds: float, words: str) -> None:
    assert counting.duration(seconds) == words


def test_time_of_a_step_has_three_digits() -> None:
    told = [counting.step_duration(each) for each in (0.0123, 1.5, 250.0)]
    assert told == ["12.3 ms", "1.50 s", "250 s"]
