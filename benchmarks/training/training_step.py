"""Seconds of one whole training step with our sparse attention, and of the same model with torch's dense attention.

``python -m benchmarks.training.training_step``: forward, loss, backward and fused AdamW of the enwik8 model (30 layers,
context 12,288), with activation checkpointing and without. One model serves all variants: another function replaces its
``sparse_attention``, and the variants take turns. In bf16 the weights are bf16, as the engine trains.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor

from benchmarks.attention.peers import DENSE_KERNELS, dense_attention, reason_of
from benchmarks.machine import about, synchronize
from benchmarks.report import cell, new_parser, parse, ratio, rounded, write_json, write_result
from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Dense, Strided
from longstride.sparse_model import BlockContext, ModelConfig, SparseTransformer
from longstride.sparse_model.mixers import attention

STRIDE, SUMMARY = 128, 32
HEADS, WIDTH, DROPOUT = 8, 512, 0.4
SPARSE = "sparse"
Replacement = Callable[..., Tensor]  # called as the model calls sparse_attention


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if one of our own variants fails."""
    options = read_options(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = model_of(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    tokens = torch.randint(0, 256, (options.batch, options.context), device=device)
    result = {
        **about(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "stride": options.stride,
        "summary": options.summary,
        **{name: getattr(options, name) for name in ("context", "layers", "batch", "dtype", "backend", "repeats")},
        "steps": [],
        "failures": [],
    }
    for checkpointing in {"both": (True, False), "yes": (True,), "no": (False,)}[options.checkpointing]:
        model.activation_checkpoint = recompute if checkpointing else None
        step = functools.partial(training_step, model, optimizer, tokens)
        measure(step, variants(options, device), checkpointing, result, device)
        write_json(options.output, result)
    print_steps(result)
    write_result(options, result)
    return 1 if any(failure["variant"] == SPARSE for failure in result["failures"]) else 0


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--context", type=int, default=12_288)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=None, help="4 on a card, 1 on the CPU")
    parser.add_argument("--stride", type=int, default=STRIDE)
    parser.add_argument("--summary", type=int, default=SUMMARY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on the CPU")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checkpointing", choices=("both", "yes", "no"), default="both")
    parser.add_argument("--only", nargs="+", default=None, metavar="VARIANT", help="of sparse, dense …; all by default")
    options = parse(parser, arguments, "training-step")
    on_card = options.device.startswith("cuda")
    options.batch = options.batch or (4 if on_card else 1)
    options.dtype = options.dtype or ("bfloat16" if on_card else "float32")
    return options


def model_of(options: argparse.Namespace, device: torch.device) -> SparseTransformer:
    """Make the enwik8 model, in training."""
    config = ModelConfig.model_validate(
        {
            "context": options.context,
            "layers": options.layers,
            "heads": HEADS,
            "width": WIDTH,
            "dropout": DROPOUT,
            "attention": {
                "type": "fixed",
                "stride": options.stride,
                "summary": options.summary,
                "combine": "merged",
            },
            "embedding": {"type": "text", "row_width": options.stride},
            "backend": options.backend,
        }
    )
    return SparseTransformer(config).to(device=device, dtype=getattr(torch, options.dtype)).train()


def recompute(block: torch.nn.Module, h: Tensor, context: BlockContext) -> Any:
    """Run a residual block whose activations are recomputed in the backward pass."""
    return torch.utils.checkpoint.checkpoint(block, h, context, use_reentrant=False)


def variants(options: argparse.Namespace, device: torch.device) -> dict[str, Replacement | None]:
    """Return the replacements of ``sparse_attention``; None leaves the model as it is."""

    def dense(kernel: Any = None) -> Replacement:
        attention = dense_attention(kernel)
        return lambda q, k, v, patterns, backend: attention(q, k, v)

    def ours(pattern: Any) -> Replacement:
        return lambda q, k, v, patterns, backend: sparse_attention(q, k, v, pattern, backend=backend)

    peers = {f"dense {name}": dense(kernel) for name, kernel in DENSE_KERNELS.items()}
    every = {
        SPARSE: None,
        **(peers if device.type == "cuda" else {"dense torch": dense()}),
        "our strided": ours(Strided(options.stride)),
        "our dense": ours(Dense()),
    }
    return {name: variant for name, variant in every.items() if options.only is None or name in options.only}


def attention_replaced(replacement: Replacement | None) -> contextlib.AbstractContextManager[Any]:
    """Replace the model's ``sparse_attention`` while the block runs; None leaves it."""
    if replacement is None:
        return contextlib.nullcontext()
    return mock.patch.object(attention, "sparse_attention", replacement)


def training_step(model: SparseTransformer, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Take one step; gradients are freed even if it fails, so that every step allocates alike."""
    try:
        model(tokens, return_nats=True).mean().backward()
        optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)


def measure(
    step: Callable[[], None],
    found_variants: dict[str, Replacement | None],
    checkpointing: bool,
    result: dict[str, Any],
    device: torch.device,
) -> None:
    """Add a row for each variant: the median of several turns on a GPU, the minimum on a CPU."""
    best = statistics.median if device.type == "cuda" else min
    running = dict(found_variants)
    for name, replacement in found_variants.items():
        try:
            timed(step, replacement, device)
        except Exception as error:  # a peer that cannot run, or a variant that does not fit, leaves the others
            del running[name]
            result["failures"].append({"variant": name, "checkpointing": checkpointing, "reason": reason_of(error)})
            print(f"{name}, checkpointing {checkpointing}: {reason_of(error)}", file=sys.stderr)
    runs: dict[str, list[tuple[float, int | None]]] = {name: [] for name in running}
    for _ in range(result["repeats"]):
        for name, replacement in running.items():
            runs[name].append(timed(step, replacement, device))
    seconds = {name: best([second for second, _ in some]) for name, some in runs.items()}
    dense = {name: x for name, x in seconds.items() if name.startswith("dense ")}
    for name, x in seconds.items():
        peak = max((peak for _, peak in runs[name] if peak is not None), default=None)
        result["steps"].append(
            {
                "variant": name,
                "checkpointing": checkpointing,
                "seconds": rounded(x),
                "tokens_per_second": rounded(result["batch"] * result["context"] / x),
                "times_dense": {peer: rounded(ratio(theirs, x)) for peer, theirs in dense.items()},
                "peak_bytes": peak,
            }
        )


def timed(step: Callable[[], None], replacement: Replacement | None, device: torch.device) -> tuple[float, int | None]:
    """Measure the wall seconds of a step, including gaps between launches, and its peak memory."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    with attention_replaced(replacement):
        step()
        synchronize(device)
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def print_steps(result: dict[str, Any]) -> None:
    """Print the table."""
    print(
        f"\n{result['device']}: {result['parameters']:,} parameters, {result['layers']} layers, "
        f"n = {result['context']:,}, batch {result['batch']}, {result['dtype']}"
    )
    print(f"{'variant':<16}{'checkpoints':>12}{'seconds':>10}{'tokens/s':>12}{'GiB':>8}  times dense")
    for row in result["steps"]:
        times = ", ".join(f"{cell(x)} x {name}" for name, x in row["times_dense"].items())
        print(
            f"{row['variant']:<16}{'yes' if row['checkpointing'] else 'no':>12}{row['seconds']:>10.4f}"
            f"{row['tokens_per_second']:>12,.0f}{cell(row['peak_bytes'], '.2f', 2**-30):>8}  {times}"
        )


if __name__ == "__main__":
    sys.exit(main())
