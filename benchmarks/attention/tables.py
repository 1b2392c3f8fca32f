"""Tables of attention: one of all devices in README.md; more columns for GPUs, and selections, in docs/kernels.md."""

from __future__ import annotations

from typing import Any

from benchmarks.attention.figures import PHASES
from benchmarks.report import DASH, markdown

SHOWN_CONTEXT = 12_288
GPU_COLUMNS = ("× FlexAttention forward", "× FlexAttention both", "of ideal forward", "of ideal backward")


def details(results: list[dict[str, Any]]) -> str:
    """Make the tables of GPUs, and those of selections."""
    selections = [selections_table(result) for result in results if "growth" in result]
    return "\n".join([*(text for result in results if on_gpu(result) for text in tables_of(result)), *selections])


def tables_of(result: dict[str, Any]) -> list[str]:
    """Format one GPU's tables at the shown context, one for each measured head width and dtype."""
    cases: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in result["timings"]:
        if "pattern" in row and row["context"] == SHOWN_CONTEXT:
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
    """Format one GPU's attention in one head width and dtype, against torch's dense causal attention."""
    first = rows[0]
    title = (
        f"{result['device']}, torch {result['torch']}, {result['date']}. "
        f"Context {SHOWN_CONTEXT:,}, stride {first['stride']}, summary {first['summary']}, {first['heads']} heads of "
        f"width {first['head_width']}, {first['dtype']}. "
        f"Speed-up over torch's dense causal attention{kernels_of(first)} in the same run:\n\n"
    )
    columns = ["pattern", "density", *PHASES, *GPU_COLUMNS]
    lines = []
    for row in rows:
        cells = [row["pattern"], f"{row['density']:.1%}", *(shown(row["ratio_to_dense"][phase]) for phase in PHASES)]
        cells += [shown(row["ratio_to_flex"][phase]) for phase in ("forward", "both")]
        cells += [shown(row["fraction_of_ideal"][phase], "{:.0%}") for phase in ("forward", "backward")]
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
        "context. Milliseconds, with the time of selecting in forward and both; speed-up of both passes over torch's "
        "dense causal attention and over our own dense pattern in the same run. Exponents of growth in the context: "
        f"{grows}.\n\n"
    )
    columns = ["selection", "context", "selecting", *PHASES, "× torch", "× dense pattern"]
    lines = []
    for row in result["timings"]:
        times = [row["selecting_seconds"], *(row["seconds"][phase] for phase in PHASES)]
        ratios = [shown(row["ratio_to_dense"][name]["both"]) for name in ("torch", "dense pattern")]
        cells = [row["selection"], f"{row['context']:,}"]
        lines.append([*cells, *(form.format(x * 1e3) for x in times), *ratios])
    return title + markdown(columns, lines)


def on_gpu(result: dict[str, Any]) -> bool:
    """Whether a file's peers ran the backward pass too, and its ideal is from a GPU's bandwidth."""
    return result.get("device_type") == "cuda"


def kernels_of(row: dict[str, Any]) -> str:
    """Name the dense kernels of torch that the row is compared with, if torch has several."""
    names = dict.fromkeys(name for name in row.get("dense_kernel", {}).values() if name not in (None, "torch"))
    return f" (the faster in each phase: {', '.join(names)})" if names else ""


def shown(value: float | None, form: str = "{:.1f}×") -> str:
    """Format a number, or a dash if it was not measured."""
    return DASH if value is None else form.format(value)
