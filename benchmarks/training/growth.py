"""How other systems' parts scale: Longformer's attention with the context, a mixture with its experts.

``python benchmarks/training/growth.py`` measures forward and backward of one layer's attention at each context,
compared with torch's dense causal attention. It also measures one feed-forward with each number of experts, one a row,
compared with a dense one of equal operations but for the router. All take turns in one process with one thread. Seconds
are processor time, the least of the turns. Memory is the most that torch held at once beyond inputs and parameters.

``--tables`` makes the tables of docs/systems.md from the result file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program from a checkout that is not installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention.peers import dense_attention
from benchmarks.machine import about, in_turns
from benchmarks.report import RESULTS, check_output, markdown, new_parser, replaced, rounded, write_json, write_result
from longstride.kernels import num_pairs, sparse_attention
from longstride.kernels.patterns import Longformer
from longstride.sparse_model import BlockContext, ModelConfig, SparseTransformer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "systems.md"
BEGIN, END = "<!-- made by benchmarks/training/growth.py: begin -->", "<!-- end -->"
CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16")
HEADS, HEAD_WIDTH = 8, 64
DILATED, DILATION, GLOBALS = 2, 2, 4  # heads, positions, positions
Step = Callable[[], object]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[3_072, 12_288], help="positions of attention")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--experts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rows", type=int, default=4_096, help="of a feed-forward")
    parser.add_argument("--width", type=int, default=512, help="of the stream; a feed-forward is four times as wide")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tables", action="store_true", help=f"only make {PAGE.name} anew from the result files")
    options = parser.parse_args(arguments)
    if options.tables:
        PAGE.write_text(with_tables(PAGE.read_text()))
        return 0
    check_output(parser, options, "growth")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {name: getattr(options, name) for name in ("window", "rows", "width", "repeats")}
    result: dict[str, Any] = about(CPU) | sizes | {"attention": [], "experts": []}
    for part, measure in (("attention", attention), ("experts", experts)):
        for dtype in DTYPES:
            result[part] += measure(options, dtype)
            write_json(options.output, result)
    print(tables(result))
    write_result(options, result)
    return 0


def attention(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Measure each context and kind of attention."""
    plain = Longformer(options.window, globals=GLOBALS)
    dilated = Longformer(options.window, DILATION, GLOBALS)
    patterns = (plain,) * (HEADS - DILATED) + (dilated,) * DILATED
    kinds = {"longformer": lambda q, k, v: sparse_attention(q, k, v, patterns), "dense": dense_attention()}
    rows, steps = [], []
    for context in options.contexts:
        *leaves, grad_out = (torch.randn(1, HEADS, context, HEAD_WIDTH, dtype=getattr(torch, dtype)) for _ in range(4))
        for leaf in leaves:
            leaf.requires_grad_()
        pairs = {
            "longformer": sum(num_pairs(pattern, context) for pattern in patterns),
            "dense": HEADS * context * (context + 1) // 2,
        }
        for name, call in kinds.items():
            rows.append({"dtype": dtype, "context": context, "attention": name, "pairs": pairs[name]})
            steps.append(
                lambda call=call, leaves=leaves, grad_out=grad_out: torch.autograd.grad(call(*leaves), leaves, grad_out)
            )
    return measured(rows, steps, options.repeats)


def experts(options: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Measure a dense feed-forward (0 experts) and each number of experts."""
    h = torch.randn(1, options.rows, options.width, dtype=getattr(torch, dtype), requires_grad=True)
    grad_out = torch.randn_like(h)
    rows, steps = [], []
    for count in (0, *options.experts):
        config = {
            "context": options.rows,
            "layers": 1,
            "heads": 1,
            "width": options.width,
            "attention": {"type": "dense"},
            "embedding": {"type": "learned"},
            "feed_forward": {"type": "experts", "count": count, "top": 1} if count else {"type": "dense"},
        }
        model = SparseTransformer(ModelConfig.model_validate(config)).to(h.dtype).train()
        part: Any = model.blocks[0].feed_forward
        counted = {
            "parameters": sum(parameter.numel() for parameter in part.parameters()),
            "operations": part.work(options.rows, 1).forward // options.rows,  # of a row, forward
        }

        def step(part: Any = part) -> None:
            rows, loss, _ = part(h, BlockContext())
            leaves = [h, *part.parameters()]
            if loss is None:
                torch.autograd.grad(rows, leaves, grad_out)
            else:
                torch.autograd.grad((rows, loss), leaves, (grad_out, torch.ones_like(loss)))

        rows.append({"dtype": dtype, "experts": count} | counted)
        steps.append(step)
    return measured(rows, steps, options.repeats)


def measured(rows: list[dict[str, Any]], steps: Sequence[Step], repeats: int) -> list[dict[str, Any]]:
    """Return the rows with the seconds and memory of their steps."""
    peaks = [peak_bytes(step) for step in steps]  # the first run of each, which also builds its plans
    seconds = in_turns(dict(enumerate(steps)), repeats)
    return [
        row | {"seconds": rounded(min(taken)), "peak_bytes": peak}
        for row, taken, peak in zip(rows, seconds.values(), peaks, strict=True)
    ]


def peak_bytes(step: Step) -> int:
    """Return the most bytes that torch's allocator held at once during a step, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    changes = (event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(itertools.accumulate(changes))


def with_tables(page: str) -> str:
    """Return the page's text with its tables made from the result files."""
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("growth-*.json"))]
    return replaced(page, BEGIN, "".join(map(tables, files)), END)


def tables(result: dict[str, Any]) -> str:
    """Format one device's result."""
    contexts = sorted({row["context"] for row in result["attention"]})
    title = (
        f"{result['device']}, one thread, torch {result['torch']}, {result['date']}. {HEADS} heads of width "
        f"{HEAD_WIDTH}, window {result['window']}, {DILATED} heads dilated by {DILATION}, {GLOBALS} global keys:\n"
    )
    lines = []
    for dtype, name in itertools.product(DTYPES, ("longformer", "dense")):
        rows = [row for row in result["attention"] if (row["dtype"], row["attention"]) == (dtype, name)]
        cells = [f"{name}, {dtype}"]
        for row in rows:
            cells += [f"{1e3 * row['seconds']:,.0f}", f"{row['peak_bytes'] / 2**20:.0f}"]
        cells += [f"{rows[-1][key] / rows[0][key]:.1f}×" for key in ("seconds", "peak_bytes", "pairs")]
        lines.append(cells)
    columns = [column for n in contexts for column in (f"{n:,}: ms", "MiB")]
    attentions = markdown(["attention", *columns, "growth of time", "of memory", "of pairs"], lines)
    dense = {row["dtype"]: row["seconds"] for row in result["experts"] if row["experts"] == 0}
    lines = []
    for first in (row for row in result["experts"] if row["dtype"] == DTYPES[0]):
        name = {0: "dense", 1: "1 expert"}.get(first["experts"], f"{first['experts']} experts")
        cells = [name, f"{first['parameters']:,}"]
        for row in (row for row in result["experts"] if row["experts"] == first["experts"]):
            cells += [f"{1e3 * row['seconds']:.0f}", f"{row['seconds'] / dense[row['dtype']]:.2f}"]
        lines.append(cells)
    columns = [column for dtype in DTYPES for column in (f"{dtype}: ms", "× dense")]
    mixtures = markdown(["feed-forward", "parameters", *columns], lines)
    subtitle = f"One expert a row, {result['rows']:,} rows of {result['width']} channels:\n"
    return "\n".join([title, attentions, subtitle, mixtures])


if __name__ == "__main__":
    sys.exit(main())
