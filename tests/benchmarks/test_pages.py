"""Documents say what the committed result files say."""

import importlib.util
import re
from typing import Any

import pytest

from benchmarks import reach
from benchmarks.tables import REACH_PICTURE, ROOT, TABLES, Table, main, results

Result = dict[str, Any]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.name} of {table.page}")
def test_a_page_has_the_table_of_its_result_files(table: Table) -> None:
    page = (ROOT / table.page).read_text()
    assert table.replaced(page) == page, "run python -m benchmarks.tables"


def test_programs_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in re.findall(r"python -m (benchmarks[\w.]*\w)", page.read_text())}
    assert len(names) > 10 and all(importlib.util.find_spec(name) for name in names)


def test_a_table_replaces_what_stood_between_its_marks() -> None:
    begin = "<!-- cats: made by benchmarks/tables.py -->"
    page = Table("page.md", "cats", lambda: "new\n").replaced(f"before {begin}\nold\n<!-- end --> <!-- end -->")
    assert page == f"before {begin}\nnew\n<!-- end --> <!-- end -->"


def test_pictures_are_there_and_reach_is_drawn_from_its_results() -> None:
    assert all((ROOT / f"benchmarks/results/{result['name']}.png").is_file() for result in results("paper", "scaling"))
    assert REACH_PICTURE.read_text() == reach.drawing(results("reach")[-1])


def test_an_unknown_table_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["cats"])
    assert "cats: must be one of attention, " in capsys.readouterr().err.splitlines()[-1]


def data_rows(result: Result) -> list[list[str]]:
    by_set: dict[str, list[Result]] = {}
    for row in result["throughput"]:
        by_set.setdefault(row["set"], []).append(row)
    rows = [[name, *(f"{row['bytes_per_second'] / 1e6:.0f}" for row in some)] for name, some in by_set.items()]
    (readers,) = {tuple(row["reader"] for row in some) for some in by_set.values()}
    return [["MB/s", *readers], *rows]


def test_the_page_of_the_loader_s_speed_has_its_results() -> None:
    (result,), page = results("data"), (ROOT / "docs/data/order.md").read_text()
    for cells in data_rows(result):
        assert f"| {' | '.join(cells)} |" in page
    start = result["start"]
    assert f"{start['shards']:,} shards" in page and f"{start['opened_seconds']:.1f} s" in page
    assert f"{start['memory_bytes'] / 1e6:.0f} MB" in page
