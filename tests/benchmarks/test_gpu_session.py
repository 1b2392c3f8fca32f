"""The command that runs every check and measurement on a GPU, rehearsed on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_session.sh"
MOST_FILES, MOST_BYTES = 8, 16 * 2**20  # of a part


def session(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *words, "--python", sys.executable], capture_output=True, text=True)


@pytest.mark.parametrize("words", [(), ("6",), ("1", "--wheels", "/nowhere"), ("1", "--output")])
def test_wrong_words_end_in_one_line(words: tuple[str, ...]) -> None:
    done = session(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_a_log_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "part2.log").write_text("precious")
    done = session("2", "--rehearse", "--output", str(tmp_path))
    assert done.returncode == 2 and "--overwrite" in done.stderr
    assert (tmp_path / "part2.log").read_text() == "precious"


def rehearse(part: str, folder: Path) -> str:
    done = session(part, "--rehearse", "--output", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    files = list(folder.iterdir())
    assert len(files) <= MOST_FILES and all(path.stat().st_size < MOST_BYTES for path in files)
    assert (folder / f"part{part}.log").read_text().splitlines()[-1].startswith(f"part {part}:")
    return done.stdout


@pytest.mark.campaign
def test_part_1_runs_from_end_to_end(tmp_path: Path) -> None:
    said = rehearse("1", tmp_path)
    assert "failed" not in said.split("outcome")[-1] and "timed out" not in said.split("outcome")[-1]
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("bars-*.json"))
    assert len(found["timings"]) == 8 and found["failures"] == []
    assert "not measured" in said


@pytest.mark.campaign
@pytest.mark.parametrize("part", ["2", "3", "5"])
def test_a_later_part_runs_from_end_to_end(part: str, tmp_path: Path) -> None:
    rehearse(part, tmp_path)
