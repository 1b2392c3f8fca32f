"""Block-sparse attention in Triton: one family of kernels over plans, which knows no pattern.

``packing`` turns the plans of all heads into a table of integers, ``selected`` does so with selections,
``configurations`` picks tiles, and ``tile`` has what all kernels do to one. The kernels are ``forward_kernel``,
``closed_forward_kernel``, ``dkdv_kernel``, ``dq_kernel``, ``closed_kernel`` and ``sums_kernel``; ``launch`` plans
their launches (``launch_plan``). ``decode`` serves one query at a time. Only a call that can run imports triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstride.kernels.patterns import Pattern

WIDEST = 256  # head width
OLDEST_CAPABILITY = (8, 0)


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """None where the kernels can run on these tensors, else a reason why they cannot.

    While torch.compile traces, only what the tensors tell counts.
    """
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"a head width of {max(q.shape[-1], v.shape[-1])} exceeds {WIDEST}"
    if q.device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {q.device.type}"
    if torch.compiler.is_compiling():  # torch.compile can ask neither importlib nor a card
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    from longstride.kernels.backends.triton.launch_plan import INTERPRETED, interpreter_trouble

    if INTERPRETED:
        return interpreter_trouble()
    if q.device.type == "cpu":
        return "CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before the program starts"
    if q.dtype == torch.float64:
        return "fp64 runs in Triton's interpreter alone"
    if not torch.version.hip and torch.cuda.get_device_capability(q.device) < OLDEST_CAPABILITY:
        return "the card's compute capability is below 8.0"
    return None


def visited_pairs(q: Tensor, pattern: Pattern) -> int:
    """Pairs in the tiles that the forward kernels visit for a head like (B, 1, N, D)."""
    from longstride.kernels.backends.triton.launch_plan import Planner

    return sum(choice.pairs for choice in Planner((q, q, q), (pattern,)).choices("forward", "all"))


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``launch.forward``."""
    from longstride.kernels.backends.triton.launch import forward

    return forward(*arguments)


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``launch.backward``: the same bits on every run."""
    from longstride.kernels.backends.triton.launch import backward

    return backward(*arguments)


def selected_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """``launch.selected_forward``."""
    from longstride.kernels.backends.triton.launch import selected_forward

    return selected_forward(*arguments)


def selected_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``launch.selected_backward``: the same bits on every run."""
    from longstride.kernels.backends.triton.launch import selected_backward

    return selected_backward(*arguments)


def prepare(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention of one query after another from these caches, as (q, position, return_lse): each time the same bits.

    A position may be a tensor on the device (``decoding``). What all queries read of the patterns lives as long as the
    result, and the logsumexp is always computed.
    """
    from longstride.kernels.backends.triton import decode

    one = decode.layout(patterns, k.shape[2], decode.KEYS_A_SPLIT, k.device)
    return partial(decode.attend_one, k, v, patterns, scale, one, {})
