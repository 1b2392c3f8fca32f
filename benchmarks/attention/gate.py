"""The gate before any timing: results must be right."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from benchmarks.attention.cases import patterns_of
from longstride.kernels import sparse_attention
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection
from tests.harness.oracles import Inputs, expected

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, N, D) to (B, H, N, D)
# Contexts and strides. On a card also some with large tiles; blocks of 128 use the closed kernels, of 256 do not.
SIZES = {"cpu": ((192, 16),), "cuda": ((192, 16), (3_072, 128), (4_096, 256))}
SUMMARY = 2
MOST_PROCESSES = 12


def problems(kinds: Sequence[tuple[torch.dtype, int]], device: torch.device, backend: str) -> list[str]:
    """Return a line for every pattern with output or gradients too far from fp64, in any dtype and head width.

    On a card several processes share the cases, as compiling takes the time, and stores its results on disk.
    """
    cases = [
        (name, context, stride, dtype, head_width)
        for dtype, head_width in kinds
        for context, stride in SIZES[device.type]
        for name in patterns_of(stride, SUMMARY)
    ]
    check = functools.partial(problem_of, device.type, backend)
    if device.type == "cpu":
        lines = list(itertools.starmap(check, cases))
    else:
        processes = min(MOST_PROCESSES, os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            lines = list(pool.map(check, *zip(*cases, strict=True)))
    return [line for line in lines if line is not None]


def problem_of(
    device: str, backend: str, name: str, context: int, stride: int, dtype: torch.dtype, head_width: int
) -> str | None:
    """Return a line about a pattern's results; None if rounding in this dtype explains how far they are from fp64."""
    torch.manual_seed(0)
    pattern = patterns_of(stride, SUMMARY)[name]
    where = f"{name}, n = {context:,}, D = {head_width}, {dtype}"
    try:
        inputs = [torch.randn(2, 2, context, head_width, device=device, dtype=dtype) for _ in range(4)]
        wrong = unexplained(results(ours(pattern, backend), inputs), inputs, pattern)
    except Exception as error:
        return f"{where}: {type(error).__name__}: {str(error)[:300]}"
    return wrong and f"{where}: {wrong}"


def unexplained(outputs: list[Tensor], inputs: list[Tensor], reads: Pattern | Selection) -> str | None:
    """Return the first of these results that is farther from fp64 than rounding explains, or None."""
    q, k, v, grad_out = inputs
    bounds = expected(Inputs(q, k, v, grad_out, None), reads)
    for name, result in zip(("out", "dq", "dk", "dv"), outputs, strict=True):
        if not (share := bounds[name].share(result)) <= 1:
            return f"{name} is off by {share:.3g} times what rounding explains"
    return None


def ours(pattern: Pattern | Sequence[Pattern], backend: str) -> Attention:
    """Return our attention with a pattern, or with one per head."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, pattern, backend=backend)

    return attention


def results(attention: Attention, inputs: list[Tensor]) -> list[Tensor]:
    """Return output and gradients of q, k and v; the fourth input is the output's gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def same_bits(attention: Attention, inputs: list[Tensor]) -> bool:
    """Whether two forward and two backward passes on the same inputs agree bit for bit."""
    first, second = results(attention, inputs), results(attention, inputs)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
