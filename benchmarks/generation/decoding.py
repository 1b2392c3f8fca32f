"""One query at a time, against caches of growing contexts: ``python benchmarks/generation/decoding.py``.

First a gate compares rows of each pattern with fp64. Then all patterns take turns in every repeat. Each runs the last
positions of the context one after another, as generation does, and its time is the least mean over repeats. The growth
of a figure is its exponent in the context, from the smallest to the largest: 1 for a dense read, 1/2 for reading as
many keys as the root of the context. The table goes to the terminal, all figures to JSON.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor

from benchmarks.generation import stepping
from benchmarks.machine import about, in_turns, synchronize
from benchmarks.report import new_parser, rounded, write_result
from longstride.kernels import CachedAttention, empty_cache, num_keys_read, sparse_attention
from longstride.kernels.patterns import Column, Dense, Fixed, Local, Pattern, Strided, Summary

GATE_CONTEXT, GATE_STRIDE = 192, 16
SUMMARY = 8


def patterns_of(stride: int) -> dict[str, Pattern]:
    """Return the patterns to measure, by their name in tables."""
    return {
        "local": Local(stride),
        "column": Column(stride),
        "summary": Summary(stride, SUMMARY),
        "strided merged": Strided(stride),
        "fixed merged": Fixed(stride, SUMMARY),
        "dense": Dense(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if the gate fails."""
    options = read_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    for name, pattern in patterns_of(GATE_STRIDE).items():
        if problem := gate(pattern, options):
            print(f"{name}: {problem}", file=sys.stderr)
            return 1
    timings = [row for context in sorted(options.contexts) for row in measure(context, options)]
    growth = stepping.growth_of(timings, ("keys_read", "seconds"))
    print_table(timings, growth, options)
    measured = {"backend": options.backend, "calls": options.calls, "repeats": options.repeats}
    write_result(options, {**about(options.device), **measured, "timings": timings, "growth": growth})
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-width", type=int, default=64)
    stepping.add_options(parser, [4_096, 16_384, 65_536, 262_144], calls=20, repeats=10)
    return stepping.read_options(parser, arguments, "decoding")


def gate(pattern: Pattern, options: argparse.Namespace) -> str | None:
    """Describe the error if rows in the middle and at the end differ from fp64 by more than the dtype explains."""
    q, k, v = (random_rows(pattern, (2, 2, GATE_CONTEXT, options.head_width), options) for _ in range(3))
    attend = CachedAttention(k, v, pattern, backend=options.backend)
    positions = [GATE_CONTEXT // 2, GATE_CONTEXT - 2, GATE_CONTEXT - 1]
    output = torch.stack([attend(q[:, :, position], position) for position in positions], 2)
    expected = sparse_attention(q.double(), k.double(), v.double(), pattern, backend="reference")[:, :, positions]
    error = float((output.double() - expected).abs().max())
    allowed = 4 * torch.finfo(options.dtype).eps * float(v.double().abs().max())
    return None if error <= allowed else f"off by {error:.3g}, {allowed:.3g} allowed"


def measure(context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each pattern: keys that the last position reads, and the seconds of a call."""
    stride = 2 ** round(math.log2(context) / 2)
    patterns = patterns_of(stride)
    q = torch.randn(options.batch, options.heads, options.head_width, device=options.device, dtype=options.dtype)
    calls = attentions(patterns, (options.batch, options.heads, context, options.head_width), options)
    steps = {name: partial(attend_last, attend, q, options) for name, attend in calls.items()}
    for step in steps.values():  # what is kept from call to call, and compilation, are not what is timed
        step()
    runs = in_turns(steps, options.repeats, time.perf_counter)
    return [
        {
            "pattern": name,
            "context": context,
            "stride": stride,
            "summary": SUMMARY,
            "batch": options.batch,
            "heads": options.heads,
            "head_width": options.head_width,
            "dtype": str(options.dtype).removeprefix("torch."),
            "keys_read": num_keys_read(pattern, context - 1, context),
            "seconds": rounded(min(runs[name]) / options.calls),
        }
        for name, pattern in patterns.items()
    ]


def attentions(
    patterns: dict[str, Pattern], shape: tuple[int, int, int, int], options: argparse.Namespace
) -> dict[str, CachedAttention]:
    """Make each pattern's attention over random keys and values (B, H, N, D), shared by equal memory layouts."""
    rows: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    calls = {}
    for name, pattern in patterns.items():
        order = empty_cache(*shape, pattern, device=options.device, dtype=options.dtype).stride()
        if order not in rows:
            rows[order] = (random_rows(pattern, shape, options), random_rows(pattern, shape, options))
        calls[name] = CachedAttention(*rows[order], pattern, backend=options.backend)
    return calls


def random_rows(pattern: Pattern, shape: tuple[int, int, int, int], options: argparse.Namespace) -> Tensor:
    """Make random rows in the memory layout of generation."""
    return empty_cache(*shape, pattern, device=options.device, dtype=options.dtype).normal_()


def attend_last(attend: CachedAttention, q: Tensor, options: argparse.Namespace) -> None:
    """Attend at the last positions of the context, one after another."""
    context = attend.k.shape[2]
    for position in range(context - options.calls, context):
        attend(q, position)
    synchronize(options.device)


def print_table(
    timings: list[dict[str, Any]], growth: dict[str, dict[str, float | None]], options: argparse.Namespace
) -> None:
    """Print keys read and milliseconds at each context, and their growth, a line for each pattern."""
    contexts = list(dict.fromkeys(row["context"] for row in timings))
    print(f"B = {options.batch}, H = {options.heads}, D = {options.head_width}, {options.dtype}; keys read, ms a call")
    print(f"{'pattern':<16}" + "".join(f"{f'n = {n:,}':>22}" for n in contexts) + f"{'growth: keys, time':>22}")
    for name in dict.fromkeys(row["pattern"] for row in timings):
        rows = [row for row in timings if row["pattern"] == name]
        cells = [f"{row['keys_read']:,}{row['seconds'] * 1e3:>11.3f}" for row in rows]
        cells.append(stepping.growth_cell(growth[name]))
        print(f"{name:<16}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
