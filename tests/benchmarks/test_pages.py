"""Documents say what the committed result files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import lessons, readme_table, recipe, systems
from benchmarks.paper import tables as paper_tables
from benchmarks.report import RESULTS
from benchmarks.training import dense_to_sparse, growth, in_transformers
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
        ("docs/systems.md", growth.with_tables),
        (
            "docs/results.md",
            lambda text: paper_tables.with_tables(text, paper_tables.result_files(RESULTS)),
        ),
    ],
)
def test_a_page_has_the_tables_that_its_script_makes(name: str, make: Callable[[str], str]) -> None:
    assert make(page(name)) == page(name)


@pytest.mark.parametrize(
    ("stem", "table"), [("in-transformers", in_transformers.table), ("dense-to-sparse", dense_to_sparse.table)]
)
def test_a_page_has_a_script_s_table(stem: str, table: Callable[[Result], str]) -> None:
    assert table(committed(stem)) in page("docs/clients.md")


def decoding_rows(result: Result) -> list[list[str]]:
    return [
        [
            name,
            *(f"{row['seconds'] * 1e3:.2f}" for row in result["timings"] if row["pattern"] == name),
            *(f"{growth[key]:.2f}" for key in ("seconds", "keys_read")),
        ]
        for name, growth in result["growth"].items()
    ]


def serving_rows(result: Result) -> list[list[str]]:
    return [
        [
            f"{row['layers']} layers of width {row['width']}",
            *(f"{row[way]:,.0f}" for way in ("after", "at_once", "shared")),
            f"{row['times']:.1f}×",
            str(row["other_bytes"]),
        ]
        for row in result["timings"]
    ]


def compiled_rows(result: Result) -> list[list[str]]:
    return [
        [
            row["dtype"],
            *(f"{1e3 * row[name]:.0f} ms" for name in ("seconds", "compiled_seconds")),
            f"{row['ratio']:.2f}",
            *(f"{row[name]:.0f} s" for name in ("cold_seconds", "warm_seconds")),
        ]
        for row in result["steps"]
    ]


def export_rows(result: Result) -> list[list[str]]:
    assert all(row["within_bar"] for row in result["cases"])
    return [
        [
            row["dtype"],
            row["shard_size"],
            "yes" if row["checked"] else "no",
            *(f"{row[f'{name}_bytes'] / 1e6:,.0f}" for name in ("bar", "above_start_private", "peak_resident")),
        ]
        for row in result["cases"]
    ]


def data_rows(result: Result) -> list[list[str]]:
    by_set: dict[str, list[Result]] = {}
    for row in result["throughput"]:
        by_set.setdefault(row["set"], []).append(row)
    rows = [[name, *(f"{row['bytes_per_second'] / 1e6:.0f}" for row in some)] for name, some in by_set.items()]
    (readers,) = {tuple(row["reader"] for row in some) for some in by_set.values()}
    return [["MB/s", *readers], *rows]


def long_context_rows(result: Result) -> list[list[str]]:
    return [
        [
            f"{row['context']:,}",
            f"{row['stride']:,}",
            *(f"{row[name]:.0f}" for name in ("step_seconds", "evaluation_seconds")),
            f"{row['peak_bytes'] / 2**30:.1f}",
        ]
        for row in result["rows"]
    ]


@pytest.mark.parametrize(
    ("stem", "name", "rows"),
    [
        ("decoding", "docs/kernels.md", decoding_rows),
        ("serving", "docs/serving.md", serving_rows),
        ("compiled", "docs/training/speed.md", compiled_rows),
        ("export", "docs/training/export.md", export_rows),
        ("data", "docs/data/order.md", data_rows),
        ("long-context", "docs/results.md", long_context_rows),
    ],
)
def test_a_page_has_the_rows_of_a_result(stem: str, name: str, rows: Callable[[Result], list[list[str]]]) -> None:
    for cells in rows(committed(stem)):
        assert f"| {' | '.join(cells)} |" in page(name)


def test_the_start_of_many_shards_is_told() -> None:
    start, text = committed("data")["start"], page("docs/data/order.md")
    assert f"{start['shards']:,} shards" in text and f"{start['opened_seconds']:.1f} s" in text
    assert f"{start['memory_bytes'] / 1e6:.0f} MB" in text
