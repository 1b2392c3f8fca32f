"""Block-sparse attention in Triton: one family of kernels over plans, independent of patterns.

A call is planned once for all inputs of one signature. ``packing`` packs the plans of all heads into a table of
integers, and ``selected`` packs selections. ``configurations`` chooses tiles, and ``tile`` has the functions that
kernels share. The kernels are in ``forward_kernel``, ``backward_kernel``, ``closed_kernel`` and ``sums_kernel``.
``launch`` plans their launches (``launch_plan``). ``decode`` computes one query at a time. Only a call that can run
imports triton.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from longstride.kernels.backends import Saved
from longstride.kernels.cache import BoundedCache
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection, listed_positions

if TYPE_CHECKING:  # it imports triton
    from longstride.kernels.backends.triton.launch_plan import LaunchPlan

WIDEST = 256  # largest head width
_OLDEST_CAPABILITY = (8, 0)
_ALIGNMENT = 16  # bytes; triton compiles another kernel for addresses that are not multiples of it

PLANS: BoundedCache[LaunchPlan] = BoundedCache()


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
    if not torch.version.hip and torch.cuda.get_device_capability(q.device) < _OLDEST_CAPABILITY:
        return "the card's compute capability is below 8.0"
    return None


def visited_pairs(q: Tensor, pattern: Pattern) -> int:
    """Return the number of pairs in the tiles that the forward kernels visit for a head like (B, 1, N, D)."""
    from longstride.kernels.backends.triton.launch_plan import Planner

    return sum(choice.pairs for choice in Planner((q, q, q), (pattern,)).choices("forward", "all"))


def signature(inputs: Sequence[Tensor | int | None]) -> tuple[object, ...]:
    """Return what a plan depends on besides patterns, scale and device."""
    entries = [
        (t.shape, t.stride(), t.dtype, t.data_ptr() % _ALIGNMENT == 0) if isinstance(t, Tensor) else type(t)
        for t in inputs
    ]
    return tuple(entries)


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Return output (B, H, N, Dv) in v's dtype and logsumexp (B, H, N); ``patterns`` has one per head."""
    inputs = q, k, v
    out, lse = _plan("forward", inputs, patterns, scale).run(inputs)
    return out, lse


def backward(saved: Saved, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, with the same bits on every run."""
    dq, dk, dv = _plan("backward", saved, patterns, scale).run(saved)
    return dq, dk, dv


def _plan(
    phase: Literal["forward", "backward"], inputs: Sequence[Tensor | None], patterns: tuple[Pattern, ...], scale: float
) -> LaunchPlan:
    """Return the plan of a call over patterns, made at the first call of its signature."""
    assert inputs[0] is not None
    key = (phase, patterns, scale, inputs[0].device, signature(inputs))
    plan = PLANS.get(key)
    if plan is None:
        from longstride.kernels.backends.triton import launch

        planner = launch.Planner(inputs, patterns)
        plan = launch.plan_forward(planner, scale) if phase == "forward" else launch.plan_backward(planner, scale)
        PLANS.put(key, plan)
    return plan


def selected_forward(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp for a selection. Its plan is not cached."""
    from longstride.kernels.backends.triton.launch import plan_forward
    from longstride.kernels.backends.triton.selected import SelectedPlanner

    inputs = q, k, v
    out, lse = plan_forward(SelectedPlanner(inputs, selection), scale).run(inputs)
    return out, lse


def selected_backward(saved: Saved, selection: Selection, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for a selection."""
    from longstride.kernels.backends.triton.launch import plan_backward
    from longstride.kernels.backends.triton.selected import SelectedPlanner

    dq, dk, dv = plan_backward(SelectedPlanner(saved, selection), scale).run(saved)
    return dq, dk, dv


def index_scores(q: Tensor, k: Tensor, weights: Tensor, first: int, window: int = 0, block: int = 1) -> Tensor:
    """Return an indexer's scores, see ``kernels.indexed.index_scores``; with a batch in front."""
    from longstride.kernels.backends.triton import indexer

    return indexer.index_scores(q, k, weights, first, window, block)


def last_highest(scores: Tensor, count: int) -> Tensor | None:
    """Return the places of the highest scores, see ``kernels.indexed.last_highest``; None if rows are too long."""
    from longstride.kernels.backends.triton import indexer

    return indexer.last_highest(scores, count) if scores.shape[1] <= indexer.MOST_PLACES else None


def indexed_forward(
    q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, block: int, scale: float, weigh: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, logsumexp and, if asked to, mean weights, as ``kernels.indexed`` describes them."""
    from longstride.kernels.backends.triton import indexed

    positions = _listed(numbers, block)
    out, lse = indexed.indexed_forward(q, k, v, positions, scale)
    weights = indexed.summed_weights(q, k, lse, positions, scale) if weigh else lse.new_empty(0)
    return out, lse, weights


def summed_weights(q: Tensor, k: Tensor, lse: Tensor, numbers: Tensor, block: int, scale: float) -> Tensor:
    """Return the weights of listed keys, averaged over heads, from the logsumexp."""
    from longstride.kernels.backends.triton import indexed

    return indexed.summed_weights(q, k, lse, _listed(numbers, block), scale)


def indexed_backward(saved: Saved, numbers: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    from longstride.kernels.backends.triton import indexed

    return indexed.indexed_backward(saved, _listed(numbers, block), scale)


def _listed(numbers: Tensor, block: int) -> Tensor:
    return listed_positions(numbers, block, torch.arange(numbers.shape[1], device=numbers.device)).int()


def prepare(
    k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float, once: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of (q, position, return_lse) that attends from single queries to these caches.

    Every call gives the same bits and computes the logsumexp. A position may be a tensor on the device (``decoding``).
    Nothing on the host depends on it, so a captured launch can be replayed with other values of the tensor. The tables
    of the patterns live as long as the function.
    """
    from longstride.kernels.backends.triton import decode

    layout = decode.plan_layout(patterns, k.shape[2], decode.KEYS_A_SPLIT, k.device)
    plans: dict[object, LaunchPlan] = {}

    def attend_one(q: Tensor, position: int | Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
        """Return output (B, H, Dv) in v's dtype and logsumexp (B, H) of one query, q (B, H, D)."""
        inputs = q, k, v, position
        key = signature(inputs)
        plan = plans.get(key)
        if plan is None:
            planner = decode.Planner(inputs, patterns)
            plan = plans[key] = decode.plan_one(planner, layout, scale, isinstance(position, Tensor))
        out, lse = plan.run(inputs)
        return out, lse

    return attend_one
