"""The benchmark of growth, on small sizes, and what the page says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import growth


def test_both_parts_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts", "32", "128", "--window=8", "--experts", "1", "4", "--rows=16", "--width=16", "--repeats=1"]
    assert growth.main([*sizes, f"--output={tmp_path / 'growth.json'}"]) == 0
    found = json.loads((tmp_path / "growth.json").read_text())
    dense = [row for row in found["attention"] if row["attention"] == "dense"]
    assert dense[1]["pairs"] == growth.HEADS * 128 * 129 // 2
    heads_bytes = growth.HEADS * growth.HEAD_WIDTH * 4
    assert all(row["peak_bytes"] >= 4 * row["context"] * heads_bytes for row in dense[:2])  # output and three gradients
    assert [row["experts"] for row in found["experts"]] == [0, 1, 4] * 2
    one, four = found["experts"][1:3]
    assert four["parameters"] == 4 * one["parameters"]
    assert four["operations"] - one["operations"] == 3 * 2 * 16  # the router's
    assert "| 4 experts |" in capsys.readouterr().out


def test_longformer_grows_as_the_context_and_experts_cost_little_more() -> None:
    """What the page says of the committed file: four times the context, and up to eight experts."""
    (path,) = growth.RESULTS.glob("growth-*.json")
    found = json.loads(path.read_text())
    for dtype in growth.DTYPES:
        grown = {}
        for kind in ("longformer", "dense"):
            short, long = (row for row in found["attention"] if (row["dtype"], row["attention"]) == (dtype, kind))
            assert (short["context"], long["context"]) == (3_072, 12_288)
            grown[kind] = [long[key] / short[key] for key in ("seconds", "peak_bytes")]
        assert max(grown["longformer"]) < 4.4 < 12 < grown["dense"][0]
        dense, one, *others = (row for row in found["experts"] if row["dtype"] == dtype)
        assert (dense["experts"], one["experts"]) == (0, 1)
        for row in (one, *others):
            assert row["parameters"] == row["experts"] * one["parameters"]
            assert row["operations"] < 1.005 * dense["operations"] and row["seconds"] < 1.25 * dense["seconds"]
