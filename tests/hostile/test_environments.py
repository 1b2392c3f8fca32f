"""Working command lines on machines that lack something: a home, room on the disk, a reader, a locale, a folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.runs import ROOT, plain_environment
from tests.hostile.commands import Commands, Outcome, words_of

# Each writes its files, if any, to {output}. The doctor ends with 1 if something is broken on this machine.
WORKING = (
    "plan run.json",
    "new mine --data data --output {output}/mine.json",
    "report run --quick --output {output}/report.html",
    "doctor",
    "completion bash",
)


@pytest.fixture
def run(commands: Commands, place: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Return a function of a command line, and of options of `Commands`, that runs it in `place`."""
    return lambda words, **options: commands(*words_of(words, output=tmp_path), folder=place, **options)


def run_in_shell(before: str, words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a separate process, after a shell command."""
    script = f"{before} exec {sys.executable} -m longstride.launcher.cli {words}"
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"HOME": None}, id="no HOME"),
        pytest.param({"HOME": "/nowhere"}, id="HOME is not there", marks=pytest.mark.campaign),
        pytest.param({"COLUMNS": "0"}, id="narrow"),
    ],
)
@pytest.mark.parametrize("words", [*WORKING, "data verify data", "evaluate run", "sample model --bytes 4"])
def test_verbs_work_in_a_bare_environment(
    run: Callable[..., Outcome], words: str, environment: dict[str, str | None]
) -> None:
    outcome = run(words, environment=environment)
    assert outcome.code == 0 or (words == "doctor" and outcome.code == 1), outcome.err
    assert "Traceback" not in outcome.err and "a process that imports it" not in outcome.out


@pytest.mark.parametrize("words", WORKING)
def test_a_full_disk_at_standard_output_is_told_in_one_line(run: Callable[..., Outcome], words: str) -> None:
    line = "standard output, or a file: cannot be written: No space left on device; write to a disk with free space"
    assert run(words, stdout="full").check_refused() == line


@pytest.mark.parametrize("words", WORKING)
def test_verbs_end_quietly_when_their_reader_goes_away(run: Callable[..., Outcome], words: str) -> None:
    outcome = run(words, stdout="closed")
    assert (outcome.code, outcome.err) == (141, "")


@pytest.mark.parametrize("words", [*WORKING[1:3], "config schema --output {output}/new.json"])
def test_a_file_that_does_not_fit_is_absent(run: Callable[..., Outcome], tmp_path: Path, words: str) -> None:
    line = run(words, limits=[("RLIMIT_FSIZE", 1000)]).check_refused()
    assert line.startswith(f"--output={tmp_path}/") and ": cannot be written: File too large" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [("plan run.json --processes 3", 2), *((words, 0) for words in WORKING)],
    ids=lambda value: str(value)[:40],
)
def test_an_ascii_locale_gets_every_line_in_ascii(place: Path, tmp_path: Path, words: str, code: int) -> None:
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    ended = run_in_shell("", words.format(output=tmp_path), place, **ascii_locale)
    assert ended.returncode == code or (words == "doctor" and ended.returncode == 1), ended.stderr
    assert "Traceback" not in ended.stderr and ended.stdout.isascii()


@pytest.mark.parametrize("words", [*WORKING, "train --config run.json", "serve model"])
def test_a_removed_working_directory_is_told(tmp_path: Path, words: str) -> None:
    (tmp_path / "gone").mkdir()
    ended = run_in_shell(f"rmdir {tmp_path / 'gone'} &&", words, tmp_path / "gone")
    line = "longstride: error: the working directory has been removed; change to one that exists\n"
    assert (ended.returncode, ended.stderr) == (2, line)


def test_a_limit_on_file_sizes_is_told(place: Path, tmp_path: Path) -> None:
    words = f"train --config run.json train.output={tmp_path / 'run'}"
    ended = run_in_shell("ulimit -f 1;", words, place)
    assert ended.returncode == 2, ended.stderr
    assert "raise the limit on file sizes" in ended.stderr and "Traceback" not in ended.stderr
