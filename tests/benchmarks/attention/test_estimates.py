"""What a card should reach, by a model: how it does on published rates, and what it makes of evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from benchmarks.attention import estimates
from benchmarks.attention.estimates import KNOWN, Case, Evidence, predicted
from longstride.kernels.patterns import Column, Local


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.what)
def test_the_model_is_within_a_tenth_of_published_rates(known: estimates.Known) -> None:
    assert predicted(known) == pytest.approx(known.tflops, rel=0.1)


def rows_for(case: Case, instructions: int) -> list[dict[str, Any]]:
    """Evidence for whatever configuration a case asks for."""
    kernels: dict[estimates.Kernel, str] = {"forward": "natural", "closed_forward": "folded"}
    visit = {"instructions": instructions, "products": {"64x64x16": 8}, "special": 34}
    return [
        {"kernel": kernel, "dtype": "bfloat16", "width": case.width, "shape": shape, **one._asdict()}
        | {"visits": [visit, visit], "outside": 700, "programs": 1, "repeats": 1.0}
        for kernel, shape in kernels.items()
        for one in estimates.candidates(kernel, "sm_90", 2, case.width)
    ]


def test_more_instructions_take_longer_down_to_what_memory_gives() -> None:
    window, column = Case("", Local(256), 4_096, 64, heads=8), Case("", Column(64), 4_096, 64, heads=64, batch=8)
    quick, slow = (window.forward(Evidence(rows_for(window, count))) for count in (300, 600))
    assert quick < slow < 2 * quick
    least = 4 * 2 * 8 * 64 * 4_096 * 64 / estimates.BANDWIDTH
    assert column.forward(Evidence(rows_for(column, 10))) == pytest.approx(least)


def test_missing_evidence_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "evidence.json"
    file.write_text(json.dumps({"tritons": {"3.6.0": {"kernels": []}}}))
    assert estimates.main(["--evidence", str(file), "--output", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"estimates: {file}: LookupError: ") and said.count("\n") == 1
    assert not (tmp_path / "out.json").exists()
