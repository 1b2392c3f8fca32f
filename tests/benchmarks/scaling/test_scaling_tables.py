"""The prose of docs/clusters.md says what the result files say."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling.tables import plot
from benchmarks.tables import results


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (result,) = results("scaling")
    return result


def test_activations_fall_as_positions_do() -> None:
    (found,) = results("divided-memory")
    assert found["context"] == 65_536
    (whole,) = (row for row in found["rows"] if row["processes"] == 1)
    assert {row["processes"] for row in found["rows"]} == {1, 2, 4}
    for row in found["rows"]:
        size = row["processes"]
        assert len(row["found"]) == size
        alone = whole["found"][0]["tensors"]
        assert all(each["tensors"] * size == pytest.approx(alone, rel=0.1) for each in row["found"])
        assert row["planned"]["peak"] == row["found"][-1]["tensors"]  # to the byte, of the last process


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


def test_the_picture_has_a_line_for_every_stage(found: dict[str, Any], tmp_path: Path) -> None:
    plot(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 20_000
