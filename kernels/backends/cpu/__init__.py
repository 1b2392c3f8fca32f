"""Sparse attention on a CPU: dense products over gathered tiles, and a softmax over rows of a cache."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from longstride.kernels.backends.cpu import attention, selected
from longstride.kernels.backends.cpu.attention import visited_pairs, why_not
from longstride.kernels.backends.cpu.decode import PreparedCache
from longstride.kernels.nonfinite import backward_apart, forward_apart
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection

prepare = PreparedCache  # as every backend names it


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) in v's dtype and logsumexp (B, H, N) in fp32 (fp64 for fp64)."""
    return forward_apart(partial(attention.forward, patterns=patterns, scale=scale), q, k, v, patterns)


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
    """Gradients of q, k and v."""
    differentiate = partial(attention.backward, patterns=patterns, scale=scale)
    return backward_apart(differentiate, grad_out, grad_lse, q, k, v, out, lse, patterns)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """``forward`` over a selection."""
    return forward_apart(partial(selected.selected_forward, selection=selection, scale=scale), q, k, v, selection)


def selected_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Selection,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``backward`` over a selection."""
    differentiate = partial(selected.selected_backward, selection=selection, scale=scale)
    return backward_apart(differentiate, grad_out, grad_lse, q, k, v, out, lse, selection)
