"""Compare attention with torch's dense causal attention and FlexAttention.

Run ``python -m benchmarks.attention.attention``.

A gate comes first: each pattern's output and gradients against fp64 in every head width and dtype. Then dense
attention, FlexAttention and all patterns take turns. A table is printed, and all figures go to JSON, which is written
after every case. docs/kernels.md explains the figures.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.attention import cases
from benchmarks.attention.cases import Group
from benchmarks.attention.figures import PHASES
from benchmarks.attention.gate import problems
from benchmarks.attention.measure import measure
from benchmarks.attention.peers import forget_compiled, reason_of
from benchmarks.machine import about, copy_bandwidth, matmul_flops, slug
from benchmarks.report import DASH, cell, check_output, new_parser, rounded, write_json, write_result

COLUMNS = (  # title, width, field, format and factor; a column has all phases
    ("ms: forward / backward / both", 30, "seconds", ".3f", 1e3),
    ("times dense", 22, "ratio_to_dense", ".2f", 1),
    ("times flex", 22, "ratio_to_flex", ".2f", 1),
    ("of ideal", 18, "fraction_of_ideal", ".0%", 1),
    ("TFLOP/s visited", 15, "tflops_on_visited", ".0f", 1),
    ("GB/s", 15, "gigabytes_per_second", ",.0f", 1),
)
TAIL = f"{'bound by':>12} {'bits':>4} {'B / pos':>8}"
DENSE_LIMIT = {"cpu": 65_536, "cuda": 262_144}
FLEX_LIMIT = {"cpu": 4_096, "cuda": 65_536}  # its block mask is computed from all pairs
REPEATS = {"cpu": 5, "cuda": 20}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if the gate or a case fails."""
    started = time.monotonic()
    options = read_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    groups = groups_of(options)
    if not pass_gate(groups, device, options.backend):
        return 1
    results = beginning(device, options)
    write_json(options.output, results)
    for group in groups:
        if options.time_limit is not None and time.monotonic() - started > options.time_limit:
            results["skipped"].append(group.title())
            continue
        try_group(group, results, device, options)
        write_json(options.output, results)
    write_result(options, results)
    for title in results["skipped"]:
        print(f"not started within the time limit: {title}")
    return 1 if results["failures"] else 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; defaults depend on the device."""
    parser = new_parser(__doc__)
    parser.add_argument("--preset", choices=cases.PRESETS, default="grid", help="what is measured (default: the grid)")
    parser.add_argument("--contexts", type=int, nargs="*", default=None, help="positions to time in the grid")
    parser.add_argument("--head-widths", type=int, nargs="+", default=None)
    parser.add_argument("--dtypes", nargs="+", default=None, help="float32 on the CPU, else bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=None, help="4 on the CPU, else as many as fill the card")
    parser.add_argument("--stride", type=int, default=None, help="the power of two nearest the root of the context")
    parser.add_argument("--summary", type=int, default=cases.SUMMARY)
    parser.add_argument("--repeats", type=int, default=None, help="at most; a card ends long cases earlier")
    parser.add_argument("--threads", type=int, default=None, help="as torch has them")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True, help="time FlexAttention too")
    parser.add_argument(
        "--flex-patterns",
        nargs="*",
        choices=cases.NAMES,
        default=cases.NAMES,
        metavar="NAME",
        help="under which patterns FlexAttention is timed; it compiles each anew",
    )
    parser.add_argument("--dense-limit", type=int, default=None, help="positions beyond which dense is left out")
    parser.add_argument("--flex-limit", type=int, default=None, help="positions beyond which FlexAttention is")
    parser.add_argument("--time-limit", type=float, default=None, help="seconds after which no case starts")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    kind = device.type if device.type in DENSE_LIMIT else "cpu"
    check_output(parser, options, "attention" if options.preset == "grid" else options.preset)
    defaults = {
        "contexts": list(cases.CONTEXTS[kind]) if options.preset == "grid" else [],
        "head_widths": list(cases.HEAD_WIDTHS[kind]),
        "dtypes": list(cases.DTYPES[kind]),
        "repeats": REPEATS[kind],
        "dense_limit": DENSE_LIMIT[kind],
        "flex_limit": FLEX_LIMIT[kind] if options.flex else 0,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.flex:
        options.flex_limit = 0
    return options


def groups_of(options: argparse.Namespace) -> list[Group]:
    """Return the requested cases, cheap cases of a grid first."""
    kind = torch.device(options.device).type
    if options.preset == "bars":
        return cases.bars(kind)
    if options.preset == "beside":
        return cases.beside(kind)
    if options.preset == "rehearsal":
        return cases.rehearsal(options.dtypes[0])
    first = cases.published_case()
    published = [first] if kind == "cuda" and first.dtype in options.dtypes and not options.stride else []
    return published + [
        replace(
            Group(context, options.stride or cases.stride_of(context), width, dtype, cases.heads_of(context, kind)),
            batch=options.batch,
            summary=options.summary,
            **({"heads": options.heads} if options.heads else {}),
        )
        for context in options.contexts
        for width in options.head_widths
        for dtype in options.dtypes
    ]


def pass_gate(groups: list[Group], device: torch.device, backend: str) -> bool:
    """Whether every head width and dtype of the groups is right; prints what is wrong."""
    kinds = dict.fromkeys((group.dtype, group.head_width) for group in groups)
    wrong = problems([(getattr(torch, dtype), width) for dtype, width in kinds], device, backend)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        where = ", ".join(f"{dtype} of width {width}" for dtype, width in kinds) or "nothing to time"
        print(f"gate: rounding explains how far all patterns are from fp64 in {where}")
    return not wrong


def beginning(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result file before its first case: the machine, its ceilings and empty lists."""
    small = options.preset == "rehearsal"
    copied = copy_bandwidth(device, 2**22 if small else None)
    multiplied = matmul_flops(device, getattr(torch, options.dtypes[0]), 64 if small else None)
    print(
        f"{slug(device)}: a copy moves {copied / 1e9:,.1f} GB/s, read and written; "
        f"a matrix product reaches {multiplied / 1e12:.3g} TFLOP/s"
    )
    return {
        **about(device),
        "backend": options.backend,
        "repeats": options.repeats,
        "preset": options.preset,
        "copy_bytes_per_second": rounded(copied),
        "matmul_flops_per_second": rounded(multiplied),
        "timings": [],
        "failures": [],
        "skipped": [],
    }


def try_group(group: Group, results: dict[str, Any], device: torch.device, options: argparse.Namespace) -> None:
    """Add a group's rows to the results, or the reason why it has none."""
    try:
        rows, failures = measure(group, device, options, results["copy_bytes_per_second"])
    except Exception as error:  # the other cases are still useful
        rows, failures = [], [{**group.sizes(), "reason": reason_of(error)}]
    results["timings"] += rows
    results["failures"] += failures
    if rows:
        print_timings(group, rows)
    for failure in failures:
        print(f"\n{group.title()}: {failure.get('pattern', 'all')}: {failure['reason']}", file=sys.stderr)
    forget_compiled()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def print_timings(group: Group, rows: list[dict[str, Any]]) -> None:
    """Print a table of one group: milliseconds, ratios and shares of each phase."""
    first = rows[0]
    dense = ", ".join(
        f"{phase} {cell(first['dense_seconds'][phase], '.3f', 1e3)} ms ({first['dense_kernel'][phase] or DASH})"
        for phase in PHASES
    )
    print(f"\n{group.title()}; dense attention of torch: {dense}")
    for name, reason in first["dense_reasons"].items():
        print(f"dense attention by {name}: {reason}")
    print(" ".join([f"{'pattern':<15}{'density':>8}", *(f"{title:>{width}}" for title, width, *_ in COLUMNS), TAIL]))
    for row in rows:
        columns = [
            f"{' / '.join(cell(row[name][phase], form, factor) for phase in PHASES if phase in row[name]):>{width}}"
            for _, width, name, form, factor in COLUMNS
        ]
        bound = "/".join(
            {"operations": "work", "bytes": "bytes"}.get(row["bound"][phase], DASH) for phase in PHASES[:2]
        )
        same = {None: DASH, True: "yes", False: "NO"}[row["deterministic"]]
        facts = f"{bound:>12} {same:>4} {cell(row['bytes_per_position'], ',.0f'):>8}"
        print(" ".join([f"{row['pattern']:<15}{row['density']:>8.2%}", *columns, facts]))


if __name__ == "__main__":
    sys.exit(main())
