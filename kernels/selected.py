"""Attention over a selection: the public call, behind a torch custom op of its own.

As ``sparse_attention``, but which keys a query reads is data, and so an argument of the op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from longstride.kernels.attention import check_heads, check_whole, checked_scale, choose_backend, load
from longstride.kernels.backends import accumulator_dtype
from longstride.kernels.op import attention_op
from longstride.kernels.selections import Part, Selection

BACKENDS = ("triton", "cpu", "reference")
ADVICE = 'backend="reference" runs everywhere, with memory that grows with N^2'


@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


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
    """Softmax attention in which each position reads the keys that a selection gives it.

    A query without keys gives output 0, logsumexp -inf and zero gradients. What is not finite spreads as in
    ``sparse_attention``. A selection's values are not looked at: where they break the rules of ``Part``, results are
    undefined (``Selection.check`` finds that).

    Args:
        q: (B, H, N, D), one of fp16, bf16, fp32, fp64; scores and sums are kept in fp32 (fp64 for fp64).
        k: (B, K, N, D). K may be less than H: see ``sparse_attention``.
        v: (B, K, N, Dv); Dv may differ from D.
        selection: of these contexts and heads of q.
        scale: factor of the scores; 1/sqrt(D) where None.
        backend: auto, triton, cpu or reference. A named backend that cannot run here raises.
        return_lse: also return the logsumexp of each query's scaled scores, (B, H, N) fp32 (fp64 for fp64).

    Returns:
        (B, H, N, Dv) in q's dtype, and with ``return_lse`` the logsumexp.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the scale is not finite.
        ConfigError: the backend is unknown or cannot run here.
    """
    check_whole(q, k, v)
    _check_parts(selection, q)
    scale = checked_scale(q, scale)
    backend = choose_backend(backend, BACKENDS, (q, k, v), ADVICE)
    module = load(backend)
    if hasattr(module, "attend_selected"):
        out, lse = module.attend_selected(q, k, v, selection, scale)
    else:
        out, lse = _attention(q, k, v, _tensors(selection), selection.span, selection.disjoint, scale, backend)
    return (out, lse) if return_lse else out


def attend_listed(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention of one query to listed rows of a cache: for generation, where a state knows which keys it selects.

    Args:
        q: (B, H, D); one of fp16, bf16, fp32, fp64, as k and v.
        k, v: (B, K, N, D) and (B, K, N, Dv), in any order in memory. K may be less than H: see ``sparse_attention``.
        positions: (B, H, W) integers, the rows to read, each once; -1 for none.
        scale: factor of the scores; 1/sqrt(D) where None.

    Returns:
        (B, H, Dv) in q's dtype; 0 for a query that reads nothing. There is no gradient.

    Raises:
        ValueError: heads of k and v do not fit those of q, or the scale is not finite.
    """
    check_heads(q, k, v)
    wide = accumulator_dtype(q.dtype)
    scale = checked_scale(q, scale)
    missing = (positions < 0)[..., None, :]
    rows = positions.clamp_min(0).long()[..., None].unflatten(1, (k.shape[1], -1))  # by groups that share a head of k
    with torch.no_grad():
        keys, values = (x[:, :, None].take_along_dim(rows, 3).flatten(1, 2).to(wide) for x in (k, v))
        scores = (q.to(wide)[..., None, :] @ keys.mT).mul_(scale).masked_fill_(missing, -math.inf)
        scores.masked_fill_(missing.all(-1, keepdim=True), 0.0)  # whose softmax would be NaN
        weights = scores.softmax(-1).masked_fill_(missing, 0.0)
        values.masked_fill_(missing.mT, 0.0)  # row 0, which stands in for them, may not be written yet
        return (weights @ values).squeeze(-2).to(q.dtype)


def _check_parts(selection: Selection, q: Tensor) -> None:
    if not selection.parts:
        raise ValueError("a selection needs at least one part")
    for number, part in enumerate(selection.parts):
        for name, tensor in zip(part._fields, part, strict=True):
            if tensor is None:
                continue
            if tensor.dtype != torch.int32 or tensor.device != q.device:
                raise ValueError(
                    f"part {number}: {name} is {tensor.dtype} on {tensor.device}: give int32 on {q.device}"
                )
            length = tensor.shape[-1] if name == "key_order" else q.shape[2]
            if tensor.shape != (*q.shape[:2], length) or not 1 <= length <= q.shape[2]:
                wanted = f"({q.shape[0]}, {q.shape[1]}, {q.shape[2]})"
                raise ValueError(f"part {number}: {name} {tuple(tensor.shape)} must be {wanted}, B, H and N of q")


def _tensors(selection: Selection) -> list[Tensor]:
    """Four a part, as an op takes them: without elements where an order is natural."""
    nothing = selection.parts[0].low[:0, :0, :0]
    return [nothing if tensor is None else tensor for part in selection.parts for tensor in part]


def _selection(tensors: Sequence[Tensor], span: int, disjoint: bool) -> Selection:
    """The selection that ``_tensors`` wrote."""
    given = [None if tensor.dim() == 3 and not tensor.shape[-1] else tensor for tensor in tensors]
    parts = tuple(Part(*given[first : first + 4]) for first in range(0, len(given), 4))  # type: ignore[arg-type]
    return Selection(parts, span, disjoint)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Tensor], span: int, disjoint: bool, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    return load(backend).selected_forward(q, k, v, _selection(parts, span, disjoint), scale)


def _backward(grad_out: Tensor, grad_lse: Tensor | None, *tensors_and_arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, parts, span, disjoint, scale, backend = tensors_and_arguments  # tensors: q, k, v, out, lse
    selection = _selection(parts, span, disjoint)
    return load(backend).selected_backward(grad_out, grad_lse, *tensors, selection, scale)


_attention = attention_op(
    "selected_attention",
    "Tensor[] parts, SymInt span, bool disjoint, float scale, str backend",
    _forward,
    _backward,
)
