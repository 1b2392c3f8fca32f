"""torch's FlexAttention with the pattern's mask: a second oracle for tests, and a peer in benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from longstride.kernels.patterns import Pattern


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why FlexAttention cannot run: on a CPU it has no backward pass."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "FlexAttention has no backward on the CPU; use cpu or reference"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, first_query: int
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, M, Dv) and the logsumexp (B, H, M)."""
    if not torch.is_grad_enabled():
        q, k, v = q.detach(), k.detach(), v.detach()  # on the CPU, FlexAttention refuses tensors that require gradients

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = torch.zeros_like(i, dtype=torch.bool)
        for head, pattern in enumerate(patterns):
            allowed = allowed | ((h == head) & pattern.mask(i + first_query, j))
        return allowed

    block_mask = create_block_mask(mask_mod, None, len(patterns), q.shape[2], k.shape[2], device=str(q.device))

    out, aux = flex_attention(
        q,
        k,
        v,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse
