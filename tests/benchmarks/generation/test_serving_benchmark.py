"""The benchmark of a server runs, writes what it measured, and the page says it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.generation import serving

ROOT = Path(__file__).resolve().parents[3]


def test_a_small_run_writes_a_row_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serving.SIZES, "small", (1, 32))
    output = tmp_path / "serving.json"
    arguments = ["--models", "small", "--bytes", "8", "--repeats", "1", "--output", str(output)]
    assert serving.main(arguments) == 0
    (row,) = json.loads(output.read_text())["timings"]
    assert row["times"] > 0 and all(row[way] > 0 for way in ("after", "at_once", "shared"))
    assert 0 <= row["other_bytes"] <= serving.REQUESTS
    monkeypatch.setattr(serving, "answer", lambda url, seed, count: object())
    assert serving.main([*arguments, "--overwrite"]) == 1
