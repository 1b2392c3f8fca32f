"""Documents say what the committed result files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import lessons, readme_table, recipe, systems
from benchmarks.paper import tables as paper_tables
from benchmarks.report import RESULTS
from tests.harness.runs import ROOT

Result = dict[str, Any]


def committed(stem: str) -> Result:
    """Return the one result file of a benchmark."""
    (path,) = RESULTS.glob(f"{stem}-*.json")
    result: Result = json.loads(path.read_text())
    return result


def page(name: str) -> str:
    """Return a document."""
    return (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("README.md", lambda _: readme_table.with_tables(readme_table.README)),
        ("docs/kernels.md", lambda _: readme_table.with_tables(readme_table.DETAILS)),
        ("docs/recipes.md", recipe.with_table),
        ("docs/recipes.md", lessons.with_tables),
        ("docs/systems.md", systems.with_table),
        (
            "docs/results.md",
            lambda text: paper_tables.with_tables(text, paper_tables.result_files(RESULTS)),
        ),
    ],
)
def test_a_page_has_the_tables_that_its_script_makes(name: str, make: Callable[[str], str]) -> None:
    assert make(page(name)) == page(name)


def data_rows(result: Result) -> list[list[str]]:
    by_set: dict[str, list[Result]] = {}
    for row in result["throughput"]:
        by_set.setdefault(row["set"], []).append(row)
    rows = [[name, *(f"{row['bytes_per_second'] / 1e6:.0f}" for row in some)] for name, some in by_set.items()]
    (readers,) = {tuple(row["reader"] for row in some) for some in by_set.values()}
    return [["MB/s", *readers], *rows]


def test_a_page_has_the_rows_of_the_loader_s_speed() -> None:
    for cells in data_rows(committed("data")):
        assert f"| {' | '.join(cells)} |" in page("docs/data/order.md")


def test_the_start_of_many_shards_is_told() -> None:
    start, text = committed("data")["start"], page("docs/data/order.md")
    assert f"{start['shards']:,} shards" in text and f"{start['opened_seconds']:.1f} s" in text
    assert f"{start['memory_bytes'] / 1e6:.0f} MB" in text
