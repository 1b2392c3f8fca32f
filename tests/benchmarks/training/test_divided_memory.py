"""The benchmark of processes that share a context, on a short one."""

import json
from pathlib import Path

import pytest

from benchmarks.training import divided_memory


@pytest.mark.campaign
def test_processes_make_the_tensors_that_are_planned(tmp_path: Path) -> None:
    output = tmp_path / "memory.json"
    changes = ["model.layers=2", "model.attention.stride=64", "model.embedding.row_width=64"]
    assert divided_memory.main(["--context", "4096", "--output", str(output), *changes]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["processes"], row["exchange"]) for row in rows] == list(divided_memory.SHARED)
    for row in rows:
        found = row["found"]
        assert len(found) == row["processes"]
        last = found[-1]
        assert (last["kept"], last["tensors"]) == (row["planned"]["kept"], row["planned"]["peak"])
