"""The tables of attention in README.md and docs/kernels.md, made from the files in benchmarks/results/.

`python benchmarks/readme_table.py` writes both; a test checks that they agree. The README has one table with a column
for each result file, for its first head width. docs/kernels.md has all, and tables of selections, of a CPU's time, and
of the compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.report import RESULTS, markdown, replaced

ROOT = Path(__file__).resolve().parents[1]
README, DETAILS = ROOT / "README.md", ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- made by benchmarks/readme_table.py: begin -->", "<!-- end -->"
COMPILED = "<!-- made by benchmarks/readme_table.py from compiled.json: begin -->"
SHOWN_CONTEXT = 12_288
PHASES = ("forward", "backward", "both")
GPU_COLUMNS = ("× FlexAttention forward", "× FlexAttention both", "of ideal forward", "of ideal backward")
PLAN_COLUMN = "plan for 1,048,576 positions"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite both pages if they differ."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    for page in (README, DETAILS):
        page.write_text(with_tables(page))
    return 0


def with_tables(page: Path) -> str:
    """Return a page's text with its tables made from the result files."""
    files = [json.loads(path.read_text()) for path in attention_files()]
    tables = [summary(files)] if page == README else [table for result in files for table in tables_of(result)]
    if page == DETAILS:
        tables += [selections_table(json.loads(path.read_text())) for path in sorted(RESULTS.glob("selections-*.json"))]
        tables += [cpu_time_table(json.loads(path.read_text())) for path in sorted(RESULTS.glob("cpu-time-*.json"))]
    text = replaced(page.read_text(), BEGIN, "\n".join(tables), END)
    if page == DETAILS:
        text = replaced(text, COMPILED, compiled_table(json.loads((RESULTS / "compiled.json").read_text())), END)
    return text


def attention_files() -> list[Path]:
    """List the results of every device: the cases with bars, which GPUs have, before whole grids."""
    return [*sorted(RESULTS.glob("bars-*.json")), *sorted(RESULTS.glob("attention-*.json"))]


def tables_of(result: dict[str, Any]) -> list[str]:
    """Format one device's tables at the shown context, one for each measured head width and dtype."""
    cases: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in result["timings"]:
        if row["context"] == SHOWN_CONTEXT:
            cases.setdefault((row["head_width"], row["dtype"]), []).append(row)
    return [table(result, rows) for rows in cases.values()]


def summary(results: list[dict[str, Any]]) -> str:
    """Make one table of all devices: how many times faster both passes are than torch's dense causal attention."""
    columns, by_pattern = ["pattern", "share of pairs"], dict[str, list[str]]()
    for result in results:
        rows = [row for row in result["timings"] if row["context"] == SHOWN_CONTEXT]
        first = rows[0]
        rows = [row for row in rows if (row["head_width"], row["dtype"]) == (first["head_width"], first["dtype"])]
        columns.append(f"{result['device']}, {first['dtype']}")
        columns += [f"{result['device']} over FlexAttention"] if on_gpu(result) else []
        for row in rows:
            cells = by_pattern.setdefault(row["pattern"], [row["pattern"], f"{row['density']:.1%}"])
            cells.append(shown(row["ratio_to_dense"]["both"]))
            cells += [shown(row["ratio_to_flex"]["both"])] if on_gpu(result) else []
    title = (
        "Speed-up of the forward and backward pass over PyTorch's dense causal attention (its fastest kernels) at a "
        f"context of {SHOWN_CONTEXT:,}, stride {first['stride']}, summary {first['summary']}, heads of width "
        f"{first['head_width']}, each in one run on that device. CPUs have two threads.\n\n"
    )
    return title + markdown(columns, by_pattern.values())


def table(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Format one device's attention in one head width and dtype, against torch's dense causal attention in the same
    run.
    """
    first = rows[0]
    title = (
        f"{result['device']}, {result['threads']} threads, torch {result['torch']}, {result['date']}. "
        f"Context {SHOWN_CONTEXT:,}, stride {first['stride']}, summary {first['summary']}, {first['heads']} heads of "
        f"width {first['head_width']}, {first['dtype']}. "
        f"How many times faster than torch's dense causal attention{kernels_of(first)} in the same run:\n\n"
    )
    plans = {row["pattern"]: row for row in result["plans"] if row["context"] == 1_048_576}
    columns = ["pattern", "density", *PHASES, *(GPU_COLUMNS if on_gpu(result) else ()), PLAN_COLUMN]
    lines = []
    for row in rows:
        cells = [row["pattern"], f"{row['density']:.1%}", *(shown(row["ratio_to_dense"][phase]) for phase in PHASES)]
        if on_gpu(result):
            cells += [shown(row["ratio_to_flex"][phase]) for phase in ("forward", "both")]
            cells += [shown(row["fraction_of_ideal"][phase], "{:.0%}") for phase in ("forward", "backward")]
        plan = plans.get(row["pattern"])
        cells.append(f"{plan['plan_seconds'] * 1e3:.1f} ms, {plan['plan_bytes'] / 2**10:.1f} KiB" if plan else "–")
        lines.append(cells)
    return title + markdown(columns, lines)


def selections_table(result: dict[str, Any]) -> str:
    """Format one device's attention over selections, including the selecting, against two dense attentions."""
    first = result["timings"][0]
    grows = ", ".join(f"{name} {shown(exponent, '{:.2f}')}" for name, exponent in result["growth"].items())
    clock, form = ("events on the device", "{:.2f}") if on_gpu(result) else ("CPU time of 1 thread", "{:.0f}")
    title = (
        f"{result['device']}, {clock}, torch {result['torch']}, {result['date']}. {first['heads']} heads "
        f"of width {first['head_width']}, {first['dtype']}; the window and the number of clusters near the root of the "
        "context. Milliseconds, what selects included, and how many times faster both passes are than torch's dense "
        "causal attention, and than our own under a dense pattern, in the same run. Exponents of growth in the "
        f"context: {grows}.\n\n"
    )
    columns = ["selection", "context", "window", "selecting", *PHASES, "× torch", "× dense pattern"]
    lines = []
    for row in result["timings"]:
        times = [row["selecting_seconds"], *(row["seconds"][phase] for phase in PHASES)]
        ratios = [shown(row["ratio_to_dense"][name]["both"]) for name in ("torch", "dense pattern")]
        cells = [row["selection"], f"{row['context']:,}", str(row["window"])]
        lines.append([*cells, *(form.format(x * 1e3) for x in times), *ratios])
    return title + markdown(columns, lines)


def cpu_time_table(result: dict[str, Any]) -> str:
    """Format where one CPU's time goes in each pattern, and the time of other chunk and slab sizes relative to the
    default.
    """
    names, variants = [row["pattern"] for row in result["shares"]], result["sizes"][1:]
    kinds = list(result["shares"][0]["shares"])
    shipped = result["sizes"][0]["ratio_to_dense"]
    columns = ["pattern", "limit", "measured", "pairs computed", *kinds, *(row["sizes"] for row in variants)]
    title = (
        f"{result['device']}, torch {result['torch']}, {result['date']}. Context {result['context']:,}, stride "
        f"{result['stride']}, {result['heads']} heads of width {result['head_width']}, {result['dtype']}, both passes. "
        "Limit: one over the density. Measured: times faster than dense attention, on "
        f"{result['threads']} threads. Pairs computed: for each one that the pattern allows. Shares of the time of one "
        "thread. Other sizes: seconds over those of the shipped sizes, in the same run.\n\n"
    )
    lines = []
    for name, row in zip(names, result["shares"], strict=True):
        cells = [name, f"{row['limit']:.0f}×", shown(shipped[name]), f"{row['computed']:.2f}"]
        cells += [f"{row['shares'][kind]:.0%}" for kind in kinds]
        cells += [f"{row['seconds_over_shipped'][name]:.2f}" for row in variants]
        lines.append(cells)
    return title + markdown(columns, lines)


def compiled_table(result: dict[str, Any]) -> str:
    """Format the compiler's output for each 16-bit configuration for sm_90."""
    columns = ["kernel", "width", "tile, queries × keys", "warps, stages", "products a visit", "least"]
    columns += ["instructions a visit, unmasked", "registers", "spilled in a visit", "programs"]
    lines = []
    for row in result["found"]:
        architecture, kernel, dtype, width, *further = row["case"].split(":")
        if architecture != "sm_90" or dtype == "float32" or "," not in row["case"]:
            continue
        block_q, block_k, warps, stages, most = further[-1].split(",")
        cells = [
            kernel,
            width,
            f"{block_q} × {block_k}",
            f"{warps}, {stages}",
            max(sum(visit["products"].values()) for visit in row["visits"]),
            row["fewest_products"] or "mma",
            row["visits"][0]["instructions"],
            f"{row['registers']}{' (bound)' if int(most) else ''}",
            max(visit["local"] for visit in row["visits"]),
            row["programs"],
        ]
        lines.append(cells)
    return f"sm_90, Triton {result['triton']}.\n\n{markdown(columns, lines)}"


def on_gpu(result: dict[str, Any]) -> bool:
    """Whether a file's peers ran the backward pass too, and its ideal is from a GPU's bandwidth."""
    return result.get("device_type") == "cuda"


def kernels_of(row: dict[str, Any]) -> str:
    """Name the dense kernels of torch that the row is compared with, if torch has several."""
    names = dict.fromkeys(name for name in row.get("dense_kernel", {}).values() if name not in (None, "torch"))
    return f" (the faster in each phase: {', '.join(names)})" if names else ""


def shown(value: float | None, form: str = "{:.1f}×") -> str:
    """Format a number, or a dash if it was not measured."""
    return "–" if value is None else form.format(value)


if __name__ == "__main__":
    sys.exit(main())
