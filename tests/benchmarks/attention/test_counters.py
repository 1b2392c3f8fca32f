"""What ncu says is read as it writes it."""

import json
from pathlib import Path

import pytest

from benchmarks.attention import counters

DRAM = "dram__bytes.sum.per_second"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
RAW = f"""==PROF== Connected to process 7
"ID","Kernel Name","Grid Size","{DRAM}","{TENSOR}","gpu__time_duration.sum","l1tex__other"
"","","","byte/second","%","ns",""
"0","at::<unnamed>::spin_kernel(long)","(1, 1, 1)","0","0","1,000","1"
"1","forward_kernel","(4096, 1, 1)","12.5","71.25","1,234,567","1"
"2","at::<unnamed>::spin_kernel(long)","(1, 1, 1)","0","0","1,000","1"
"3","closed_kernel","(4096, 1, 1)","80","n/a","2,000","1"
"""


def test_launches_are_told_apart_by_case() -> None:
    first, second = counters.parsed(RAW)
    assert first["kernel"] == "forward_kernel" and first["pattern"] == str(counters.CASES[0][0])
    assert second["kernel"] == "closed_kernel" and second["context"] == counters.CASES[1][1]
    assert sorted(first["counters"].values()) == [12.5, 71.25, 1_235_000]
    assert len(second["counters"]) == 2  # what is no number is left out


def test_where_there_is_no_profiler_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    assert counters.main(["--output", str(tmp_path / "counters.json")]) == 0
    found = json.loads((tmp_path / "counters.json").read_text())
    assert found["launches"] == [] and found["reason"] == "ncu is not installed"
    assert "ncu is not installed" in capsys.readouterr().out
