"""The search for configurations, rehearsed in the interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ("dq", "closed", "closed_forward")  # of those to tune

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_tuning_drops_checks_times_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.attention import tune

    output = tmp_path / "tuning.json"
    command = [sys.executable, "-m", "benchmarks.attention.tune", "--device", "cpu", "--widths", "64"]
    command += ["--processes", "1", "--dtypes", "bfloat16", "--kernels", *KERNELS, "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(output.read_text())
    trials = found["trials"]
    assert [(one["kernel"], one["num_warps"]) for one in trials] == [(k, w) for k in KERNELS for w in (4, 16)]
    for one in trials:  # sixteen warps have no more rows than four, and repeat what those compute
        dropped = one["num_warps"] == 16
        assert (one["problem"] is not None) == dropped and (one["seconds"] is None) == dropped
        assert one["ahead"]["registers"] > 0 and (one["ahead"]["repeats"] > 1.2) == dropped
    warps = [(row["kernel"], one["num_warps"]) for row in found["rows"] for one in row["candidates"]]
    assert warps == [(kernel, 4) for kernel in KERNELS]
    with pytest.raises(SystemExit) as ended:
        tune.main(["--device", "cpu", "--output", str(output)])
    assert ended.value.code == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", ["forward", "closed_forward"])
def test_a_kernel_is_tried_where_another_one_would_serve(kernel: str) -> None:
    """Short columns are the closed runs' by default: of the general kernel they ask too, by its own configuration."""
    from benchmarks.attention import tune
    from longstride.kernels.backends.triton.launch_plan import Planner
    from longstride.kernels.patterns import Column

    case = tune.Case(kernel, Column(8), 64, "bfloat16", 64, 1, "cpu")  # type: ignore[arg-type]
    q = torch.empty(1, 1, case.context, case.width, dtype=torch.bfloat16)
    for one in tune.grid(case._replace(device="cuda"), "sm_90"):
        with tune.only(tune.Trial(case, one)):
            (choice,) = Planner((q, q, q), (case.pattern,)).choices("forward", "all")
        assert choice.configuration == one and choice.closed == (kernel == "closed_forward")
        assert choice.pairs == tune.pairs_of(case, one)


def test_rates_have_plans_choose_what_was_fastest() -> None:
    """Large tiles in long runs, small ones in short runs. Left out: what is never fastest, or unfit for a case."""
    from benchmarks.attention.tune import Case, Trial, fitted, pairs_of
    from longstride.kernels.backends.triton.configurations import Configuration, choose
    from longstride.kernels.backends.triton.packing import groups
    from longstride.kernels.patterns import Column, Local

    large, small, slow, unfit = (Configuration(edge, edge, 4, 2) for edge in (128, 32, 64, 16))
    cases = [Case("dq", p, 4_096, "bfloat16", 64, 1, "cuda") for p in (Local(1_024), Column(128), Column(64))]
    seconds = {large: (1.0, 3.0, 2.0), small: (4.0, 1.0, 1.9), slow: (2.0, 2.0, 2.5), unfit: (None, 0.5, 0.5)}
    trials = [Trial(case, one) for case in cases for one in seconds]
    rows = [
        {"seconds": times[number], "problem": None if times[number] else "spills"}
        for number in range(3)
        for times in seconds.values()
    ]
    found = fitted(trials, rows)
    assert {one._replace(rate=1.0) for one in found} == {large, small} and max(one.rate for one in found) == 1
    for case, fastest in zip(cases, (large, small, small), strict=True):
        (choice,) = choose(found, groups((case.pattern,), case.context, "queries", "all"), "queries")
        assert choice.configuration._replace(rate=1.0) == fastest and choice.pairs == pairs_of(case, fastest)


def test_queries_without_keys_are_no_difference() -> None:
    from benchmarks.attention.tune import finite

    lse = torch.tensor([-torch.inf, 1.0])
    assert finite(lse).tolist() == [0.0, 1.0] and not finite(torch.tensor([torch.nan])).isfinite()
