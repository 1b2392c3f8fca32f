"""Attention to all earlier positions on the CPU, handed to torch's own kernel: in fp32 and fp64, where it is quicker.

In 16 bits the chunks of ``attention`` are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.backends import empty_like_rows
from longstride.kernels.cache import cached
from longstride.kernels.patterns import Pattern
from longstride.kernels.plan import is_causal, num_pairs


def serves(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> bool:
    """Whether torch's kernel computes this call, and not slower than chunks do."""
    return q.numel() > 0 and scale > 0 and fits(q, v, patterns)  # it masks before it scales


def fits(q: Tensor, v: Tensor, patterns: tuple[Pattern, ...]) -> bool:
    """Whether torch's kernel is the one for such shapes, dtypes and patterns, whatever the tensors hold."""
    return (
        q.dtype in (torch.float32, torch.float64)
        and q.shape == v.shape  # of one width and as many heads, which that kernel asks for
        and all(_reads_all(pattern, q.shape[2]) for pattern in dict.fromkeys(patterns))
    )


@cached
def _reads_all(pattern: Pattern, context: int) -> bool:
    """Whether each position reads all up to itself, and nothing more: no causal pattern has more pairs."""
    return num_pairs(pattern, context) == context * (context + 1) // 2 and is_causal(pattern, context)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) and logsumexp (B, H, N)."""
    rows = (_rows(x, like=v) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True, scale=scale)
    return _whole(out, v), lse.reshape(v.shape[:3]).contiguous()


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. The logsumexp has none: that kernel takes only the output's."""
    rows = (_rows(x, like=q) for x in (grad_out, q, k, v, out))
    of_rows = _rows(lse[..., None], like=q).squeeze(3)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*rows, of_rows, 0.0, True, scale=scale)
    grad_q, grad_k, grad_v = (_whole(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, N, ·), or (B * H, 1, N, ·): that kernel lays results out by position, as few callers' heads lie."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return x if like.stride(1) < like.stride(2) else x.reshape(-1, 1, *x.shape[2:])


def _whole(rows: Tensor, like: Tensor) -> Tensor:
    """A result as (B, H, N, D), in the order in memory that all backends give it."""
    rows, whole = rows.reshape(like.shape), empty_like_rows(like)
    return rows if rows.stride() == whole.stride() else whole.copy_(rows)
