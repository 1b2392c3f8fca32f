"""The command that runs every check and measurement on a GPU, rehearsed on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_session.sh"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20  # of a part


def session(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *words, "--python", sys.executable], capture_output=True, text=True)


@pytest.mark.parametrize(
    "words", [(), ("8",), ("1", "2", "--seconds", "soon"), ("1", "--wheels", "/nowhere"), ("1", "--output")]
)
def test_wrong_words_end_in_one_line(words: tuple[str, ...]) -> None:
    done = session(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_a_log_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "part2.log").write_text("precious")
    done = session("2", "--rehearse", "--output", str(tmp_path))
    assert done.returncode == 2 and "--overwrite" in done.stderr
    assert (tmp_path / "part2.log").read_text() == "precious"


def test_what_no_longer_fits_is_left_out_and_named(tmp_path: Path) -> None:
    done = session("6", "2", "--rehearse", "--seconds", "1", "--output", str(tmp_path))
    assert done.returncode == 0 and [path.name for path in tmp_path.iterdir()] == ["part62.log"]
    said = (tmp_path / "part62.log").read_text().split("outcome")[-1]
    assert [line.split()[0] for line in said.splitlines() if "not run" in line] == ["machine", "paper", "tuning"]


@pytest.mark.parametrize("words", [(), ("here", "there"), ("here", "--for", "4"), ("here", "--python")])
def test_collecting_wheels_with_wrong_words_ends_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run([str(SCRIPT.with_name("wheels.sh")), *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def rehearse(part: str, folder: Path) -> str:
    done = session(part, "--rehearse", "--seconds", "900", "--output", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    files = list(folder.iterdir())
    assert len(files) <= MOST_FILES and all(path.stat().st_size < MOST_BYTES for path in files)
    assert (folder / f"part{part}.log").read_text().splitlines()[-1].startswith(f"parts {part}:")
    return done.stdout


@pytest.mark.campaign
def test_the_bars_run_from_end_to_end(tmp_path: Path) -> None:
    said = rehearse("3", tmp_path)
    assert "failed" not in said.split("outcome")[-1] and "timed out" not in said.split("outcome")[-1]
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("bars-*.json"))
    assert len(found["timings"]) == 9 and found["failures"] == []
    assert "not measured" in said


@pytest.mark.campaign
@pytest.mark.parametrize("part", ["1", "2", "4", "6", "7"])
def test_another_part_runs_from_end_to_end(part: str, tmp_path: Path) -> None:
    rehearse(part, tmp_path)
