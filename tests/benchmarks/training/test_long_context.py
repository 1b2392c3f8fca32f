"""The benchmark of a step over a long context, on a short one, and the docs' table of what it measured."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.training import long_context
from longstride.data_pipelines.shards.reading import DataFolder

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.campaign
def test_a_short_context_is_trained_and_measured(tmp_path: Path) -> None:
    output = tmp_path / "long.json"
    changes = ["model.layers=2", "model.width=32"]
    arguments = ["--contexts", "1024", "--folder", str(tmp_path), "--output", str(output), *changes]
    assert long_context.main(arguments) == 0
    found = json.loads(output.read_text())
    (row,) = found["rows"]
    assert (row["context"], row["stride"], found["changes"]) == (1024, 32, changes)
    assert row["step_seconds"] > 0 and row["peak_bytes"] > 2**27
    assert row["bits_per_byte"] == pytest.approx(8, abs=1e-3)  # before the first step
    assert list(tmp_path.iterdir()) == [output]


def test_the_sound_fills_a_context_and_the_short_one_is_held_out(tmp_path: Path) -> None:
    splits = DataFolder(long_context.make_sound(tmp_path, 2**16)).manifest.splits
    assert splits["train"].content_bytes >= 2**16
    assert splits["validation"].content_bytes == 4096


def test_a_context_without_a_root_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_context.read_options(["--contexts", "1000"])
    assert "--contexts=1000: must be a square; nearest 1024" in capsys.readouterr().err


def test_time_grows_no_faster_than_the_pairs() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("long-context-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows[-1]["context"] == 2**20 and rows[-1]["peak_bytes"] < 20 * 2**30
    for one, next_one in pairwise(rows):  # n·√n
        bound = (next_one["context"] / one["context"]) ** 1.5
        assert next_one["step_seconds"] < bound * one["step_seconds"]
        assert next_one["stride"] ** 2 == next_one["context"]
