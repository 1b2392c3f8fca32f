"""Kernels are compiled for a card that is not there, and lie where Triton looks for them."""

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import torch
from benchmarks.attention import ahead
from longstride.kernels.patterns import Block

every = ahead.tests
ahead.tests = lambda: [ahead.partial(ahead.passes, Block(16), (1, 1, 64, 16), torch.float16)]
code = ahead.main([sys.argv[1], "--parts", "tests"])
calls = [call for call in every() if call.args[0].__name__ == "test_results_are_within_precision"]
calls[0]()
print(code, len(calls))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_is_compiled_ahead_is_taken_along(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "kernels.tar.xz")],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    code, tests = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0 and tests > 10
    with tarfile.open(tmp_path / "kernels.tar.xz") as tar:
        names = {Path(name).name for name in tar.getnames()}
    assert {"closed_forward_kernel.cubin", "closed_kernel.cubin", "__grp__closed_kernel.json"} <= names
    assert all(name.endswith((".cubin", ".json")) for name in names)
