"""The search for configurations, rehearsed in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_tuning_checks_and_times_every_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.attention import tune

    output = tmp_path / "tuning.json"
    command = [sys.executable, "benchmarks/attention/tune.py", "--device", "cpu", "--widths", "16", "--processes", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command += ["--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    trials = json.loads(output.read_text())["trials"]
    assert {trial["kernel"] for trial in trials} == {"forward", "dkdv", "dq", "closed"}
    assert all(trial["problem"] is None and trial["seconds"] > 0 for trial in trials)
    assert any(trial["described"] for trial in trials)
    with pytest.raises(SystemExit) as ended:
        tune.main(["--device", "cpu", "--output", str(output)])
    assert ended.value.code == 2 and "exists already" in capsys.readouterr().err
