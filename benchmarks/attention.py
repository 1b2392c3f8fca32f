"""Attention side by side with torch's dense causal attention and FlexAttention: ``python benchmarks/attention.py``.

A gate comes first: each pattern's output and gradients against fp64 on a small context. Then, in every repeat, dense
and all patterns take turns, so that what else the machine does hits all of them; times are the minimum over repeats,
and a ratio is dense time over ours. The table goes to the terminal, all figures to JSON and a plot to PNG.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import math
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import sparse_attention
from kernels.attention import head_patterns
from kernels.backends.reference import pattern_mask
from kernels.backends.triton.packing import passes
from kernels.chunks import chunked
from kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from kernels.plan import ordered, plan

RESULTS = Path(__file__).parent / "results"
GATE_CONTEXT = 192  # a multiple of the gate's stride and of nothing larger
GATE_STRIDE = 16
PLAN_TILES = (128, 64)
FLEX_CONTEXTS = {"cpu": 4_096, "cuda": 32_768}  # its block mask is made from all pairs
PHASES = ("forward", "backward", "both")
ROUND = 4  # significant digits in files


def patterns_of(stride: int, summary: int) -> dict[str, Pattern]:
    """What is measured, by the name it has in tables."""
    return {
        "dense": Dense(),
        "local": Local(stride),
        "column": Column(stride),
        "block": Block(stride),
        "summary": Summary(stride, summary),
        "strided merged": Strided(stride),
        "fixed merged": Fixed(stride, summary),
    }


def main() -> int:
    """Exit code: 1 where the gate fails."""
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    dtypes = [getattr(torch, name) for name in options.dtypes]
    for dtype in dtypes:
        for name, pattern in patterns_of(GATE_STRIDE, 2).items():
            if problem := gate(pattern, dtype, device, options.backend):
                print(f"{name} in {dtype}: {problem}", file=sys.stderr)
                return 1
    print(f"gate: all patterns are within twice the error of dense attention in {', '.join(options.dtypes)}")
    plans = [row for context in sorted({*options.contexts, *options.plans}) for row in measure_plans(context, options)]
    print_plans(plans)
    timings: list[dict[str, Any]] = []
    for context in options.contexts:
        for width in options.head_widths:
            for dtype in dtypes:
                rows = measure(context, width, dtype, device, options)
                print_timings(rows)
                timings += rows
    write(options.output, {**about(device, options), "plans": plans, "timings": timings})
    return 0


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="*", default=[3_072, 12_288], help="positions to time")
    parser.add_argument("--plans", type=int, nargs="*", default=[1_048_576], help="positions to build plans for, too")
    parser.add_argument("--head-widths", type=int, nargs="+", default=[64])
    parser.add_argument("--dtypes", nargs="+", default=None, help="float32 on the CPU, else bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--stride", type=int, default=None, help="the power of two nearest the root of the context")
    parser.add_argument("--summary", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="as torch has them")
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True, help="time FlexAttention too")
    parser.add_argument("--output", type=Path, default=None, help="the JSON file; the plot lies beside it")
    parser.add_argument("--overwrite", action="store_true", help="replace the file where there is one")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = "-".join(re.findall(r"[a-z0-9]+", device_name(device).lower()))
    options.output = options.output or RESULTS / f"attention-{name}.json"
    if options.output.suffix != ".json" or not options.output.parent.is_dir():
        parser.error(f"--output={options.output}: must be a .json in a folder that exists")
    if options.output.exists() and not options.overwrite:
        parser.error(f"{options.output}: exists already; --overwrite replaces it, --output names another")
    options.dtypes = options.dtypes or (["float32"] if device.type == "cpu" else ["bfloat16"])
    return options


def stride_of(context: int, options: argparse.Namespace) -> int:
    """The given stride, or the power of two nearest to the root of the context."""
    return options.stride or 2 ** round(math.log2(context) / 2)


# The gate


def gate(pattern: Pattern, dtype: torch.dtype, device: torch.device, backend: str) -> str | None:
    """What is wrong, None where output and gradients are within twice the error of dense attention in this dtype."""
    inputs = [torch.randn(2, 2, GATE_CONTEXT, 64, device=device, dtype=dtype) for _ in range(4)]
    wide = [x.double() for x in inputs]
    wanted = results(lambda q, k, v: attend(q, k, v, pattern, "reference"), wide)
    found = results(lambda q, k, v: attend(q, k, v, pattern, backend), inputs)
    dense = results(functools.partial(masked, pattern=pattern), inputs)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), found, dense, wanted, strict=True):
        error, explained = (float((x.double() - c).square().mean().sqrt()) for x in (a, b))
        if not error <= 2 * explained + 4 * torch.finfo(torch.float32).eps:
            return f"{name} is off by {error:.3g}; dense attention is off by {explained:.3g}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, backend: str) -> Tensor:
    """Our own output (B, H, N, D)."""
    out = sparse_attention(q, k, v, pattern, backend=backend)
    assert isinstance(out, Tensor)
    return out


def masked(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """Plain dense attention under the mask: products in the dtype, softmax in at least fp32."""
    allowed = pattern_mask(head_patterns(pattern, q.shape[1]), q.shape[2], q.device)
    blind = ~allowed.any(-1, keepdim=True)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~allowed, -math.inf).masked_fill(blind, 0.0), -1)
    return weights.masked_fill(blind, 0.0).to(v.dtype) @ v


def results(attention: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


# Times


def measure(
    context: int, width: int, dtype: torch.dtype, device: torch.device, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row a pattern: seconds, ratios to dense and FlexAttention, and the fraction of the ideal by density."""
    stride = stride_of(context, options)
    patterns = patterns_of(stride, options.summary)
    shape = (options.batch, options.heads, context, width)
    leaves = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    grad_out = torch.randn(shape, device=device, dtype=dtype)
    ours = {name: functools.partial(attend, pattern=p, backend=options.backend) for name, p in patterns.items()}
    for attention in ours.values():  # plans, compilation and tuning are not what is timed
        seconds_of(attention, leaves, grad_out)
    dense_runs: list[tuple[float, float]] = []
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ours}
    for _ in range(options.repeats):
        dense_runs.append(seconds_of(sdpa, leaves, grad_out))
        for name, attention in ours.items():
            runs[name].append(seconds_of(attention, leaves, grad_out))
    dense = summarised(dense_runs)
    rows = []
    for name, pattern in patterns.items():
        seconds = summarised(runs[name])
        ratio = {phase: dense[phase] / seconds[phase] for phase in PHASES}
        density = pairs(pattern, context) / pairs(Dense(), context)
        flops = 4 * options.batch * options.heads * width * pairs(pattern, context)
        flex = flex_seconds(pattern, leaves, options) if options.flex else None
        rows.append(
            {
                "pattern": name,
                "context": context,
                "stride": stride,
                "summary": options.summary,
                "batch": options.batch,
                "heads": options.heads,
                "head_width": width,
                "dtype": str(dtype).removeprefix("torch."),
                "density": rounded(density),
                "seconds": {phase: rounded(x) for phase, x in seconds.items()},
                "dense_seconds": {phase: rounded(x) for phase, x in dense.items()},
                "ratio_to_dense": {phase: rounded(x) for phase, x in ratio.items()},
                "fraction_of_ideal": {phase: rounded(x * density) for phase, x in ratio.items()},
                "flex_forward_seconds": flex and rounded(flex),
                "ratio_to_flex_forward": flex and rounded(flex / seconds["forward"]),
                "forward_tflops": rounded(flops / seconds["forward"] / 1e12),
            }
        )
    return rows


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's own dense causal attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def seconds_of(attention: Callable[..., Tensor], leaves: list[Tensor], grad_out: Tensor) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    synchronize(grad_out.device)
    start = time.perf_counter()
    out = attention(*leaves)
    synchronize(grad_out.device)
    middle = time.perf_counter()
    torch.autograd.grad(out, leaves, grad_out)
    synchronize(grad_out.device)
    return middle - start, time.perf_counter() - middle


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarised(runs: list[tuple[float, float]]) -> dict[str, float]:
    """The minimum of each phase over repeats."""
    forward, backward = zip(*runs, strict=True)
    return {"forward": min(forward), "backward": min(backward), "both": min(a + b for a, b in runs)}


def flex_seconds(pattern: Pattern, leaves: list[Tensor], options: argparse.Namespace) -> float | None:
    """Seconds of FlexAttention's compiled forward; None where it does not run or its mask would not fit."""
    context, device = leaves[0].shape[2], leaves[0].device
    if context > FLEX_CONTEXTS.get(device.type, 0):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    try:
        mask = create_block_mask(
            lambda b, h, i, j: pattern.mask(i, j), None, None, context, context, device=str(device)
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        q, k, v = (x.detach() for x in leaves)
        seconds = []
        for _ in range(options.repeats + 1):
            synchronize(device)
            start = time.perf_counter()
            compiled(q, k, v, block_mask=mask)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])
    except Exception as error:  # a peer that cannot run is a dash in the table, not our failure
        print(f"FlexAttention does not run {pattern}: {type(error).__name__}", file=sys.stderr)
        return None


def pairs(pattern: Pattern, context: int) -> int:
    """Pairs of a query and a key that the pattern allows, for one head."""
    resolved = pattern.for_head(0)
    found = (ordered(part, context).by_query for part in resolved.parts())
    return sum(int((intervals.high - intervals.low).sum()) for intervals in found)


# Plans


def measure_plans(context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a pattern: seconds and bytes of its plans as kernels read them, and seconds of the CPU's chunks."""
    stride, rows = stride_of(context, options), []
    for name, pattern in patterns_of(stride, options.summary).items():
        for cached in (ordered, plan, passes):
            cached.cache_clear()
        start = time.perf_counter()
        both = [passes((pattern,), context, *PLAN_TILES, side, torch.device("cpu")) for side in ("queries", "keys")]
        middle = time.perf_counter()
        ordered.cache_clear()
        chunked.cache_clear()
        for part in pattern.parts():
            chunked(part, context)
        rows.append(
            {
                "pattern": name,
                "context": context,
                "stride": stride,
                "tiles": list(PLAN_TILES),
                "plan_seconds": rounded(middle - start),
                "plan_bytes": sum(one.num_bytes() for side in both for one in side),
                "cpu_chunks_seconds": rounded(time.perf_counter() - middle),
            }
        )
    return rows


# What is said and written


def about(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """The machine and the versions."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": next((d.version for d in importlib.metadata.distributions(name="triton")), None),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "backend": options.backend,
        "repeats": options.repeats,
    }


def device_name(device: torch.device) -> str:
    """The model of the card or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def rounded(x: float) -> float:
    """To a few significant digits."""
    return float(f"{x:.{ROUND}g}")


def print_plans(rows: list[dict[str, Any]]) -> None:
    """A table of plans."""
    print(f"\n{'plan':<16}{'context':>10}{'stride':>8}{'seconds':>10}{'MiB':>8}{'cpu chunks, s':>16}")
    for row in rows:
        print(
            f"{row['pattern']:<16}{row['context']:>10,}{row['stride']:>8}{row['plan_seconds']:>10.3f}"
            f"{row['plan_bytes'] / 2**20:>8.2f}{row['cpu_chunks_seconds']:>16.3f}"
        )


def print_timings(rows: list[dict[str, Any]]) -> None:
    """A table of one context, width and dtype."""
    first = rows[0]
    print(
        f"\nn = {first['context']:,}, l = {first['stride']}, c = {first['summary']}, B = {first['batch']}, "
        f"H = {first['heads']}, D = {first['head_width']}, {first['dtype']}; dense attention of torch: "
        + ", ".join(f"{phase} {first['dense_seconds'][phase] * 1e3:.1f} ms" for phase in PHASES)
    )
    titles = [form.format(phase) for form in ("{}, ms", "x dense, {}") for phase in PHASES] + ["of ideal", "x flex fwd"]
    print(f"{'pattern':<16}{'density':>9}" + "".join(f"{title:>18}" for title in titles))
    for row in rows:
        flex = row["ratio_to_flex_forward"]
        cells = [f"{row['seconds'][phase] * 1e3:.2f}" for phase in PHASES]
        cells += [f"{row['ratio_to_dense'][phase]:.2f}" for phase in PHASES]
        cells += [f"{row['fraction_of_ideal']['both']:.0%}", f"{flex:.2f}" if flex else "-"]
        print(f"{row['pattern']:<16}{row['density']:>9.2%}" + "".join(f"{cell:>18}" for cell in cells))


def write(output: Path, found: dict[str, Any]) -> None:
    """JSON and the plot beside it."""
    output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\nwrote {output}")
    if found["timings"]:
        plot(found, output.with_suffix(".png"))
        print(f"wrote {output.with_suffix('.png')}")


def plot(found: dict[str, Any], path: Path) -> None:
    """Ratio to dense attention by pattern, forward and backward together, a group of bars a case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases: dict[str, list[dict[str, Any]]] = {}
    for row in found["timings"]:
        cases.setdefault(f"n = {row['context']:,}, D = {row['head_width']}, {row['dtype']}", []).append(row)
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    names = [row["pattern"] for row in next(iter(cases.values()))]
    for i, (case, rows) in enumerate(cases.items()):
        place = [x + (i - (len(cases) - 1) / 2) * 0.8 / len(cases) for x in range(len(names))]
        bars = axes.bar(place, [row["ratio_to_dense"]["both"] for row in rows], 0.8 / len(cases), label=case)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(names)), names)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("times faster than torch's dense attention")
    axes.set_title(f"Forward and backward, {found['device']}, {found['threads']} threads, torch {found['torch']}")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
