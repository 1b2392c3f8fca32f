"""Attention over patterns on the CPU: each part as batches of equal chunks, by batched matrix products.

Letters as in ``slabs``, which has the computation of a slab.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows
from longstride.kernels.backends.cpu import dense
from longstride.kernels.backends.cpu.chunks import Chunks, chunked
from longstride.kernels.backends.cpu.slabs import (
    Piece,
    Scratch,
    backward_rows,
    empty_by_query_head,
    input_rows,
    merge,
    put,
    run_pieces,
    slab_backward,
    slab_forward,
    slabs_of,
    sum_groups,
)
from longstride.kernels.patterns import Pattern, PatternPart
from longstride.kernels.plan import num_pairs


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the backend cannot run on these tensors, or None."""
    return None if q.device.type == "cpu" else f"it needs CPU tensors, not {q.device}"


def visited_pairs(q: Tensor, pattern: Pattern) -> int:
    """Return how many pairs a head like (B, H, N, D) computes, masked ones included."""
    context = q.shape[2]
    if dense.fits(q, q, (pattern,)):  # torch does not expose the tiles of its kernel
        return num_pairs(pattern, context)
    return sum(chunked(part, context).num_pairs() for part in pattern.parts())


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Return output (B, H, N, E) in v's dtype and logsumexp (B, H, N) in fp32 (fp64 for fp64)."""
    if dense.serves(q, k, v, patterns, scale):
        return dense.forward(q, k, v, patterns, scale)
    wide = accumulator_dtype(q.dtype)
    out = empty_like_rows(v, heads=q.shape[1])
    lse = torch.empty(q.shape[:3], dtype=wide)

    def work(scratch: Scratch, pattern: Pattern, piece: Piece) -> None:
        rows = input_rows(scratch, piece, q=q, k=k, v=v)
        first, *others = pattern.parts()
        target = scratch.results("out", out, piece)
        merged = target, _part_forward(scratch, target, rows, first, scale)
        for part in others:
            target = scratch.take("out of a part", *rows["v"].shape, dtype=wide)
            merged = merge(merged, (target, _part_forward(scratch, target, rows, part, scale)))
        put(out, piece, merged[0])
        put(lse, piece, merged[1].squeeze(-1))

    run_pieces(work, patterns, q, v)
    return out, lse


def backward(saved: Saved, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. ``out`` and ``lse`` of the full pattern are used for each of its parts."""
    q, k, v = saved[:3]
    if saved.grad_lse is None and dense.serves(q, k, v, patterns, scale):
        return dense.backward(saved, patterns, scale)
    grads = tuple(empty_by_query_head(x, q.shape[1], accumulator_dtype(q.dtype)) for x in (q, k, v))

    def work(scratch: Scratch, pattern: Pattern, piece: Piece) -> None:
        rows = backward_rows(scratch, piece, saved)
        totals = [scratch.results(f"grad_{name}", x, piece) for name, x in zip("qkv", grads, strict=True)]
        for number, part in enumerate(pattern.parts()):
            _part_backward(scratch, totals, rows, part, scale, adds=number > 0)
        for grad, total in zip(grads, totals, strict=True):
            put(grad, piece, total)

    run_pieces(work, patterns, q, v)
    return grads[0], sum_groups(grads[1], k), sum_groups(grads[2], v)


def _part_forward(scratch: Scratch, out: Tensor, rows: dict[str, Tensor], part: PatternPart, scale: float) -> Tensor:
    """Write the output (G, N, E) of one part and return its logsumexp (G, N, 1): 0 and -inf for rows without keys."""
    chunks = chunked(part, out.shape[1])
    lse = torch.empty(*out.shape[:2], 1, dtype=scratch.numbers.wide)
    q = scratch.ordered("q", rows["q"], chunks.query_order)
    k, v = (scratch.ordered(name, rows[name], chunks.key_order) for name in ("k", "v"))
    ordered_out = scratch.target("out", out, out.shape[1], chunks.query_order)
    ordered_lse = scratch.target("lse", lse, lse.shape[1], chunks.query_order)
    if not chunks.has_all_rows:
        ordered_out.zero_()
        ordered_lse.fill_(-math.inf)
    for slab in slabs_of(chunks, len(q)):
        slab_forward(slab, scratch, q, k, v, ordered_out, ordered_lse, scale / scratch.numbers.nats)
    _put_rows(out, ordered_out, chunks, adds=False)
    _put_rows(lse, ordered_lse, chunks, adds=False)
    return lse.mul_(scratch.numbers.nats)


def _part_backward(
    scratch: Scratch, grads: list[Tensor], rows: dict[str, Tensor], part: PatternPart, scale: float, adds: bool
) -> None:
    """Write or add the gradients (G, N, D), (G, N, D), (G, N, E) of q, k and v through one part."""
    chunks = chunked(part, rows["q"].shape[1])
    by_row = [scratch.ordered(x, rows[x], chunks.query_order) for x in ("q", "grad_out", "minus_lse", "minus_delta")]
    by_key = [scratch.ordered(x, rows[x], chunks.key_order) for x in ("k", "v")]
    grad_q = scratch.target("grad_q", grads[0], grads[0].shape[1], chunks.query_order)
    grad_k = scratch.target("grad_k", grads[1], chunks.num_keys, chunks.key_order)
    grad_v = scratch.target("grad_v", grads[2], chunks.num_keys, chunks.key_order)
    adds_rows, adds_keys = adds and grad_q is grads[0], adds and grad_k is grads[1]
    if not adds_rows and not chunks.has_all_rows:
        grad_q.zero_()
    if not adds_keys and not chunks.has_all_keys_once:
        grad_k.zero_()
        grad_v.zero_()
        adds_keys = True
    for slab in slabs_of(chunks, len(by_row[0])):
        slab_backward(slab, scratch, by_row, by_key, (grad_q, grad_k, grad_v), (adds_rows, adds_keys), scale)
    _put_rows(grads[0], grad_q, chunks, adds)
    _put_keys(grads[1], grad_k, chunks, adds)
    _put_keys(grads[2], grad_v, chunks, adds)


def _put_rows(target: Tensor, ordered: Tensor, chunks: Chunks, adds: bool) -> None:
    """Permute (G, N, D) from the order of a part's queries to the natural one, unless it is in place."""
    if chunks.query_inverse is None:
        return
    if adds:
        target.add_(torch.index_select(ordered, 1, chunks.query_inverse))
    else:
        torch.index_select(ordered, 1, chunks.query_inverse, out=target)


def _put_keys(target: Tensor, ordered: Tensor, chunks: Chunks, adds: bool) -> None:
    """Move (G, M, D) from the order of a part's keys to (G, N, D), with 0 for keys that the part does not read."""
    if chunks.key_order is not None and chunks.key_order is chunks.query_order:
        _put_rows(target, ordered, chunks, adds)  # the order is a permutation
    elif chunks.key_order is not None and adds:
        target.index_add_(1, chunks.key_order, ordered)
    elif chunks.key_order is not None:
        target.zero_().index_copy_(1, chunks.key_order, ordered)
