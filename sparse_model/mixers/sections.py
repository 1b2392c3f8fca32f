"""Attention over patterns where queries stay with their section of a context, and the keys that they read travel.

Letters: B batch, H heads of queries, K of keys and values, n rows of a section, D and Dv widths, L rows of a piece.

What a section reads of itself, and of each run of received keys, are disjoint: each is attended to alone, by the same
kernels as whole contexts are, and all are merged by their logsumexps, which is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longstride.kernels import selected_attention, sparse_attention
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Part, Selection, section_reads
from longstride.sparse_model.division import Division


def section_attention(
    q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], division: Division, backend: str
) -> Tensor:
    """Attention of the queries of this process's section, together with all processes that share the context.

    Args:
        q: (B, H, n, D).
        k, v: (B, K, n, D) and (B, K, n, Dv); K divides H.
        patterns: of each head, over whole contexts.
        division: of the contexts.
        backend: as ``sparse_attention`` takes it.

    Returns:
        (B, H, n, Dv).
    """
    key_heads, rows = k.shape[1:3]
    reads = section_reads(patterns, key_heads, rows * division.size, division.size, division.rank, q.device)
    if division.traffic(rows * division.size, len(patterns), key_heads, (k.shape[3], v.shape[3]), patterns).calls:
        k, v, received = division.fetch(k, v, reads)
    if reads.own is None:
        out, lse = sparse_attention(q, k, v, patterns, backend=backend, return_lse=True)
    else:
        out, lse = selected_attention(q, k, v, _of_batch(reads.own, len(q)), backend=backend, return_lse=True)
    if not reads.pieces:
        return out
    received = F.pad(received, (0, 0, 0, 0, 0, 1))  # a row of zeros, which stands where none is read
    parts, places = [out, lse], [slice(0, rows)]
    for piece in reads.pieces:
        length = piece.keys.shape[1]
        queries = q[:, :, piece.queries]
        queries = F.pad(queries, (0, 0, 0, length - queries.shape[2]))
        both = received[piece.keys.flatten()].unflatten(0, (key_heads, length)).movedim(2, 0)
        keys, values = both.split([k.shape[3], v.shape[3]], -1)
        selection = _of_batch(piece.selection, len(q))
        parts += selected_attention(queries, keys, values, selection, backend=backend, return_lse=True)
        places.append(piece.queries)
    merged: Tensor = _Merged.apply(places, *parts)
    return merged


def _of_batch(selection: Selection, batch: int) -> Selection:
    """One of a single context, for all contexts of a batch."""

    def expanded(part: Part) -> Part:
        return Part(*(None if tensor is None else tensor.expand(batch, -1, -1) for tensor in part))  # type: ignore[arg-type]

    return Selection(tuple(map(expanded, selection.parts)), selection.span, selection.disjoint)


class _Merged(torch.autograd.Function):
    """Outputs and logsumexps over disjoint keys, in turn, to the output over all: (B, H, n, Dv).

    The first are of all rows; each other of those at its place, the first rows that it has.
    """

    @staticmethod
    def forward(ctx: Any, places: list[slice], *parts: Tensor) -> Tensor:
        outs, lses = parts[::2], parts[1::2]
        top = lses[0].clone()
        for place, lse in zip(places, lses, strict=True):
            here = top[:, :, place]
            torch.maximum(here, lse[:, :, : here.shape[2]], out=here)
        top.clamp_min_(torch.finfo(top.dtype).min)  # of rows without keys, whose weights are 0
        total = torch.zeros_like(top)
        for place, lse in zip(places, lses, strict=True):
            here = total[:, :, place]
            here += (lse[:, :, : here.shape[2]] - top[:, :, place]).exp()
        merged = top + total.log()
        out = torch.zeros_like(outs[0], dtype=top.dtype)
        for place, part, lse in zip(places, outs, lses, strict=True):
            here = out[:, :, place]
            here += part[:, :, : here.shape[2]] * _weights(lse, merged, place)
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
            here, spare = grad[:, :, place], part.shape[2] - (place.stop - place.start)
            weights = _weights(lse, merged, place)
            of_part = (here * weights).to(part.dtype)
            changes = part[:, :, : here.shape[2]].to(merged.dtype) - out[:, :, place]
            of_lse = (here * changes).sum(-1) * weights.squeeze(-1)
            grads += [F.pad(of_part, (0, 0, 0, spare)), F.pad(of_lse, (0, spare))]
        return None, *grads


def _weights(lse: Tensor, merged: Tensor, place: slice) -> Tensor:
    """What a part counts in the merged rows at its place, (B, H, ·, 1); 0 where it has no key."""
    merged = merged[:, :, place].clamp_min(torch.finfo(merged.dtype).min)
    return (lse[:, :, : merged.shape[2]] - merged).exp().unsqueeze(-1)
