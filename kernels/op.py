"""Attention as a torch op with a backward op of its own, so that compilers and checkpointing see one opaque step.

``torch.library.custom_op`` with ``register_autograd`` would give the same op for some 15 µs more a call, as much as all
else that a call costs the host before it launches. So the op's autograd is a function that is written here.

Letters: B batch, H heads of q, M queries, N positions, D width of q and k, Dv width of v. M is N unless the arguments
place the queries behind a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longstride.kernels.backends import accumulator_dtype, empty_like_rows

NAMESPACE = "longstride"
# A captured graph would keep the addresses of plans, which are made at first use and forgotten to make room for others.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def attention_op(
    name: str,
    arguments: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Define the ops ``longstride::name`` and ``longstride::name_backward``, and return the first.

    Args:
        name: of the op.
        arguments: what it takes after q, k and v, as a schema writes it; tensors among them have no gradient.
        forward: (q, k, v, *arguments) to the output (B, H, M, Dv) and the logsumexp (B, H, M).
        backward: (grad_out, grad_lse or None, q, k, v, out, lse, *arguments) to the gradients of q, k and v.
    """
    given = "Tensor q, Tensor k, Tensor v"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(f"{name}({given}, {arguments}) -> (Tensor, Tensor)", tags=TAGS)
    library.define(
        f"{name}_backward(Tensor grad_out, Tensor? grad_lse, {given}, Tensor out, Tensor lse, {arguments})"
        " -> (Tensor, Tensor, Tensor)",
        tags=TAGS,
    )
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    backward_op = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward").default

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = op(*given)
            q, k, v, *rest = given
            tensors = [tensor for value in rest if isinstance(value, list) for tensor in value]
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            ctx.rest = rest if not tensors else [None if isinstance(value, list) else value for value in rest]
            return out, lse

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
            q, k, v, out, lse, *tensors = ctx.saved_tensors
            rest = ctx.rest if not tensors else [tensors if value is None else value for value in ctx.rest]
            if grad_out is None:
                grad_out = torch.zeros_like(out)
            return *backward_op(grad_out, grad_lse, q, k, v, out, lse, *rest), *[None] * len(rest)

    def differentiated(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return Differentiable.apply(q, k, v, *rest)
        with torch._C._AutoDispatchBelowAutograd():
            return op(q, k, v, *rest)

    for each, function in ((name, forward), (f"{name}_backward", backward)):
        library.impl(each, function, "CompositeExplicitAutograd")
    library.impl(name, differentiated, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake_forward, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", _fake_backward, lib=library)
    _libraries.append(library)
    return op


_libraries: list[torch.library.Library] = []  # what is registered goes with its library


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    out = empty_like_rows(v, heads=q.shape[1], rows=q.shape[2])
    return out, q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v)
