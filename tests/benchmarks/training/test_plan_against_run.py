"""The benchmark of plans against real steps, on a small run; its committed results, and what the page says of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import plan_against_run
from tests.harness.runs import ROOT


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    """The result file, of runs that nobody changed."""
    (path,) = (ROOT / "benchmarks/results").glob("plan-against-run-*.json")
    found = json.loads(path.read_text())
    assert [row["name"] for row in found["rows"]] == [name for name, *_ in plan_against_run.RUNS]
    for row, (_, preset, changes) in zip(found["rows"], plan_against_run.RUNS, strict=True):
        assert row["preset"] == preset and row["changes"][: len(changes)] == list(changes)
    return found


def planned_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """All but the run that holds what no plan knows."""
    return [row for row in found["rows"] if row["name"] != plan_against_run.UNPLANNED]


@pytest.mark.campaign
def test_a_small_run_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    changes = ["model.layers=2", "model.context=1024", "model.width=128"]
    assert plan_against_run.main(["--only", "text strided", "--output", str(output), *changes]) == 0
    found = json.loads(output.read_text())
    (row,) = found["rows"]
    assert row["held_bytes"] > row["planned_bytes"] / 2 > 0
    assert row["step_seconds"] > 0 and row["measured_seconds"] > 0 and row["by_products_seconds"] > 0
    assert [each["precision"] for each in found["products"]] == ["fp32", "bf16"]


def test_plans_are_what_runs_took(committed: dict[str, Any]) -> None:
    """Memory within 10 %, seconds by one block of each kind within 20 %."""
    for row in planned_rows(committed):
        assert row["planned_bytes"] == pytest.approx(row["held_bytes"], rel=0.1), row["name"]
        assert row["measured_seconds"] == pytest.approx(row["step_seconds"], rel=0.2), row["name"]


def test_what_experts_hold_beyond_the_plan_is_what_products_keep(committed: dict[str, Any]) -> None:
    """In bf16 alone: memory for each number of rows that a product has had, up to a bound."""
    (row,) = (row for row in committed["rows"] if row["name"] == plan_against_run.UNPLANNED)
    fp32, bf16 = (each["kept_bytes"] for each in committed["products"])
    assert bf16[1] == pytest.approx(2 * bf16[0], rel=0.1) and bf16[2] == pytest.approx(bf16[1], rel=0.1)
    assert max(fp32) < bf16[0] / 50
    assert 0.2 * bf16[2] < row["held_bytes"] - row["planned_bytes"] < 1.1 * bf16[2]
    assert row["measured_seconds"] == pytest.approx(row["step_seconds"], rel=0.2)


def test_the_page_has_the_figures(committed: dict[str, Any]) -> None:
    rows, mib = planned_rows(committed), 2**20
    (experts,) = (row for row in committed["rows"] if row not in rows)
    _, (first, _, most) = (each["kept_bytes"] for each in committed["products"])
    memory, seconds, products = (
        [round(100 * row[ours] / row[real]) for row in rows]
        for ours, real in (
            ("planned_bytes", "held_bytes"),
            ("measured_seconds", "step_seconds"),
            ("by_products_seconds", "step_seconds"),
        )
    )
    page = " ".join((ROOT / "docs/experiments.md").read_text().split())
    for told in (
        f"Steps of {['five', 'six', 'seven'][len(rows) - 5]} runs on one core",
        f"planned are {min(memory)} to {max(memory)} % of what steps held",
        f"by `--measure` are {min(seconds)} to {max(seconds)} % of a step's seconds",
        f"take {min(products)} to {max(products)} % of them",
        f"{experts['planned_bytes'] / mib:.0f} MiB are planned and {experts['held_bytes'] / mib:,.0f} held",
        f"{first / plan_against_run.ROWS[0] / mib:.1f} MiB for each number, and {most / mib:.0f} MiB after "
        f"{plan_against_run.ROWS[-1]:,} of them",
    ):
        assert told in page, told
