"""Attention as one torch custom op with its own backward, so that compilers and checkpointing see one opaque step.

A backend that has ``forward`` and ``backward`` runs behind the op; one that has only a differentiable ``attend``
(reference, flex) is called as it is.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from longstride.kernels.memory import empty_like_rows
from longstride.kernels.patterns import pattern_from_json, pattern_to_json
from longstride.kernels.patterns.base import Pattern

# A captured graph would keep the addresses of plans, which are made at first use and forgotten to make room for others.
TAGS = (torch.Tag.cudagraph_unsafe,)


def attend(
    q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) and logsumexp (B, H, N), differentiable in q, k and v."""
    module = load(backend)
    if hasattr(module, "attend"):
        return module.attend(q, k, v, patterns, scale)
    return _attention(q, k, v, _encode(patterns), scale, backend)


@torch.library.custom_op("longstride::attention", mutates_args=(), tags=TAGS)
def _attention(q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, backend: str) -> tuple[Tensor, Tensor]:
    module = load(backend)
    return module.forward(q, k, v, _decode(patterns), scale)


@_attention.register_fake
def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, patterns: str, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    return empty_like_rows(v), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


@torch.library.custom_op("longstride::attention_backward", mutates_args=(), tags=TAGS)
def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    patterns: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = load(backend)
    return module.backward(grad_out, grad_lse, q, k, v, out, lse, _decode(patterns), scale)


@_attention_backward.register_fake
def _attention_backward_fake(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    patterns: str,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v)


def _remember(ctx, inputs, output) -> None:
    q, k, v, patterns, scale, backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)
    ctx.arguments = (patterns, scale, backend)


def _differentiate(ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
    q, k, v, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    return *_attention_backward(grad_out, grad_lse, q, k, v, out, lse, *ctx.arguments), None, None, None


_attention.register_autograd(_differentiate, setup_context=_remember)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and logsumexp: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def load(backend: str) -> ModuleType:
    """The backend's module, imported when it is asked for: triton need not be there."""
    # torch.compile traces import statements and nothing else that imports.
    if backend == "triton":
        from longstride.kernels.backends import triton

        return triton
    if backend == "cpu":
        from longstride.kernels.backends.cpu import attention as cpu

        return cpu
    if backend == "flex":
        from longstride.kernels.backends import flex

        return flex
    from longstride.kernels.backends import reference

    return reference


def _encode(patterns: tuple[Pattern, ...]) -> str:
    """Patterns as text; remembered where no compiler looks on, which would trace the memory itself."""
    return _written(patterns) if torch.compiler.is_compiling() else _remembered(patterns)


def _written(patterns: tuple[Pattern, ...]) -> str:
    """Patterns as text, the only form in which an op takes them: what ``pattern_from_json`` reads, all fields given."""
    # torch.compile traces this: hence repr, not json.
    return repr([pattern_to_json(pattern) for pattern in patterns])


_remembered = lru_cache(maxsize=256)(_written)


@lru_cache(maxsize=256)
def _decode(patterns: str) -> tuple[Pattern, ...]:
    return tuple(pattern_from_json(value) for value in ast.literal_eval(patterns))
