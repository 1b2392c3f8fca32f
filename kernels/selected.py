"""Attention over selections, behind a torch custom op.

Like ``sparse_attention``, but the keys that a query reads are tensors, and so arguments of the op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from longstride.kernels.attention import check_heads, check_inputs, check_queries, choose_backend, load, resolve_scale
from longstride.kernels.backends import Saved, accumulator_dtype
from longstride.kernels.op import attention_op
from longstride.kernels.selections import Part, Selection

BACKENDS = ("triton", "cpu", "reference")
ADVICE = 'backend="reference" runs everywhere, with memory that grows with N^2'


# fmt: off
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
# fmt: on


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention where each query reads the keys that a selection gives it.

    A query without keys has output 0, logsumexp -inf and zero gradients. NaN and inf spread as in ``sparse_attention``.
    The values of a selection are not checked: if they break the rules of ``Part``, results are undefined
    (``Selection.check`` detects that).

    Args:
        q: (B, H, M, D) in fp16, bf16, fp32 or fp64. Scores and sums are in fp32 (fp64 for fp64).
        k: (B, K, N, D), N at least M. K may be less than H: see ``sparse_attention``.
        v: (B, K, N, Dv); Dv may differ from D.
        selection: selection for these contexts and heads of q: M rows, and columns of N keys. If M < N, its parts are
            disjoint.
        scale: factor of the scores. Default: 1/sqrt(D).
        backend: auto, triton, cpu or reference. A named backend that cannot run here raises.
        return_lse: also return the logsumexp of each query's scaled scores, (B, H, M) fp32 (fp64 for fp64).

    Returns:
        (B, H, M, Dv) in q's dtype, and with ``return_lse`` the logsumexp.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or the scale is not finite.
        ConfigError: the backend is unknown or cannot run here.
    """
    if q.dim() == k.dim() == 4 and q.shape[2] < k.shape[2]:
        check_queries(q, k, v, 0)
    else:
        check_inputs(q, k, v)
    _check_parts(selection, q, k)
    scale = resolve_scale(q, scale)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    module = load(backend)
    if hasattr(module, "attend_selected"):
        out, lse = module.attend_selected(q, k, v, selection, scale)
    else:
        natural = selection.parts[0].low[:0, :0, :0]  # an empty tensor, as an op's list of tensors has no None
        tensors = [natural if tensor is None else tensor for part in selection.parts for tensor in part]
        out, lse = _attention(q, k, v, tensors, selection.span, selection.disjoint, scale, backend)
    return (out, lse) if return_lse else out


def attend_listed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute attention of one query to listed rows of a cache, for generation by mixers that select keys.

    Args:
        q: (B, H, D) in fp16, bf16, fp32 or fp64, as k and v.
        k, v: (B, K, N, D) and (B, K, N, Dv), in any memory order. K may be less than H: see ``sparse_attention``.
        positions: (B, H, W) integers, distinct rows to read; -1 for none.
        scale: factor of the scores. Default: 1/sqrt(D).

    Returns:
        (B, H, Dv) in q's dtype, without gradient; 0 for a query that reads nothing.

    Raises:
        ValueError: heads of k and v do not match those of q, or the scale is not finite.
    """
    check_heads(q, k, v)
    wide = accumulator_dtype(q.dtype)
    scale = resolve_scale(q, scale)
    missing = (positions < 0)[..., None, :]
    rows = positions.clamp_min(0).long()[..., None].unflatten(1, (k.shape[1], -1))  # grouped by head of k
    with torch.no_grad():
        keys, values = (x[:, :, None].take_along_dim(rows, 3).flatten(1, 2).to(wide) for x in (k, v))
        scores = (q.to(wide)[..., None, :] @ keys.mT).mul_(scale).masked_fill_(missing, -math.inf)
        scores.masked_fill_(missing.all(-1, keepdim=True), 0.0)  # their softmax would be NaN
        weights = scores.softmax(-1).masked_fill_(missing, 0.0)
        values.masked_fill_(missing.mT, 0.0)  # row 0 stands in for them and may be uninitialised
        return (weights @ values).squeeze(-2).to(q.dtype)


def _check_parts(selection: Selection, q: Tensor, k: Tensor) -> None:
    if not selection.parts:
        raise ValueError("a selection needs at least one part")
    if q.shape[2] < k.shape[2] and not selection.disjoint:
        raise ValueError(f"{q.shape[2]} queries of {k.shape[2]} keys need a selection with disjoint parts")
    for number, part in enumerate(selection.parts):
        for name, tensor in zip(part._fields, part, strict=True):
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.device != q.device:
                raise ValueError(
                    f"part {number}: {name} is {tensor.dtype} on {tensor.device}: give int32 on {q.device}"
                )
            length = tensor.shape[-1] if name == "key_order" else q.shape[2]
            if tensor.shape != (*q.shape[:2], length) or not 1 <= length <= k.shape[2]:
                shape = tuple(q.shape[:3])
                raise ValueError(f"part {number}: {name} {tuple(tensor.shape)} must be {shape}, B, H and N of q")


def _selection(tensors: Sequence[Tensor], span: int, disjoint: bool) -> Selection:
    """Rebuild the selection from the op's tensors, four per part."""
    fields = [None if tensor.dim() == 3 and not tensor.shape[-1] else tensor for tensor in tensors]
    parts = tuple(Part(*fields[first : first + 4]) for first in range(0, len(fields), 4))  # type: ignore[arg-type]
    return Selection(parts, span, disjoint)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Tensor], span: int, disjoint: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    return load(backend).selected_forward(q, k, v, _selection(parts, span, disjoint), scale)


def _backward(
    saved: Saved, parts: Sequence[Tensor], span: int, disjoint: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return load(backend).selected_backward(saved, _selection(parts, span, disjoint), scale)


_attention = attention_op(
    "selected_attention",
    "Tensor[] parts, SymInt span, bool disjoint, float scale, str backend",
    _forward,
    _backward,
)
