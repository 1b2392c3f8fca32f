"""How busy a card's matrix units and memory are under our kernels: ``python benchmarks/attention/counters.py``.

Nsight Compute (``ncu``, where it is installed) reads the card's counters of every launch of a forward and a backward
pass of a few cases, after passes that compile; the card's clocks are left as they are. Each launch is replayed several
times, so that its time is not that of a benchmark; shares of the peak are what is asked for. A table goes to the
terminal, a row a launch to JSON. Without ``ncu``, or where it may not read counters, the file says so.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.machine import about, slug
from benchmarks.report import add_output_arguments, cell, check_output, rounded, write_json
from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Column, Fixed, Local, Pattern

CASES: tuple[tuple[Pattern, int, int, int], ...] = (  # pattern, context, heads, width
    (Local(1_024), 32_768, 16, 128),
    (Column(128), 12_288, 64, 64),
    (Fixed(128, 8), 12_288, 64, 64),
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
BETWEEN = "spin_kernel"  # torch's own sleep on the card, launched before each case: it tells them apart
OURS = "forward|dkdv|dq|closed|delta|gather"
SHOWN = {  # what the table has: a counter, and what it is divided by
    "ms": ("gpu__time_duration.sum", 1e6),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "DRAM GB/s": ("dram__bytes.sum.per_second", 1e9),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "registers": ("launch__registers_per_thread", 1),
}
KEPT = [name for name, _ in SHOWN.values()] + ["sm__inst_executed.avg.per_cycle_active"]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, measured or not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", action="store_true", help="only run the passes, as under ncu")
    parser.add_argument("--time-limit", type=float, default=100, help="seconds of ncu")
    add_output_arguments(parser)
    options = parser.parse_args(arguments)
    if options.passes:
        run_passes()
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_output(parser, options, f"counters-{slug(device)}.json")
    rows, reason = counted(options.time_limit)
    write_json(options.output, {**about(device), "launches": rows, "reason": reason})
    for row in rows:
        counters = row["counters"]
        said = ", ".join(
            f"{title} {cell(counters.get(name), '.4g', 1 / unit)}" for title, (name, unit) in SHOWN.items()
        )
        print(f"{row['pattern']:<60} {row['kernel']:<16} {said}")
    print(f"not measured: {reason}" if reason else f"wrote {options.output}")
    return 0


def counted(seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """A row a launch, and why there are none."""
    program = shutil.which("ncu")
    if program is None:
        return [], "ncu is not installed"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        command = [program, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--profile-from-start", "off", "--log-file", str(log)]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += ["--kernel-name", f"regex:^(({OURS})_kernel|{BETWEEN})", sys.executable, __file__, "--passes"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return [], f"ncu took more than {seconds:.0f} s"
        said = log.read_text() if log.exists() else ""
        rows = parsed(said)
        told = [line for line in (said + done.stdout + done.stderr).splitlines() if "ERROR" in line]
        return rows, None if rows else (told or [f"ncu ended with {done.returncode}"])[0]


def parsed(text: str) -> list[dict[str, Any]]:
    """The rows of ncu's raw page: a line of names, one of units, one a launch; other lines begin with ``==``."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found, number = [], -1
    for one in list(csv.DictReader(lines))[1:]:
        kernel = one["Kernel Name"].split("(")[0]
        if BETWEEN in kernel:
            number += 1
            continue
        pattern, context, heads, width = CASES[max(number, 0)]
        counters = {name: rounded(number_of(one[name])) for name in KEPT if name in one}
        sizes = {"pattern": str(pattern), "context": context, "heads": heads, "width": width}
        found.append({**sizes, "kernel": kernel, "counters": {k: v for k, v in counters.items() if v is not None}})
    return found


def number_of(text: str) -> float | None:
    """A number as ncu writes it, with commas between thousands."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def run_passes() -> None:
    """Forward and backward of every case, compiled before the profiler begins."""
    for counted_pass in (False, True):
        if counted_pass:
            torch.cuda.profiler.start()
        for pattern, context, heads, width in CASES:
            torch.cuda._sleep(1_000)  # type: ignore[no-untyped-call,unused-ignore]
            leaves = [
                torch.randn(1, heads, context, width, device="cuda").bfloat16().requires_grad_() for _ in range(3)
            ]
            q, k, v = leaves
            out = sparse_attention(q, k, v, pattern)
            torch.autograd.grad(out, leaves, torch.randn_like(out))
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main())
