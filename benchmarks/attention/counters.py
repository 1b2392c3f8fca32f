"""Measure how busy a card's matrix units and memory are in our kernels: ``python -m benchmarks.attention.counters``.

Nsight Compute (``ncu``, if installed) reads the card's counters for every launch of a forward and a backward pass of a
few cases, after passes that compile. The card's clocks are not changed. Each launch is replayed several times, so its
time is not representative, but its shares of the peak are. A table is printed, and a row per launch goes to JSON. If
``ncu`` is missing or cannot read counters, the file says so.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import about
from benchmarks.report import cell, check_output, new_parser, rounded, write_json
from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Column, Fixed, Local, Pattern

CASES: tuple[tuple[Pattern, int, int, int], ...] = (  # pattern, context, heads, width
    (Local(1_024), 32_768, 16, 128),
    (Column(128), 12_288, 64, 64),
    (Fixed(128, 8), 12_288, 64, 64),
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
BETWEEN = "spin_kernel"  # torch's sleep on the card, launched before each case to separate them
OURS = "forward|dkdv|dq|closed|delta|gather"
SHOWN = {  # columns of the table: a counter and its divisor
    "ms": ("gpu__time_duration.sum", 1e6),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1),
    "DRAM GB/s": ("dram__bytes.sum.per_second", 1e9),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1),
    "registers": ("launch__registers_per_thread", 1),
}
COUNTERS = [name for name, _ in SHOWN.values()] + ["sm__inst_executed.avg.per_cycle_active"]


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 0, even if nothing was measured."""
    parser = new_parser(__doc__)
    parser.add_argument("--passes", action="store_true", help="only run the passes, as under ncu")
    parser.add_argument("--time-limit", type=float, default=100, help="seconds of ncu")
    options = parser.parse_args(arguments)
    if options.passes:
        run_passes()
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.device = device.type
    check_output(parser, options, "counters")
    rows, reason = counted(options.time_limit)
    write_json(options.output, {**about(device), "launches": rows, "reason": reason})
    for row in rows:
        counters = row["counters"]
        columns = [f"{title} {cell(counters.get(name), '.4g', 1 / unit)}" for title, (name, unit) in SHOWN.items()]
        print(f"{row['pattern']:<60} {row['kernel']:<16} {', '.join(columns)}")
    print(f"not measured: {reason}" if reason else f"wrote {options.output}")
    return 0


def counted(seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Return a row per launch, and the reason if there is none."""
    program = shutil.which("ncu")
    if program is None:
        return [], "ncu is not installed"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        command = [program, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--profile-from-start", "off", "--log-file", str(log)]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += ["--kernel-name", f"regex:^(({OURS})_kernel|{BETWEEN})"]
        command += [sys.executable, "-m", "benchmarks.attention.counters", "--passes"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return [], f"ncu took more than {seconds:.0f} s"
        text = log.read_text() if log.exists() else ""
        rows = parsed(text)
        errors = [line for line in (text + done.stdout + done.stderr).splitlines() if "ERROR" in line]
        return rows, None if rows else (errors or [f"ncu ended with {done.returncode}"])[0]


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse ncu's raw page: a line of names, one of units, one per launch; other lines begin with ``==``."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows, number = [], -1
    for line in list(csv.DictReader(lines))[1:]:
        kernel = line["Kernel Name"].split("(")[0]
        if BETWEEN in kernel:
            number += 1
            continue
        pattern, context, heads, width = CASES[max(number, 0)]
        counters = {name: rounded(number_of(line[name])) for name in COUNTERS if name in line}
        sizes = {"pattern": str(pattern), "context": context, "heads": heads, "width": width}
        rows.append({**sizes, "kernel": kernel, "counters": {k: v for k, v in counters.items() if v is not None}})
    return rows


def number_of(text: str) -> float | None:
    """Parse a number as ncu writes it, with commas between thousands."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def run_passes() -> None:
    """Run forward and backward passes of every case, compiled before the profiler starts."""
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
