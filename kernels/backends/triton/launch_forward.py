"""Launches the forward kernel, pass by pass."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.kernels.backends.triton.call import Call, positive_scale
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.memory import empty_like_rows
from longstride.kernels.patterns.base import Pattern


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) in v's dtype and logsumexp (B, H, N); ``patterns`` is one a head."""
    q, scale = positive_scale(q, scale)
    call = Call(q, v, patterns)
    out = empty_like_rows(v, call.readable_dtype())
    q, k, v = (call.readable(t) for t in (q, k, v))
    lse = torch.empty(q.shape[:3], dtype=call.wide, device=q.device)
    choices = call.choices("forward", "all")
    between = torch.empty(v.shape, dtype=call.wide, device=v.device) if len(choices) > 1 else out
    for number, choice in enumerate(choices):
        final = number == len(choices) - 1
        one = call.packed("queries", "all", number, choice)
        target = out if final else between
        descriptors, shapes = call.descriptors(choice, "queries", "all", number, k, v)
        call.launch(
            forward_kernel,
            one.num_row_tiles,
            (q, k, v, between, target, lse, one.table, one.data, *descriptors),
            (q, k, v, target),
            (one.num_row_tiles,),
            choice.configuration,
            **call.widths,
            **call.forms(one),
            SHAPES=shapes,
            SCALE=scale,
            RESUME=number > 0,
            FINAL=final,
        )
    return out.to(call.dtype), lse
