"""Queries and keys, normalised and turned by their positions. Letters: B batch, N positions, H heads, D head width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.norm import EPS, inverse_rms


class Rotary:
    """Angles of rotary positions (Su et al. 2021): channel pair i of position p is turned by p · base^(-2i/D).

    Channel i is paired with channel i + D/2. The tables are made at first use on a device, from fp64, and kept in fp32.
    They belong to no module: a checkpoint does not hold them, and no cast to 16 bits reaches them. All attention of a
    model shares one.
    """

    def __init__(self, context: int, width: int, base: float) -> None:
        """Of ``context`` positions and D = ``width``, which is even."""
        self.context, self.width, self.base = context, width, base
        self._tables: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Rotary | None:
        """As a configuration asks for it."""
        if config.rotary is None:
            return None
        return cls(config.context, config.query_key_width // config.heads, config.rotary.base)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines (context, 1, D) and sines (context, 1, D) of every position, fp32.

        The sines of the first half have the sign that they have in the rotation.
        """
        if self._tables is None or self._tables[0].device != device:
            with torch.inference_mode(False), torch.no_grad():  # also where a session makes them, training may follow
                pairs = torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
                angles = torch.arange(self.context, dtype=torch.float64, device=device)[:, None, None] * (
                    self.base**-pairs
                )
                cosines, sines = angles.cos().float(), angles.sin().float()
                self._tables = torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)
        return self._tables


def turned(x: Tensor, cosines: Tensor, sines: Tensor, *, back: bool = False) -> Tensor:
    """Channel pairs of x (…, N, H, D) turned by the angles of tables (N, 1, D), or back: (…, N, H, D)."""
    half = x.shape[-1] // 2
    sign = -1 if back else 1
    out = x * cosines
    out[..., :half].addcmul_(x[..., half:], sines[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sines[..., half:], value=sign)
    return out


class PreparedHeads(torch.autograd.Function):
    """Rows of queries, keys and values with queries and keys normalised, turned, or both, in few passes.

    It takes rows (B, N, W), of which the first 2·H·D channels are queries and keys of H heads; D; whether to normalise
    each head to a root mean square of 1; and cosines and sines (N, 1, D) or None. It returns rows (B, N, W), and saves
    them, which attention keeps anyway, with a number a head. What is between is in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, channels: int, width: int, normed: bool, cosines: Tensor | None, sines: Tensor | None
    ) -> Tensor:
        x = rows[..., :channels].unflatten(-1, (-1, width))
        x = x.to(torch.promote_types(rows.dtype, torch.float32))
        scale = None
        if normed:
            scale = inverse_rms(x)
            x = x * scale
        if cosines is not None and sines is not None:
            x = turned(x, cosines, sines)
        out = torch.empty_like(rows)
        out[..., :channels] = x.flatten(-2)
        out[..., channels:] = rows[..., channels:]
        ctx.save_for_backward(out if normed else None, scale, cosines, sines)
        ctx.sizes = channels, width
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, scale, cosines, sines = ctx.saved_tensors
        channels, width = ctx.sizes
        wide = torch.promote_types(grad_out.dtype, torch.float32)
        grad = grad_out[..., :channels].unflatten(-1, (-1, width)).to(wide)
        if out is not None:
            # What is along a normalised head does not change it. Turning keeps angles, so turned heads tell as well.
            x = out[..., :channels].unflatten(-1, (-1, width)).to(wide)
            along = (grad * x).sum(-1, keepdim=True).div_(-width)
            grad = torch.addcmul(grad, x, along)
        if cosines is not None:
            grad = turned(grad, cosines, sines, back=True)
        if scale is not None:
            grad = grad * scale
        grad_rows = torch.empty_like(grad_out)
        grad_rows[..., :channels] = grad.flatten(-2)
        grad_rows[..., channels:] = grad_out[..., channels:]
        return grad_rows, None, None, None, None, None


def prepared_row(heads: Tensor, normed: bool, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
    """As ``PreparedHeads``, of queries and keys of one position (…, H, D), with few operations; tables (1, D)."""
    x = heads.to(torch.promote_types(heads.dtype, torch.float32))
    if normed:
        x = F.rms_norm(x, x.shape[-1:], None, EPS)
    if cosines is not None and sines is not None:
        x = torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), sines)
    return x.to(heads.dtype)
