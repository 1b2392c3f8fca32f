"""The public call: checks its inputs, resolves heads, chooses a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from longstride.kernels.autograd import attend, load
from longstride.kernels.checks import check_tensors, choose_backend
from longstride.kernels.patterns import PATTERNS
from longstride.kernels.patterns.base import Pattern

BACKENDS = ("triton", "cpu", "reference", "flex")


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | Sequence[Pattern],
    *,
    scale: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention in which each position reads the keys its pattern allows (Child et al. 2019, section 4.2).

    A query without keys gives output 0, logsumexp -inf and zero gradients.

    Args:
        q, k: (B, H, N, D), one of fp16, bf16, fp32, fp64; scores and sums are kept in fp32 (fp64 for fp64).
        v: (B, H, N, Dv); Dv may differ from D.
        pattern: one pattern, or one per head; where heads differ by themselves (``num_summaries``) each gets its own.
        scale: factor of the scores; 1/sqrt(D) where None.
        backend: auto, triton, cpu, reference or flex. A named backend that cannot run here raises.
        return_lse: also return the logsumexp of each query's scaled scores, (B, H, N) fp32 (fp64 for fp64).

    Returns:
        (B, H, N, Dv) in q's dtype, and the logsumexp where it was asked for.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, something is no pattern, or the scale is not finite.
        ConfigError: the backend is unknown or cannot run here.
    """
    _check(q, k, v)
    patterns = head_patterns(pattern, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be a finite number")
    out, lse = attend(q, k, v, patterns, scale, _choose(backend, q, k, v))
    return (out, lse) if return_lse else out


def check_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_width: int, value_width: int, training: bool
) -> None:
    """Whether ``sparse_attention`` could run a backend on such tensors; none is computed with.

    Args:
        name: auto, triton, cpu, reference or flex.
        device, dtype: of q, k and v.
        head_width, value_width: D of q and k, and Dv.
        training: whether a backward pass will follow.

    Raises:
        ConfigError: the backend is unknown or cannot run there; the path is ``backend``.
    """
    with torch.set_grad_enabled(training):
        q, k, v = (
            torch.empty(0, 1, 1, width, device=device, dtype=dtype, requires_grad=training)
            for width in (head_width, head_width, value_width)
        )
        _choose(name, q, k, v)


def head_patterns(pattern: Pattern | Sequence[Pattern], heads: int) -> tuple[Pattern, ...]:
    """One resolved pattern per head; ValueError where something is no pattern or a list has another length."""
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        given = list(pattern)
        for number, one in enumerate(given):
            _require_pattern(f"pattern[{number}]", one)
    else:
        _require_pattern("pattern", pattern)
        given = [pattern] * heads
    if len(given) != heads:
        raise ValueError(f"{len(given)} patterns for {heads} heads: give one pattern, or one per head")
    return tuple(p.for_head(head) for head, p in enumerate(given))


def _require_pattern(name: str, value: object) -> None:
    if type(value) in PATTERNS.values():  # the usual case, and quicker than to ask for every method
        return
    if isinstance(value, type) or not isinstance(value, Pattern):
        found = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise ValueError(f"{name} must be a Pattern (pattern_from_json makes one), not {found}")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tensors({"q": (q, "BHND"), "k": (k, "BHND"), "v": (v, "BHND")})
    if k.shape != q.shape:
        raise ValueError(f"k {tuple(k.shape)} must have the shape of q {tuple(q.shape)}")
    if v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v {tuple(v.shape)} must have the batch, heads and positions of q {tuple(q.shape)}")


def _choose(name: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    advice = 'backend="reference" runs everywhere, with memory that grows with N^2'
    return choose_backend(name, BACKENDS, load, (q, k, v), advice)
