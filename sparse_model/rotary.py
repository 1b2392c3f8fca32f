"""Normalised and rotated queries and keys. Letters: B batch, N positions, H heads, D head width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.tiles import inverse_rms, tiles, wide_of


class Rotary:
    """Rotary positions (Su et al. 2021): at position p, channels 2i and 2i + 1 are rotated by p · base^(-2i/D).

    The table is made at first use on a device, from fp64, and stored in fp32. It belongs to no module, so it is not in
    checkpoints and is never cast to 16 bits. All attention of a model shares one.
    """

    def __init__(self, context: int, width: int, base: float) -> None:
        """Prepare for ``context`` positions and an even D = ``width``."""
        self.context, self.width, self.base = context, width, base
        self._table: Tensor | None = None

    @classmethod
    def of(cls, network: NetworkConfig) -> Rotary | None:
        """Make it from a configuration; None: it has no rotary positions."""
        if network.rotary is None:
            return None
        return cls(network.context, network.query_key_width // network.heads, network.rotary.base)

    def table(self, device: torch.device) -> Tensor:
        """Return cosine and sine of every position's angles: (context, 1, D/2, 2) fp32."""
        if self._table is None or self._table.device != device:
            with torch.inference_mode(False), torch.no_grad():  # training may use a table that a session made
                slowing = self.base ** -(torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
                angles = torch.arange(self.context, dtype=torch.float64)[:, None, None] * slowing
                self._table = torch.stack([angles.cos(), angles.sin()], -1).float().to(device)
        return self._table


def turn(x: Tensor, table: Tensor, out: Tensor, *, back: bool = False) -> Tensor:
    """Rotate pairs of channels of x (…, N, H, D) by a table's angles (N, 1, D/2, 2), or back, into ``out``."""
    x, turned = (rows.unflatten(-1, (-1, 2)) for rows in (x, out))
    if torch.compiler.is_compiling():  # the compiler supports no complex numbers
        (a, b), (cosines, sines) = x.unbind(-1), table.unbind(-1)
        sines = -sines if back else sines
        turned[..., 0], turned[..., 1] = a * cosines - b * sines, a * sines + b * cosines
    else:
        turns = torch.view_as_complex(table)
        torch.mul(torch.view_as_complex(x), turns.conj() if back else turns, out=torch.view_as_complex(turned))
    return out


class PreparedHeads(torch.autograd.Function):
    """Rows of queries, keys and values with queries and keys normalised, rotated, or both.

    Takes rows (B, N, W) whose first ``channels`` are queries and keys of heads of D = ``width``; whether to normalise
    each head to a root mean square of 1; and a table of angles, (N, 1, D/2, 2) or (B, N, 1, D/2, 2), or None. Returns
    rows (B, N, W), and saves them, which attention does anyway, with one number for each head. Intermediate values are
    fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, channels: int, width: int, normed: bool, table: Tensor | None) -> Tensor:
        out = torch.empty_like(rows)
        out[..., channels:] = rows[..., channels:]
        source, target = (x[..., :channels].unflatten(-1, (-1, width)) for x in (rows, out))  # (B, N, heads, D)
        scales = source.new_empty((*source.shape[:-1], 1), dtype=wide_of(rows)) if normed else None
        for place, (x, turned) in tiles(source, 1, scratch=2):
            x.copy_(source[:, place])
            if scales is not None:
                x.mul_(inverse_rms(x, out=scales[:, place]))
            target[:, place] = x if table is None else turn(x, table[..., place, :, :, :], turned)
        ctx.save_for_backward(out if normed else None, scales, table)
        ctx.sizes = channels, width
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        out, scales, table = ctx.saved_tensors
        channels, width = ctx.sizes
        grad_rows = torch.empty_like(grad_out)
        grad_rows[..., channels:] = grad_out[..., channels:]
        source, target = (x[..., :channels].unflatten(-1, (-1, width)) for x in (grad_out, grad_rows))
        for place, (grad, x, work) in tiles(source, 1, scratch=3):
            grad.copy_(source[:, place])
            if scales is not None:
                # Only the part orthogonal to the normalised head has a gradient, and rotating both keeps their angle.
                x.copy_(out[:, place, :channels].unflatten(-1, (-1, width)))
                along = torch.mul(grad, x, out=work).sum(-1, keepdim=True).div_(-width)
                grad.addcmul_(x, along).mul_(scales[:, place])
            target[:, place] = grad if table is None else turn(grad, table[..., place, :, :, :], work, back=True)
        return grad_rows, None, None, None, None


def prepared_row(heads: Tensor, normed: bool, turns: Tensor | None) -> Tensor:
    """Apply ``PreparedHeads`` to queries and keys of one position (B, H, D), in few operations; turns (1, D/2, 2)."""
    x = heads.to(wide_of(heads))
    if normed:
        x = x * inverse_rms(x)
    if turns is not None:
        pairs = torch.view_as_complex(x.view(*x.shape[:2], -1, 2))
        x = torch.view_as_real(pairs * torch.view_as_complex(turns)).view(x.shape)
    return x.to(heads.dtype)
