"""The benchmark of plans against real steps, on a small run."""

import json
from pathlib import Path

import pytest

from benchmarks.training import plan_against_run


@pytest.mark.campaign
def test_a_small_run_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    changes = ["model.layers=2", "model.context=1024", "model.width=128"]
    assert plan_against_run.main(["--only", "text strided", "--output", str(output), *changes]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["held_bytes"] > row["planned_bytes"] / 2 > 0
    assert row["step_seconds"] > 0 and row["measured_seconds"] > 0 and row["by_products_seconds"] > 0
