"""Standard error: lines that a run outlives, and which errors are mistakes of the user."""

import errno
import io
import sys
import time

import pytest

from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError
from longstride.launcher.output import (
    AgreedError,
    exit_codes,
    exit_on_mistake,
    messages,
    mistake,
    nonblocking_output,
    print_if_slow,
    report,
    say,
)
from longstride.launcher.output.lasting import LastingOutput


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("train.steps=0: must be positive"), "train.steps=0: must be positive"),
        (DataError("data: no such folder"), "data: no such folder"),
        (AgreedError("data: damaged"), "data: damaged"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "gone"), "gone: No such file or directory"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "standard output, or a file: cannot be written: No space left on device; write to a disk with free space",
        ),
        (
            OSError(errno.EFBIG, "File too large"),
            "a file: is larger than this process may write; raise the limit on file sizes (`ulimit -f`)",
        ),
        (OSError(errno.EINVAL, "Invalid argument"), None),
        (OSError("torn"), None),
        (ValueError("unforeseen"), None),
    ],
    ids=repr,
)
def test_mistake_of_the_user_has_a_message(error: Exception, message: str | None) -> None:
    assert mistake(error) == message


def test_report_says_each_problem_in_a_line_and_raises_what_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(AgreedError("first\nsecond")) == exit_codes.WRONG_INPUT
    assert capsys.readouterr().err == "longstride: error: first\nlongstride: error: second\n"
    with pytest.raises(ValueError, match="unforeseen"):
        report(ValueError("unforeseen"))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_agreed_mistake_is_reported_by_the_first_rank_before_all_leave(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    reported: list[str] = []
    with pytest.raises(SystemExit) as ended, exit_on_mistake(lambda: reported.append(capsys.readouterr().err)):
        raise AgreedError("damaged")
    assert ended.value.code == exit_codes.WRONG_INPUT
    assert reported == ["longstride: error: damaged\n" if rank == "0" else ""]


@pytest.mark.parametrize("number", [5, 32])
def test_output_outlives_its_reader(number: int) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

        def flush(self) -> None:
            self.write("")

    output = LastingOutput(Gone())
    output.write("x\n")
    output.flush()
    assert output.encoding is None  # what else is asked of a stream is the stream's


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_costs_a_log_its_lines_and_a_result_its_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "full")

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    with nonblocking_output():
        print("x", file=sys.stderr, flush=True)
        say("x")
        with pytest.raises(OSError, match="full"):
            print("x")


@pytest.mark.parametrize(("seconds", "said"), [(0.0, ""), (0.5, "longstride: building …\n")])
def test_what_is_slow_is_said_and_what_is_quick_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seconds: float, said: str
) -> None:
    monkeypatch.setattr(messages, "_SLOW_SECONDS", 0.1)
    monkeypatch.delenv("RANK", raising=False)
    with print_if_slow("building"):
        time.sleep(seconds)
    time.sleep(0.2)
    assert capfd.readouterr().err == said
