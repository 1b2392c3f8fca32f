"""The benchmark of where a CPU's time goes, from its command line to its file, in the smallest sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.attention import cpu_time
from longstride.kernels.backends.cpu import attention, chunks, slabs


def test_one_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shipped = slabs.SCORES_IN_WORK, chunks.KEY_COST, attention.chunked
    output = tmp_path / "found.json"
    words = ["--context", "256", "--stride", "16", "--head-width", "16", "--repeats", "1", "--output", str(output)]
    assert cpu_time.main(words) == 0
    assert (slabs.SCORES_IN_WORK, chunks.KEY_COST, attention.chunked) == shipped
    found = json.loads(output.read_text())
    assert [row["pattern"] for row in found["shares"]] == list(cpu_time.NAMES)
    for row in found["shares"]:
        assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-3)
        assert row["shares"]["products"] > 0.02 and row["computed"] >= 1 and row["limit"] > 1
    assert [row["sizes"] for row in found["sizes"]] == list(cpu_time.SIZES)
    assert set(found["sizes"][0]["seconds_over_shipped"].values()) == {1.0}
    assert "products" in capsys.readouterr().out
