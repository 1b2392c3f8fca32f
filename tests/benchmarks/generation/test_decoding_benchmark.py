"""The benchmark of one query at a time runs, writes what it measured, and keeps what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.generation import decoding

ROOT = Path(__file__).resolve().parents[3]


def test_a_small_run_writes_a_row_a_pattern_and_context(tmp_path: Path) -> None:
    output = tmp_path / "decoding.json"
    arguments = ["--contexts", "256", "1024", "--heads", "2", "--head-width", "16", "--calls", "2", "--repeats", "1"]
    with torch.no_grad():  # restored at the end
        assert decoding.main([*arguments, "--device", "cpu", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert {"device", "torch", "date", "threads"} <= set(found)
    assert len(found["timings"]) == 2 * len(decoding.patterns_of(16))
    assert found["growth"]["dense"]["keys_read"] == 1.0
    assert found["growth"]["local"]["keys_read"] == found["growth"]["column"]["keys_read"] == 0.5
    with pytest.raises(SystemExit):
        decoding.read_options(["--output", str(output)])


def test_the_gate_finds_a_wrong_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decoding.CachedAttention, "__call__", lambda self, q, position: torch.zeros_like(q))
    with torch.no_grad():
        assert decoding.main(["--device", "cpu", "--output", str(tmp_path / "none.json")]) == 1
    assert not (tmp_path / "none.json").exists()
