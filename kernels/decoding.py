"""One query at a time, as generation asks: attention against a cache that reads only what the pattern allows.

Letters: B batch, H heads, N positions of the context, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from kernels.attention import head_patterns
from kernels.checks import check_tensors, choose_backend
from kernels.patterns.base import Pattern
from kernels.reads import num_reads, reads

BACKENDS = ("triton", "cpu", "reference")


@overload
def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    position: int,
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Row ``position`` of ``sparse_attention``, from the keys that its pattern allows (Child et al. 2019, section 4.2).

    What a sparse pattern reads grows with the root of N. Rows of the caches that are not allowed, those behind
    ``position`` among them, may hold anything. There is no gradient.

    Args:
        q: (B, H, D), the query of ``position``; one of fp16, bf16, fp32, fp64, as k and v.
        k: (B, H, N, D), the keys of the whole context; channels adjacent in memory, as v's, or a call would copy all.
        v: (B, H, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head; where heads differ by themselves (``num_summaries``) each gets its own.
        position: of the query, 0 … N-1.
        scale: factor of the scores; 1/sqrt(D) where None.
        backend: auto, triton, cpu or reference (which reads all N). A named backend that cannot run here raises.
        return_lse: also return the logsumexp of the query's scaled scores, (B, H) fp32 (fp64 for fp64).

    Returns:
        (B, H, Dv) in q's dtype, and the logsumexp where it was asked for; 0 and -inf for a query without keys.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, the position is outside the context, something is no pattern,
            the scale is not finite, or a gradient would be needed.
        ConfigError: the backend is unknown or cannot run here.
    """
    _check(q, k, v)
    _check_position(position, k.shape[2])
    patterns = head_patterns(pattern, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    advice = 'backend="reference" runs everywhere, and reads the whole cache'
    module = _load(choose_backend(backend, BACKENDS, _load, (q, k, v), advice))
    out, lse = module.attend_one(q, k, v, patterns, position, scale)
    return (out, lse) if return_lse else out


def allowed_keys(pattern: Pattern, position: int, context: int) -> Tensor:
    """The positions that the query of a position attends to, ascending: (M,) int64 on the CPU.

    The cost is that of M keys, not of the context; where a pattern has no closed form at this context, its vectors are
    made at the first call and kept.

    Args:
        pattern: one; where heads differ by themselves that of a head, by ``for_head``.
        position: of the query, 0 … N-1.
        context: N.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    found = [read.positions() for read in reads(pattern, position, context)]
    return torch.cat(found).sort().values if found else torch.empty(0, dtype=torch.int64)


def num_keys_read(pattern: Pattern, position: int, context: int) -> int:
    """How many keys ``attend_one`` reads for a head of this pattern: as many as ``allowed_keys`` names.

    Raises:
        ValueError: the position is outside the context, or heads differ and none was chosen.
    """
    _check_position(position, context)
    return num_reads(pattern, position, context)


def _check_position(position: int, context: int) -> None:
    if type(position) is not int:  # a tensor's value would have to be waited for
        raise ValueError(f"position must be an int, not {type(position).__name__}")
    if not 0 <= position < context:
        raise ValueError(f"position={position}: must be 0 to {context - 1}, within the context")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors({"q": (q, "BHD"), "k": (k, "BHND"), "v": (v, "BHND")})
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and attend_one has none: call it under torch.no_grad()")
        if name != "q" and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: its channels must be adjacent, the last stride 1")
    if (*k.shape[:2], k.shape[3]) != q.shape:
        raise ValueError(f"k {tuple(k.shape)} must have the batch, heads and channels of q {tuple(q.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and positions of k {tuple(k.shape)}")


def _load(backend: str) -> ModuleType:
    """The backend's module, imported when it is asked for: triton need not be there."""
    if backend == "triton":
        from kernels.backends import triton

        return triton
    if backend == "cpu":
        from kernels.backends import cpu_decode

        return cpu_decode
    from kernels.backends import reference

    return reference
