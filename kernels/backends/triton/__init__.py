"""Block-sparse attention in Triton: one family of kernels over plans, independent of patterns.

``packing`` packs the plans of all heads into a table of integers, and ``selected`` packs selections. ``configurations``
chooses tiles, and ``tile`` has the functions that kernels share. The kernels are in ``forward_kernel``,
``backward_kernel``, ``closed_kernel`` and ``sums_kernel``. ``launch`` plans their launches (``launch_plan``).
``decode`` computes one query at a time. Only a call that can run imports triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longstride.kernels.patterns import Pattern

WIDEST = 256  # largest head width
OLDEST_CAPABILITY = (8, 0)


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the kernels cannot run on these tensors, or None.

    While torch.compile traces, only the tensors are checked.
    """
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"a head width of {max(q.shape[-1], v.shape[-1])} exceeds {WIDEST}"
    if q.device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {q.device.type}"
    if torch.compiler.is_compiling():  # torch.compile traces neither importlib nor queries of a card
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
    """Return the number of pairs in the tiles that the forward kernels visit for a head like (B, 1, N, D)."""
    from longstride.kernels.backends.triton.launch_plan import Planner

    return sum(choice.pairs for choice in Planner((q, q, q), (pattern,)).choices("forward", "all"))


def _launcher(name: str) -> Callable[..., Any]:
    """Return a function of ``launch``, which imports triton at its first call."""

    def run(*arguments: Any) -> Any:
        from longstride.kernels.backends.triton import launch

        return getattr(launch, name)(*arguments)

    return run


forward, backward = _launcher("forward"), _launcher("backward")
selected_forward, selected_backward = _launcher("selected_forward"), _launcher("selected_backward")


def prepare(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (q, position, return_lse) that attends from single queries to these caches.

    Every call gives the same bits and computes the logsumexp. A position may be a tensor on the device (``decoding``).
    The tables of the patterns live as long as the function.
    """
    from longstride.kernels.backends.triton import decode

    layout = decode.plan_layout(patterns, k.shape[2], decode.KEYS_A_SPLIT, k.device)
    return partial(decode.attend_one, k, v, patterns, scale, layout, {})
