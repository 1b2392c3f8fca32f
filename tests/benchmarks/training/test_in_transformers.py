"""The benchmarks of our attention in a Llama of transformers: the page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.training import dense_to_sparse, in_transformers

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.clients
def test_a_small_model_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--contexts", "256", "--threads", "1", "--width", "64", "--repeats", "2"]
    in_transformers.main([*sizes, "--output", str(output)])
    (result,) = json.loads(output.read_text())["cases"]
    assert len(result["step_seconds"]) == 1 + len(in_transformers.PATTERNS)
    assert all(len(steps) == 2 and min(steps) > 0 for steps in result["step_seconds"].values())


@pytest.mark.clients
def test_a_small_model_goes_from_dense_to_sparse(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    sizes = ["--layers", "1", "--width", "16", "--context", "64", "--dense-steps", "2", "--more-steps", "1"]
    dense_to_sparse.main([*sizes, "--output", str(output)])
    assert all(0 < bits < 10 for bits in json.loads(output.read_text())["bits_per_byte"].values())
