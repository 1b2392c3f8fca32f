"""Attention over patterns on the CPU: each part as batches of equal chunks, by batched matrix products.

``forward`` and ``backward``, like those of ``selected``, must only see finite tensors: masked pairs have weights of 0,
by which products multiply, and torch's kernel of ``dense`` does so too.

Letters as in ``slabs``, which has the arithmetic.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from longstride.kernels.backends import empty_like_rows
from longstride.kernels.backends.cpu import dense
from longstride.kernels.backends.cpu.chunks import Chunks, chunked
from longstride.kernels.backends.cpu.slabs import (
    Numbers,
    Piece,
    Scratch,
    merge,
    put,
    rows_of_backward,
    shared,
    slab_backward,
    slab_forward,
    slabs_of,
)
from longstride.kernels.patterns import Pattern, PatternPart


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Reads CPU memory."""
    return None if q.device.type == "cpu" else f"it needs CPU tensors, not {q.device}"


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) in v's dtype and logsumexp (B, H, N) in fp32 (fp64 for fp64)."""
    if dense.serves(q, v, patterns, scale):
        return dense.forward(q, k, v, scale)
    numbers = Numbers.of(q.dtype)
    out = empty_like_rows(v)
    lse = torch.empty(q.shape[:3], dtype=numbers.wide)

    def work(pattern: Pattern, pieces: list[Piece]) -> None:
        scratch = Scratch(numbers)
        for piece in pieces:
            by_name = {name: scratch.rows(name, x[piece], numbers.narrow) for name, x in (("q", q), ("k", k), ("v", v))}
            by_part = (
                _part_forward(scratch, i, **by_name, part=part, scale=scale) for i, part in enumerate(pattern.parts())
            )
            merged = reduce(merge, by_part)
            put(out, piece, merged[0])
            put(lse, piece, merged[1].squeeze(-1))

    shared(work, patterns, q, v)
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    patterns: tuple[Pattern, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. ``out`` and ``lse`` are those of the whole pattern and serve each of its parts."""
    if grad_lse is None and dense.serves(q, v, patterns, scale):
        return dense.backward(grad_out, q, k, v, out, lse, scale)
    numbers = Numbers.of(q.dtype)
    grads = tuple(empty_like_rows(x) for x in (q, k, v))

    def work(pattern: Pattern, pieces: list[Piece]) -> None:
        scratch = Scratch(numbers)
        for piece in pieces:
            rows = rows_of_backward(scratch, piece, (q, k, v), grad_out, grad_lse, out, lse)
            by_part = (_part_backward(scratch, i, rows, part, scale) for i, part in enumerate(pattern.parts()))
            totals = reduce(lambda sums, more: tuple(a.add_(b) for a, b in zip(sums, more, strict=True)), by_part)
            for whole, total in zip(grads, totals, strict=True):
                put(whole, piece, total)

    shared(work, patterns, q, v)
    return grads[0], grads[1], grads[2]


def _part_forward(
    scratch: Scratch, number: int, q: Tensor, k: Tensor, v: Tensor, part: PatternPart, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (G, N, E) and logsumexp (G, N, 1) of one part; 0 and -inf where a row reads no key of it."""
    numbers = scratch.numbers
    chunks = chunked(part, q.shape[1], numbers.alignment)
    out = scratch.take(f"out {number}", *v.shape, dtype=numbers.wide)
    lse = torch.empty(*v.shape[:2], 1, dtype=numbers.wide)
    rows = scratch.ordered("q", q, chunks.query_order)
    keys, values = (scratch.ordered(name, x, chunks.key_order) for name, x in (("k", k), ("v", v)))
    ordered_out = scratch.target("out", out, out.shape[1], chunks.query_order)
    ordered_lse = scratch.target("lse", lse, lse.shape[1], chunks.query_order)
    if not chunks.has_all_rows:
        ordered_out.zero_()
        ordered_lse.fill_(-math.inf)
    for slab in slabs_of(chunks, len(rows)):
        slab_forward(slab, scratch, rows, keys, values, ordered_out, ordered_lse, scale / numbers.nats)
    _put_rows(out, ordered_out, chunks)
    _put_rows(lse, ordered_lse, chunks)
    return out, lse.mul_(numbers.nats) if numbers.binary else lse


def _part_backward(
    scratch: Scratch, number: int, rows: dict[str, Tensor], part: PatternPart, scale: float
) -> tuple[Tensor, ...]:
    """Gradients (G, N, D), (G, N, D), (G, N, E) of q, k and v through one part; ``minus_*`` are (G, N, 1)."""
    chunks = chunked(part, rows["q"].shape[1], scratch.numbers.alignment)
    names = ("q", "k", "v")
    grads = tuple(scratch.take(f"grad_{x} {number}", *rows[x].shape, dtype=scratch.numbers.wide) for x in names)
    by_row = [scratch.ordered(x, rows[x], chunks.query_order) for x in ("q", "grad_out", "minus_lse", "minus_delta")]
    by_key = [scratch.ordered(x, rows[x], chunks.key_order) for x in ("k", "v")]
    grad_q = scratch.target("grad_q", grads[0], grads[0].shape[1], chunks.query_order)
    grad_k = scratch.target("grad_k", grads[1], chunks.num_keys, chunks.key_order)
    grad_v = scratch.target("grad_v", grads[2], chunks.num_keys, chunks.key_order)
    if not chunks.has_all_rows:
        grad_q.zero_()
    if not chunks.has_all_keys_once:
        grad_k.zero_()
        grad_v.zero_()
    grads_in_order = grad_q, grad_k, grad_v
    for slab in slabs_of(chunks, len(by_row[0])):
        slab_backward(slab, scratch, by_row, by_key, grads_in_order, chunks.has_all_keys_once, scale)
    _put_rows(grads[0], grad_q, chunks)
    _put_keys(grads[1], grad_k, chunks)
    _put_keys(grads[2], grad_v, chunks)
    return grads


def _put_rows(whole: Tensor, ordered: Tensor, chunks: Chunks) -> None:
    """Bring (G, N, D) from the order of a part's queries into the natural one, unless it is that already."""
    if chunks.query_inverse is not None:
        torch.index_select(ordered, 1, chunks.query_inverse, out=whole)


def _put_keys(whole: Tensor, ordered: Tensor, chunks: Chunks) -> None:
    """Bring (G, M, D) from the order of a part's keys into (G, N, D); keys that the part does not read get 0."""
    if chunks.key_order is not None and chunks.key_order is chunks.query_order:
        _put_rows(whole, ordered, chunks)  # a permutation, whose inverse is known
    elif chunks.key_order is not None:
        whole.zero_().index_copy_(1, chunks.key_order, ordered)
