"""Sampling through a whole model, a byte at a time, at growing contexts.

Run ``python -m benchmarks.sampling --threads 2``.

The model of paper_small (width, heads, layers) runs with each pattern, with the same random weights and the same code;
dense attention is a pattern like the others. First a gate compares the cached logits of every position with a forward
pass. Times are of the last positions of the context, each from the logits to the chosen byte as a number, and its
append. The caches before them hold random numbers, as sampling them first would change no time. All variants take turns
within every repeat; a time is the least mean over repeats. "own key" reads one key a byte. It shows the cost without
attention, so that the rest of another variant's time is the reading of its keys. Growth is an exponent in the context,
from the smallest to the largest. The table goes to the terminal, all figures to JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

from benchmarks.attention.cases import DTYPES, stride_of
from benchmarks.machine import about, synchronize
from benchmarks.report import ROOT, cell, exponent, new_parser, parse, rounded, write_result
from longstride.kernels import num_keys_read
from longstride.sparse_model import ModelConfig, Session, SparseTransformer
from longstride.sparse_model.generation import choose
from longstride.sparse_model.mixers.cache import KeyValues

PAPER_SMALL = ROOT / "ds_configs" / "experiments" / "paper_small.json"
SUMMARY = 8  # of paper_small
FLOOR = "own key"
GROWING = ("keys_read", "seconds", "reading_seconds")
GATE_CONTEXT = 192


def attentions_of(stride: int) -> dict[str, dict[str, Any]]:
    """Return the attentions to measure, by their name in tables."""
    return {
        "strided": {"type": "strided", "stride": stride},
        "fixed": {"type": "fixed", "stride": stride, "summary": SUMMARY},
        "dense": {"type": "dense"},
        FLOOR: {"type": "local", "window": 1},
    }


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if the gate fails."""
    options = read_options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in attentions_of(1):
        if problem := gate(name, options):
            print(f"{name}: {problem}", file=sys.stderr)
            return 1
    timings = [row for context in sorted(options.contexts) for row in measure(context, options)]
    growth = growth_of(timings)
    print_table(timings, growth, options)
    measured = {"calls": options.calls, "repeats": options.repeats}
    write_result(options, {**about(options.device), **measured, "timings": timings, "growth": growth})
    return 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[3_072, 12_288, 24_576, 65_536])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="float32 on the CPU, else bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--calls", type=int, default=50, help="positions a repeat")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=None, help="as torch has them")
    options = parse(parser, arguments, "sampling")
    options.device = torch.device(options.device)
    options.dtype = getattr(torch, options.dtype or DTYPES[options.device.type][0])
    for context in options.contexts:
        if context % stride_of(context) or context <= options.calls:
            parser.error(f"--contexts={context}: must be above --calls and a multiple of {stride_of(context)}")
    return options


def model_of(name: str, context: int, options: argparse.Namespace) -> SparseTransformer:
    """Make the model of paper_small with another pattern and context; its random weights are always the same."""
    stride = stride_of(context)
    small = json.loads(PAPER_SMALL.read_text())["model"]
    changed = {
        "context": context,
        "attention": attentions_of(stride)[name],
        "embedding": {"type": "text", "row_width": stride},
    }
    torch.manual_seed(0)
    model = SparseTransformer(ModelConfig.model_validate({**small, **changed}))
    torch.nn.init.normal_(model.logits.weight, std=0.1)  # all 0 before training: any byte, and a gate that sees nothing
    return model.to(options.device, options.dtype).eval()


@torch.no_grad()
def gate(name: str, options: argparse.Namespace) -> str | None:
    """Describe the error if the logits of a position differ from a forward pass by more than the dtype explains."""
    model = model_of(name, GATE_CONTEXT, options)
    tokens = torch.randint(256, (2, GATE_CONTEXT), device=options.device)
    session, logits = Session(model, len(tokens)), []
    for token in tokens.T:
        logits.append(session.logits)
        session.append(token)
    expected = model(tokens).double()
    error = float((torch.stack(logits, 1).double() - expected).abs().max() / expected.abs().max())
    allowed = 64 * torch.finfo(options.dtype).eps
    return None if error <= allowed else f"off by {error:.3g} of the largest logit, {allowed:.3g} allowed"


def measure(context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each pattern: keys that the last position reads in all layers and heads, and the seconds of a byte."""
    sessions = {name: filled(model_of(name, context, options), options) for name in attentions_of(1)}
    for session in sessions.values():  # what is kept from call to call, and compilation, are not what is timed
        seconds_of(session, options)
    runs: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(options.repeats):
        for name, session in sessions.items():
            runs[name].append(seconds_of(session, options))
    seconds = {name: min(times) for name, times in runs.items()}
    config = sessions[FLOOR].model.config
    return [
        {
            "pattern": name,
            "context": context,
            "stride": stride_of(context),
            "layers": config.layers,
            "heads": config.heads,
            "width": config.width,
            "batch": options.batch,
            "dtype": str(options.dtype).removeprefix("torch."),
            "keys_read": keys_read(session.model.config, context - 1),
            "seconds": rounded(seconds[name]),
            "bytes_per_second": rounded(options.batch / seconds[name]),
            "reading_seconds": rounded(max(0.0, seconds[name] - seconds[FLOOR])),
            "times_dense": rounded(seconds["dense"] / seconds[name]),
        }
        for name, session in sessions.items()
    ]


def filled(model: SparseTransformer, options: argparse.Namespace) -> Session:
    """Make a session whose cache is random."""
    session = Session(model, options.batch)
    with torch.inference_mode():
        for state in session.states:
            assert isinstance(state, KeyValues)
            for rows in (state.keys, state.values):
                rows.normal_()
    return session


@torch.no_grad()
def seconds_of(session: Session, options: argparse.Namespace) -> float:
    """Measure the mean seconds of a byte at the last positions of the context."""
    session.reset()
    session.position = session.length - options.calls
    session._tokens.zero_()  # any bytes, as reset leaves none
    generator = torch.Generator(options.device).manual_seed(0)
    synchronize(options.device)
    start = time.perf_counter()
    for _ in range(options.calls):
        chosen = choose(session.logits, 1.0, None, None, generator)
        chosen.tolist()
        session.append(chosen)
    return (time.perf_counter() - start) / options.calls


def keys_read(config: ModelConfig, position: int) -> int:
    """Count the keys that a byte reads in all heads of all layers."""
    return sum(num_keys_read(p, position, config.context) for layer in config.layer_patterns() for p in layer)


def growth_of(timings: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Compute each pattern's exponents in the context, from the smallest to the largest."""
    growth: dict[str, dict[str, float | None]] = {}
    for name in attentions_of(1):
        rows = [row for row in timings if row["pattern"] == name]
        ends = rows[0], rows[-1]
        growth[name] = {key: exponent(*((row["context"], row[key]) for row in ends)) for key in GROWING}
    return growth


def print_table(
    timings: list[dict[str, Any]], growth: dict[str, dict[str, float | None]], options: argparse.Namespace
) -> None:
    """Print keys read and milliseconds a byte at each context, and their growth."""
    first = timings[0]
    sizes = f"{first['layers']} layers, {first['heads']} heads, width {first['width']}, B = {options.batch}"
    print(f"{sizes}, {options.dtype}, {torch.get_num_threads()} threads; keys read, ms a byte, times dense")
    contexts = list(dict.fromkeys(row["context"] for row in timings))
    print(f"{'pattern':<9}" + "".join(f"{f'n = {n:,}':>27}" for n in contexts) + f"{'growth: keys, ms, reading':>27}")
    for name, ends in growth.items():
        rows = [row for row in timings if row["pattern"] == name]
        cells = [f"{row['keys_read']:,}{row['seconds'] * 1e3:>9.3f}{row['times_dense']:>7.2f}" for row in rows]
        cells.append(" ".join(f"{cell(value):>6}" for value in ends.values()))
        print(f"{name:<9}" + "".join(f"{text:>27}" for text in cells))


if __name__ == "__main__":
    sys.exit(main())
