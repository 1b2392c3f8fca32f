"""The benchmark of plans against real steps: on a small run, and what the committed file says."""

import json
from pathlib import Path

import pytest

from benchmarks.report import RESULTS
from benchmarks.training import plan_against_run


def test_committed_plans_are_near_their_runs() -> None:
    """Memory within 10 %, seconds within 20 %, of five runs."""
    (path,) = RESULTS.glob("plan-against-run-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [name for name, *_ in plan_against_run.RUNS]
    for row in rows:
        assert row["bytes_ratio"] == pytest.approx(row["planned_bytes"] / row["held_bytes"], rel=1e-3)
        assert 0.9 <= row["bytes_ratio"] <= 1.1, row["name"]
        assert 0.8 <= row["seconds_ratio"] <= 1.2, row["name"]


@pytest.mark.campaign
def test_a_small_run_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    changes = ["model.layers=2", "model.context=1024", "model.width=128"]
    assert plan_against_run.main(["--only", "text strided", "--output", str(output), *changes]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["held_bytes"] > row["planned_bytes"] / 2 > 0
    assert row["step_seconds"] > 0 and row["measured_seconds"] > 0 and row["by_products_seconds"] > 0
