"""What is not finite reaches its readers alone, whatever computes attention: a look at results, and a second run.

Fast products bring 0 * NaN to rows that read nothing of it. Whatever crosses so is NaN where it arrives. So results
are looked at, at the cost of a sum; where one is not finite, all is computed again from inputs in which zeros stand for
what is not finite, and then what has read it is set to NaN. The rest has the bits of a run in which all is finite.

Numbers whose products may overflow count as infinite there, as inf - inf at a forbidden pair is NaN as well. What reads
an inf is NaN, where arithmetic may have left a number because the sign of the inf made its weight 0.

Letters: B batch, H heads of queries, K heads of keys, N positions, M keys of a part, C channels or other marks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Part, Selection, pattern_parts

Reads = tuple[Pattern, ...] | Selection  # of all heads


def forward_apart(
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, reads: Reads
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) and logsumexp (B, H, N) of ``attend(q, k, v)``, NaN for readers alone.

    Both are NaN where the query or a key that it reads is not finite, and a channel of the output where that of a value
    that it reads is not. Queries without keys stay 0 and -inf.
    """
    out, lse = attend(q, k, v)
    if _is_finite(out) and bool(lse.sum() < math.inf):  # -inf where nothing is read
        return out, lse
    bad_q, bad_k, bad_v = bad = [_bad(x) for x in (q, k, v)]
    if not any(bool(x.any()) for x in bad):
        return out, lse
    out, lse = attend(*(x.masked_fill(where, 0.0) for x, where in zip((q, k, v), bad, strict=True)))
    met = _read(torch.cat([_any(bad_k), bad_v], -1), reads, q.shape[1])
    lost = _any(bad_q) & (lse > -math.inf)[..., None] | met[..., :1]
    return out.masked_fill(lost | met[..., 1:], math.nan), lse.masked_fill(lost[..., 0], math.nan)


def backward_apart(
    differentiate: Callable[..., tuple[Tensor, Tensor, Tensor]],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    reads: Reads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by ``differentiate`` of the arguments before ``reads``, NaN for readers alone.

    A query's is NaN where the query, a key or a value that it reads, or a gradient that it is given is not finite. Then
    so are those of the keys that it reads. Those of their values are where its logsumexp is, or in a channel of its
    ``grad_out``.
    """
    grads = differentiate(grad_out, grad_lse, q, k, v, out, lse)
    if all(map(_is_finite, grads)):
        return grads
    given = (grad_out, q, k, v, out)
    bad_grad, bad_q, bad_k, bad_v, bad_out = bad = [_bad(x) for x in given]
    bad_grad_lse = torch.zeros_like(lse, dtype=torch.bool) if grad_lse is None else _bad(grad_lse)
    met = _read(torch.cat([_any(bad_k), _any(bad_v)], -1), reads, q.shape[1])
    sees = (lse > -math.inf).logical_or_(lse.isnan())[..., None]
    lost = sees & (_any(bad_q) | ~(lse < math.inf)[..., None]) | met[..., :1]
    wrong = sees & (_any(bad_grad) | _any(bad_out) | bad_grad_lse[..., None]) | lost | met[..., 1:]
    if not any(bool(x.any()) for x in (*bad, bad_grad_lse, lost)):
        return grads
    clean = [x.masked_fill(where, 0.0) for x, where in zip(given, bad, strict=True)]
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(bad_grad_lse, 0.0)
    # Weights of what is lost become 0, so that nothing in their place overflows.
    lse = lse.masked_fill(lost[..., 0], torch.finfo(lse.dtype).max / 4)
    dq, dk, dv = differentiate(clean[0], grad_lse, *clean[1:], lse)
    of_keys = _readers(torch.cat([wrong, lost | bad_grad], -1), reads, k.shape[1])
    dq.masked_fill_(wrong, math.nan)
    dk.masked_fill_(of_keys[..., :1], math.nan)
    dv.masked_fill_(of_keys[..., 1:], math.nan)
    return dq, dk, dv


def _is_finite(x: Tensor) -> bool:
    """False where anything is not finite, and where a sum overflows, which costs no more than a second look."""
    total = x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None)
    return math.isfinite(total.item())


def _bad(x: Tensor) -> Tensor:
    """Where something is not finite, or so large that products of two of them may not be."""
    return (
        x.abs() <= min(torch.finfo(torch.promote_types(x.dtype, torch.float32)).max ** 0.4, torch.finfo(x.dtype).max)
    ).logical_not_()


def _any(x: Tensor) -> Tensor:
    return x.any(-1, keepdim=True)


def _parts(reads: Reads, context: int, device: torch.device) -> Iterator[tuple[slice | list[int], Part]]:
    """Some heads and a part of theirs, whose tensors are (·, ·, N or M, 1) int64 here; all parts of all heads."""
    by_heads: list[tuple[slice | list[int], Sequence[Part]]] = []
    if isinstance(reads, Selection):
        by_heads.append((slice(None), reads.parts))
    else:
        for pattern in dict.fromkeys(reads):
            heads = [head for head, other in enumerate(reads) if other == pattern]
            by_heads.append((heads, pattern_parts(pattern, context)))

    def index(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device).long()[..., None]

    for some, parts in by_heads:
        for part in parts:
            yield some, Part(*map(index, part))  # type: ignore[arg-type]


def _read(marks: Tensor, reads: Reads, heads: int) -> Tensor:
    """Whether a query reads a key that has a mark: (B, H, N, C) bool of (B, K, N, C) bool; linear in N."""
    marks = marks.repeat_interleave(heads // marks.shape[1], 1)
    found = torch.zeros_like(marks)
    for some, (query_order, key_order, low, high) in _parts(reads, marks.shape[2], marks.device):
        columns = marks[:, some] if key_order is None else marks[:, some].take_along_dim(key_order, 2)
        before = pad(columns.cumsum(2, dtype=torch.int32), (0, 0, 1, 0))  # (B, ·, M + 1, C) marks before a column
        rows = before.take_along_dim(high, 2) > before.take_along_dim(low, 2)
        found[:, some] |= rows if query_order is None else _put(rows, query_order, marks.shape[2])
    return found


def _readers(marks: Tensor, reads: Reads, heads: int) -> Tensor:
    """Whether a key is read by a query that has a mark: (B, K, N, C) bool of (B, H, N, C) bool, likewise."""
    found = torch.zeros_like(marks)
    for some, (query_order, key_order, low, high) in _parts(reads, marks.shape[2], marks.device):
        rows = marks[:, some] if query_order is None else marks[:, some].take_along_dim(query_order, 2)
        num_keys = marks.shape[2] if key_order is None else key_order.shape[2]
        change = torch.zeros(*rows.shape[:2], num_keys + 1, rows.shape[3], dtype=torch.int32, device=rows.device)
        change.scatter_add_(2, low.expand_as(rows), rows.int()).scatter_add_(2, high.expand_as(rows), -rows.int())
        columns = change.cumsum(2)[:, :, :-1] > 0  # how many rows with a mark read a column
        found[:, some] |= columns if key_order is None else _put(columns, key_order, marks.shape[2])
    return found.unflatten(1, (heads, -1)).any(2)


def _put(ordered: Tensor, order: Tensor, context: int) -> Tensor:
    """Marks (B, ·, M, C) where they stand among all N positions; False elsewhere."""
    whole = ordered.new_zeros(*ordered.shape[:2], context, ordered.shape[3])
    return whole.scatter_(2, order.expand_as(ordered), ordered)
