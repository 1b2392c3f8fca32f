"""Tests of the benchmark of saving, on a model of two layers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.harness.runs import ROOT, plain_environment

SMALL = ["--layers=2", "--width=32", "--context=64", "--steps=2", "--repeats=2"]


def test_both_ways_of_saving_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "saving.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/training/saving.py"),
        *SMALL,
        f"--folder={tmp_path}",
        f"--output={output}",
    ]
    ended = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(output.read_text())
    assert found["checkpoint_bytes"] > 12 * found["parameters"]  # master weights and two moments
    assert len(found["steps_alone_seconds"]) == 4
    for way in ("at once", "in the background"):
        assert len(found["ways"][way]["longer_seconds"]) == 2
        assert all(seconds > 0 for seconds in found["ways"][way]["still_seconds"])
        assert f"| {way} |" in ended.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saving.json"]
