"""Sequence parallelism by exchanging keys: queries stay in their section, and the keys that they read are sent.

Letters: B batch, H heads of queries, K of keys and values, n rows of a section, D and Dv widths, L rows of a piece.

The keys of the section itself and of each run of received keys are disjoint. Each set is attended to separately by the
usual kernels, and the results are merged exactly by their logsumexps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import section_reads
from longstride.sparse_model.division import Division


def section_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: tuple[Pattern, ...],
    division: Division,
    backend: str,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the queries of this process's section; all processes that share the context must call it.

    Args:
        q: (B, H, n, D).
        k, v: (B, K, n, D) and (B, K, n, Dv); K divides H.
        patterns: of each head, over whole contexts.
        division: of the contexts.
        backend: as for ``sparse_attention``.
        sinks: (H,), a logit without a value for each head; None: none.

    Returns:
        (B, H, n, Dv).
    """
    key_heads, rows = k.shape[1:3]
    queries: Sequence[Tensor]
    reads = section_reads(patterns, key_heads, rows * division.size, division.size, division.rank, q.device)
    if reads.travels:
        k, v, received = division.fetch(k, v, reads)
    places = [piece.queries for piece in reads.pieces]
    q, *queries = _Runs.apply(q, places) if places else (q,)
    if reads.own is None:
        out, lse = sparse_attention(q, k, v, patterns, backend=backend, return_lse=True)
    else:
        out, lse = selected_attention(q, k, v, reads.own.of_batch(len(q)), backend=backend, return_lse=True)
    parts, of_parts = [out, lse], [slice(0, rows)]
    if sinks is not None:  # one more part, whose values are 0
        parts += torch.zeros_like(out), sinks.to(lse.dtype)[:, None].expand_as(lse)
        of_parts.append(slice(0, rows))
    if not reads.pieces:
        return out if sinks is None else _merge(of_parts, parts)
    # A single gather, so that the gradient of ``received`` is computed once.
    by_piece = received.index_select(0, reads.keys)
    del received  # frees memory: up to all keys and values of a context
    counts = [key_heads * piece.count for piece in reads.pieces]
    for piece, run, of_piece in zip(reads.pieces, queries, by_piece.split(counts), strict=True):
        both = of_piece.unflatten(0, (key_heads, piece.count)).movedim(2, 0)  # (B, K, M, D + Dv)
        keys, values = both.split([k.shape[3], v.shape[3]], -1)
        run, keys, values = (_padded(x, piece.length) for x in (run, keys, values))
        selection = piece.selection.of_batch(len(q))
        parts += selected_attention(run, keys, values, selection, backend=backend, return_lse=True)
    return _merge([*of_parts, *places], parts)


def _merge(places: list[slice], parts: list[Tensor]) -> Tensor:
    merged: Tensor = _Merged.apply(places, *parts)
    return merged


def _padded(x: Tensor, length: int) -> Tensor:
    """Pad (B, H, ·, D) with rows of zeros to ``length``."""
    return F.pad(x, (0, 0, 0, length - x.shape[2])) if x.shape[2] < length else x


class _Runs(torch.autograd.Function):
    """Rows (B, H, n, D), and some slices of them. The gradients are added to one tensor, without padding each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: list[slice]) -> tuple[Tensor, ...]:
        ctx.places = places
        return rows, *(rows[:, :, place] for place in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_runs: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        for place, added in zip(ctx.places, of_runs, strict=True):
            total[:, :, place] += added
        return total, None


class _Merged(torch.autograd.Function):
    """Merge outputs and logsumexps over disjoint keys to the output over all: (B, H, n, Dv).

    The first pair covers all rows, each of the others the first rows that it has at its place.
    """

    @staticmethod
    def forward(ctx: Any, places: list[slice], *parts: Tensor) -> Tensor:
        outs, lses = parts[::2], parts[1::2]
        top = lses[0].clone()
        for place, lse in zip(places, lses, strict=True):
            rows = top[:, :, place]
            torch.maximum(rows, lse[:, :, : rows.shape[2]], out=rows)
        top.clamp_min_(torch.finfo(top.dtype).min)  # rows without keys have weights of 0
        total = torch.zeros_like(top)
        for place, lse in zip(places, lses, strict=True):
            rows = total[:, :, place]
            rows += (lse[:, :, : rows.shape[2]] - top[:, :, place]).exp()
        merged = top + total.log()
        out = torch.zeros_like(outs[0], dtype=top.dtype)
        for place, part, lse in zip(places, outs, lses, strict=True):
            rows = out[:, :, place]
            rows += part[:, :, : rows.shape[2]] * _weights(lse, merged, place)
        out = out.to(outs[0].dtype)
        ctx.places = places
        ctx.save_for_backward(out, merged, *parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, merged, *parts = ctx.saved_tensors
        grads: list[Tensor | None] = []
        for place, part, lse in zip(ctx.places, parts[::2], parts[1::2], strict=True):
            rows, length = grad[:, :, place], part.shape[2]
            weights = _weights(lse, merged, place)
            of_part = (rows * weights).to(part.dtype)
            changes = part[:, :, : rows.shape[2]].to(merged.dtype) - out[:, :, place]
            of_lse = (rows * changes).sum(-1, keepdim=True) * weights
            grads += [_padded(of_part, length), _padded(of_lse, length).squeeze(-1)]
        return None, *grads


def _weights(lse: Tensor, merged: Tensor, place: slice) -> Tensor:
    """Return a part's weights in the merged rows at its place, (B, H, ·, 1); 0 where it has no key."""
    merged = merged[:, :, place].clamp_min(torch.finfo(merged.dtype).min)
    return (lse[:, :, : merged.shape[2]] - merged).exp().unsqueeze(-1)
