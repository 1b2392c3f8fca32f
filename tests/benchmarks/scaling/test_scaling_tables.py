"""docs/clusters.md says what the result file of benchmarks/scaling/scaling.py says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.tables import (
    BEGIN,
    END,
    PAGE,
    checks_lines,
    plot,
    results,
    with_memory,
    with_tables,
    zero_table,
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(results()[0].read_text())


def test_the_page_agrees_with_the_results(found: dict[str, Any]) -> None:
    path, memory = results()
    page = PAGE.read_text()
    assert with_tables(page, found, path.with_suffix(".png").name) == page, "run python benchmarks/scaling/tables.py"
    assert with_memory(page, json.loads(memory.read_text())) == page, "run python benchmarks/scaling/tables.py"
    assert path.with_suffix(".png").is_file()


def test_what_was_predicted_was_counted(found: dict[str, Any]) -> None:
    assert [each["ranks"] for each in found["checks"] if not each["fake"]] == [1, 2, 3, 4]
    assert any(each["fake"] and each["ranks"] >= 8 for each in found["checks"])
    for each in found["checks"]:
        assert not each["differences"]
        titles = {row["case"] for row in each["cases"]}
        assert all(any(title.startswith(f"ZeRO {stage}, {kind}") for title in titles)
                   for stage in range(4) for kind in ("fp16", "bf16", "fp32"))  # fmt: skip


def test_a_difference_would_be_told(found: dict[str, Any]) -> None:
    assert " 0 differ" in checks_lines(found)
    first, *others = found["checks"]
    changed = {**found, "checks": [{**first, "differences": ["one"]}, *others]}
    assert " 1 differ" in checks_lines(changed)


def test_shared_contexts_were_counted(found: dict[str, Any]) -> None:
    for ranks in (2, 3, 4):
        (check,) = (each for each in found["checks"] if each["ranks"] == ranks)
        titles = [row["case"] for row in check["cases"]]
        for size in (size for size in (2, 3, 4) if ranks % size == 0):
            for way in ("heads", "keys", "auto"):
                assert sum(f"a context over {size}, by {way}" in title for title in titles) == 9


def test_activations_fall_as_positions_do() -> None:
    found = json.loads(results()[1].read_text())
    assert found["context"] == 65_536
    (whole,) = (row for row in found["rows"] if row["processes"] == 1)
    assert {row["processes"] for row in found["rows"]} == {1, 2, 4}
    for row in found["rows"]:
        size = row["processes"]
        assert len(row["found"]) == size
        for name in ("tensors", "beyond"):
            alone = whole["found"][0][name]
            assert all(each[name] * size == pytest.approx(alone, rel=0.1) for each in row["found"])
        assert row["planned"]["peak"] == row["found"][-1]["tensors"]  # to the byte, of the last process


def test_ranks_read_what_one_process_would(found: dict[str, Any]) -> None:
    order = found["order"]
    assert order["shards"] == 100_000 and all(row["equal"] for row in order["ranks"])
    assert [row["ranks"] for row in order["ranks"]] == [2**power for power in range(13)]


def test_the_prose_says_what_the_table_says(found: dict[str, Any]) -> None:
    by_name = {run["name"]: run for run in found["runs"]}

    def row(name: str, cards: int, stage: int) -> dict[str, Any]:
        (one,) = (x for x in by_name[name]["cards"] if (x["cards"], x["stage"]) == (cards, stage))
        return one

    for name in ("enwik8_fixed", "music_65k"):  # a third less under ZeRO 0 than under ZeRO 1; calls before bytes
        zero, one, three = (row(name, 4096, stage) for stage in (0, 1, 3))
        sent = [sum(each["sent"].values()) for each in (zero, one, three)]
        assert sent[0] / sent[1] == pytest.approx(2 / 3, rel=0.01)
        assert sent[2] / sent[0] == pytest.approx(1, rel=0.02)
        assert zero["calls"] == 1 and 100 < three["calls"] < 1000
        assert zero["peak_bytes"] < 16 * 2**30
        shared = [x["heads_sent"] for x in by_name[name]["divided"] if x["ranks"] > 1]
        assert shared == sorted(shared, reverse=True) and shared[0] > 2 * sent[0]
    for run in found["runs"]:  # by keys and columns a half to an eighth, of music a fourth or less
        times = [x["heads_sent"] / x["sent"] for x in run["divided"] if x["ranks"] > 1]
        assert max(times) < 8.1 and min(times) > (4 if "music" in run["name"] else 1.9)
    wide = [row("music_65k, widened", 4096, stage) for stage in range(4)]
    assert wide[0]["peak_bytes"] > 80 * 2**30 > wide[3]["peak_bytes"]
    assert sum(wide[3]["sent"].values()) > 1.4 * sum(wide[0]["sent"].values())
    assert {run["largest"]["cards_of_one_context"] for run in found["runs"]} <= set(range(1, 17))
    assert by_name["enwik8_fixed"]["largest"]["bytes_of_a_step_on_4096"] > 45_000_000  # of 90,000,000 to train on


def test_tables_replace_what_stood_there(found: dict[str, Any]) -> None:
    page = with_tables(f"before {BEGIN}\nold\n{END} after", found, "x.png")
    assert page.startswith("before ") and page.endswith(" after") and "old" not in page
    assert zero_table(found) in page and "results/x.png" in page


def test_the_picture_has_a_line_for_every_stage(found: dict[str, Any], tmp_path: Path) -> None:
    plot(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 20_000
