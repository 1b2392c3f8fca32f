"""The benchmark of an export's memory: what it reads, its whole way in small, and what the docs say of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.machine import resident_bytes
from benchmarks.training import export

ROOT = Path(__file__).resolve().parents[3]


def test_watch_sees_memory_that_is_let_go_of() -> None:
    before = resident_bytes("RssAnon")
    watch = export.Watch(os.getpid())
    held = bytearray(b"x" * 50_000_000)
    while watch.peak < before + 40_000_000:
        pass
    del held
    assert watch.close() > before + 40_000_000


@pytest.mark.campaign
def test_small_run_is_saved_exported_and_measured(tmp_path: Path) -> None:
    words = ["--config", "paper_small", "--deepspeed", "zero3_fp32", "--ranks", "2", "--folder", str(tmp_path)]
    output = tmp_path / "found.json"
    export.main([*words, "--output", str(output), "data.path=nowhere"])
    found = json.loads(output.read_text())
    assert (found["world_size"], found["zero_stage"]) == (2, 3)
    assert [(row["dtype"], row["shard_size"], row["checked"]) for row in found["cases"]] == list(export.CASES)
    for row in found["cases"]:
        assert 0 < row["start_private_bytes"] < row["peak_private_bytes"] < row["peak_resident_bytes"]
        assert row["seen"].startswith("probe") and row["checked"] == ("trainer's" in row["seen"])
    with pytest.raises(SystemExit):
        export.read_options(["--output", str(output)])
