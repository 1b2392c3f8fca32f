"""The host's time of a call, and that it is far from what it was where a plan is made."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.attention.host_time import BARS
from tests.harness.backends import WITH_TRITON

ROOT = Path(__file__).resolve().parents[3]


@WITH_TRITON
def test_calls_that_have_a_plan_cost_the_host_little(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention.host_time", "--repeats", "5", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.stdout.count("\n| ") == 4, done.stderr
    found = json.loads(output.read_text())
    assert [row["pattern"] for row in found["timings"]] == ["local", "block", "strided", "fixed"]
    for row in found["timings"]:
        assert row["decode_seconds"] > 0
        for phase in BARS:
            assert row[f"{phase}_again_seconds"] < 0.8 * row[f"{phase}_planned_seconds"], row
