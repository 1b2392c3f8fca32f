"""The benchmark of n-gram tables, on small ones, and what the docs say of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import tables
from tests.harness.runs import ROOT


def test_both_ways_and_both_exchanges_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--contexts=2", "--context=32", "--rows=101", "--width=8", "--orders", "2", "3", "--repeats=4"]
    assert tables.main([*sizes, f"--output={tmp_path / 'tables.json'}"]) == 0
    found = json.loads((tmp_path / "tables.json").read_text())
    assert found["milliseconds"].keys() == {*tables.SPARSE_PARTS, "dense forward", "dense backward", "dense update"}
    assert found["exchange"]["sent_bytes"] == 64 * (2 * 8 + 4 * 2) and found["exchange"]["dense_bytes"] == 202 * 8 * 2
    assert "| rows touched |" in capsys.readouterr().out


def test_docs_say_what_was_measured() -> None:
    (path,) = (ROOT / "benchmarks/results").glob("tables-*.json")
    found = json.loads(path.read_text())
    each, exchanged = found["milliseconds"], found["exchange"]
    sparse = sum(each[part] for part in tables.SPARSE_PARTS)
    dense = sum(each.values()) - sparse
    text = " ".join((ROOT / "docs/architecture/launcher.md").read_text().split())
    exchanged_mb = [exchanged[f"{way}_bytes"] / 1e6 for way in ("dense", "sent")]
    assert f"{dense / 10:.0f}0 ms of a core and {exchanged_mb[0]:.0f} MB between two processes" in text
    assert f"the touched rows alone take {sparse:.0f} ms and {exchanged_mb[1]:.1f} MB (" in text
