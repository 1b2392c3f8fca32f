"""The benchmark of compiled blocks: what the docs say of it is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import compiled

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.campaign
def test_small_model_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    compiled.main(["--context", "128", "--batch", "1", "--width", "32", "--repeats", "2", "--output", str(output)])
    rows = json.loads(output.read_text())["steps"]
    assert [row["dtype"] for row in rows] == list(compiled.DTYPES)
    assert all(0 < row["warm_seconds"] < row["cold_seconds"] and row["ratio"] > 0 for row in rows)
