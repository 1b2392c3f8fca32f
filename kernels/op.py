"""Attention as a torch op with a backward op, so that compilers and checkpointing see one opaque step.

``torch.library.custom_op`` with ``register_autograd`` would cost about 15 µs more per call. That is as much as the rest
of a call costs the host before it launches. So this module defines the op's autograd function itself.

Letters: B batch, H heads of q, M queries, N positions, D width of q and k, Dv width of v. M is N unless the queries are
behind a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstride.kernels.backends import Saved, accumulator_dtype, empty_like_rows

NAMESPACE = "longstride"
# A captured graph would hold addresses of plans, which are created at first use and may be evicted from their cache.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def attention_op(
    name: str,
    arguments: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Define the ops ``longstride::name`` and ``longstride::name_backward``, and return the first.

    Args:
        name: name of the op.
        arguments: schema of the arguments after q, k and v. Tensors among them have no gradient.
        forward: maps (q, k, v, *arguments) to the output (B, H, M, Dv) and the logsumexp (B, H, M).
        backward: maps (saved, *arguments) to the gradients of q, k and v.
    """
    inputs = "Tensor q, Tensor k, Tensor v"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}({inputs}, {arguments}) -> (Tensor, Tensor)", tags=TAGS)
    library.define(
        f"{name}_backward({inputs}, Tensor out, Tensor grad_out, Tensor lse, Tensor? grad_lse, {arguments})"
        " -> (Tensor, Tensor, Tensor)",
        tags=TAGS,
    )
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    backward_op = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward").default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = op(q, k, v, *values)
            tensors = [tensor for value in values if isinstance(value, list) for tensor in value]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            ctx.values = values if not tensors else [None if isinstance(value, list) else value for value in values]
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse, *tensors = ctx.saved_tensors
            values = ctx.values if not tensors else [tensors if value is None else value for value in ctx.values]
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            return *backward_op(q, k, v, out, grad_out, lse, grad_lse, *values), *[None] * len(values)

    def differentiate(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return Differentiable.apply(q, k, v, *values)
        with torch._C._AutoDispatchBelowAutograd():
            return op(q, k, v, *values)

    def run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return backward(Saved(*arguments[:7]), *arguments[7:])

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        out = empty_like_rows(v, heads=q.shape[1], rows=q.shape[2])
        return out, q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))

    def fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v)

    library.impl(name, forward, "CompositeExplicitAutograd")
    library.impl(f"{name}_backward", run_backward, "CompositeExplicitAutograd")
    library.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake_forward, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", fake_backward, lib=library)
    _libraries.append(library)
    return op


_libraries: list[torch.library.Library] = []  # registrations live as long as their library
