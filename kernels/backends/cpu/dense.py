"""Attention to all earlier positions, or to all, on the CPU by torch's kernel, which is faster in fp32 and fp64.

In 16 bits the chunks of ``attention`` are faster.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from longstride.kernels.backends import Saved, empty_like_rows
from longstride.kernels.cache import cached
from longstride.kernels.patterns import Pattern, declares_causal
from longstride.kernels.plan import num_pairs


def serves(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> bool:
    """Whether torch's kernel can compute this call, and is not slower than chunks."""
    return q.numel() > 0 and scale > 0 and fits(q, v, patterns)  # the kernel masks before it scales


def fits(q: Tensor, v: Tensor, patterns: tuple[Pattern, ...]) -> bool:
    """Whether torch's kernel supports these shapes, dtypes and patterns, and is not slower."""
    return (
        q.dtype in (torch.float32, torch.float64)
        and q.shape == v.shape  # the kernel needs equal widths and numbers of heads
        and {_extent(pattern, q.shape[2]) for pattern in dict.fromkeys(patterns)} in ({"earlier"}, {"all"})
    )


@cached
def _extent(pattern: Pattern, context: int) -> Literal["earlier", "all", "fewer"]:
    """Return whether each position reads exactly the positions up to itself, all, or fewer.

    No pattern has more pairs than one that reads all, and no causal one more than one that reads all earlier positions.
    """
    pairs = num_pairs(pattern, context)
    if pairs == context * (context + 1) // 2 and declares_causal(pattern):
        return "earlier"
    return "all" if pairs == context**2 else "fewer"


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Return output (B, H, N, D) and logsumexp (B, H, N)."""
    rows = (_rows(x, like=v) for x in (q, k, v))
    causal = _extent(patterns[0], q.shape[2]) == "earlier"
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, causal, scale=scale)
    return _in_layout(out, v), lse.reshape(v.shape[:3]).contiguous()


def backward(saved: Saved, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. The kernel takes no gradient of the logsumexp."""
    q, k, v, out, grad_out, lse, _ = saved
    rows = (_rows(x, like=q) for x in (grad_out, q, k, v, out))
    lse_rows = _rows(lse[..., None], like=q).squeeze(3)
    causal = _extent(patterns[0], q.shape[2]) == "earlier"
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads = kernel(*rows, lse_rows, 0.0, causal, scale=scale)
    grad_q, grad_k, grad_v = (_in_layout(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """Return (B, H, N, ·), or (B * H, 1, N, ·) as the kernel writes results position by position."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return x if like.stride(1) < like.stride(2) else x.reshape(-1, 1, *x.shape[2:])


def _in_layout(rows: Tensor, like: Tensor) -> Tensor:
    """Return a result as (B, H, N, D), in the memory order of all backends."""
    rows, result = rows.reshape(like.shape), empty_like_rows(like)
    return rows if rows.stride() == result.stride() else result.copy_(rows)
