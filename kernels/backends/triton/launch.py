"""Plan the launches of kernels. Forward: pass by pass. Backward: delta, passes over keys, then passes over queries.

For independent runs of rows (``closed_kernel``), one pass computes all three gradients.
Letters: B batch, H heads, N positions, D width of q and k, Dv width of v, R rows of the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import triton
from torch import Tensor

from longstride.kernels.backends.triton.backward_kernel import delta_kernel, dkdv_kernel, dq_kernel
from longstride.kernels.backends.triton.closed_kernel import closed_forward_kernel, closed_kernel
from longstride.kernels.backends.triton.configurations import Choice
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.launch_plan import LaunchPlan, Planner, Slot, batch_stride
from longstride.kernels.backends.triton.packing import Form, Parts
from longstride.kernels.backends.triton.sums_kernel import gather_kernel, groups_kernel

BLOCK_ROWS = 64  # rows per program of the kernels of delta, gather and groups


def positive_scale(scale: float) -> tuple[float, float]:
    """Return a factor of q and a positive scale with the same scores, as kernels take the maximum before scaling."""
    return (float(np.sign(scale)), abs(scale)) if scale else (0.0, 1.0)


def plan_forward(planner: Planner, scale: float) -> LaunchPlan:
    """Plan all passes of the forward pass."""
    factor, scale = positive_scale(scale)
    q, k, v = planner.inputs
    q, k, v = planner.readable(q, factor), planner.readable(k), planner.readable(v)
    out = planner.empty_like_rows(v, planner.heads, planner.num_queries)
    lse = planner.empty(*q.shape[:3])
    choices = planner.choices("forward", "all")
    between = planner.empty(*out.shape) if len(choices) > 1 else out
    for number, choice in enumerate(choices):
        final = number == len(choices) - 1
        packed = planner.pack("queries", "all", number, choice)
        target = out if final else between
        planner.launch(
            closed_forward_kernel if choice.closed else forward_kernel,
            packed.num_row_tiles,
            (q, k, v, between, target, lse, packed.table, packed.data),
            (q, k, v, target),
            (packed.num_row_tiles,) if choice.closed else (packed.num_row_tiles, batch_stride(packed.table)),
            choice.configuration,
            **(planner.closed_forms(packed) if choice.closed else planner.forms(packed)),
            SCALE=scale,
            RESUME=number > 0,
            FINAL=final,
        )
    return planner.plan(planner.result(out), lse)


class BackwardInputs(NamedTuple):
    """The inputs of every backward kernel."""

    q: Slot
    k: Slot
    v: Slot
    grad_out: Slot
    per_query: Slot  # (B, H, N, 2), accumulator dtype: logsumexp in units of log2, and delta


class Sums(NamedTuple):
    """Sums of dK and dV from passes over keys: rows in the order of each pass, one set per slice of queries."""

    workspace: Slot  # (B, H, R, D + Dv), accumulator dtype
    table: Tensor  # maps positions to rows: see ``packing.sources``
    data: Tensor
    form: Form

    def sizes(self) -> tuple[int, int]:
        """Return R and the number of sources."""
        return self.workspace.shape[2], self.table.shape[-2]


def plan_backward(planner: Planner, scale: float) -> LaunchPlan:
    """Plan passes over keys, then over queries. If all heads have closed runs, one pass over these ends them."""
    closed = planner.closed_choice()
    factor, scale = positive_scale(scale)
    q, k, v, out, grad_out, lse, grad_lse = planner.inputs
    q, (k, v, out, grad_out, lse) = planner.readable(q, factor), map(planner.readable, (k, v, out, grad_out, lse))
    grad_lse = None if grad_lse is None else planner.readable(grad_lse)
    dq, dk, dv = (planner.empty_like_rows(x) for x in (q, k, v))
    keys: tuple[Slot, ...] = (dk, dv)
    by_head = keys
    if planner.group > 1:  # each head of q writes its own sums, which are then added and rounded once
        by_head = tuple(planner.empty(*q.shape[:2], *x.shape[2:]) for x in keys)
    if closed is None:
        inputs = BackwardInputs(q, k, v, grad_out, plan_delta(planner, out, grad_out, lse, grad_lse))
        plan_key_passes(planner, inputs, "all", by_head, scale)
        plan_query_passes(planner, inputs, "all", dq, scale)
    else:
        plan_closed_runs(planner, closed, (q, k, v, out, grad_out, lse), grad_lse, (dq, *by_head), scale)
    if planner.group > 1:
        # Per head of q: the heads of a group divide the blocks among them.
        blocks = triton.cdiv(planner.context, BLOCK_ROWS * planner.group)
        constants = {"BLOCK": BLOCK_ROWS, "GROUP": planner.group, **planner.widths}
        planner.launch(groups_kernel, blocks, (*by_head, *keys), keys, (blocks,), None, **constants)
    return planner.plan(planner.result(dq, factor), planner.result(dk), planner.result(dv))


def plan_delta(planner: Planner, out: Slot, grad_out: Slot, lse: Slot, grad_lse: Slot | None) -> Slot:
    """Plan (B, H, N, 2): per query lse / ln 2, and delta, the sum of out * grad_out minus the gradient of lse."""
    per_query = planner.empty(*lse.shape, 2)
    blocks = triton.cdiv(planner.num_queries, BLOCK_ROWS)
    planner.launch(
        delta_kernel,
        blocks,
        (out, grad_out, lse, lse if grad_lse is None else grad_lse, per_query),
        (out, grad_out),
        (blocks,),
        None,
        VALUE_WIDTH=planner.widths["VALUE_WIDTH"],
        WV=planner.widths["WV"],
        BLOCK=BLOCK_ROWS,
        GRAD_LSE=grad_lse is not None,
    )
    return per_query


def plan_key_passes(
    planner: Planner, inputs: BackwardInputs, parts: Parts, results: tuple[Slot, ...] | None, scale: float
) -> Sums:
    """Plan dK and dV of some parts: in a workspace, which is returned, and summed into ``results`` unless None."""
    choices = planner.choices("dkdv", parts)
    passes = [planner.pack("keys", parts, number, choice) for number, choice in enumerate(choices)]
    slices = [planner.num_slices(parts, number, choice) for number, choice in enumerate(choices)]
    # If the last pass has every key of every head and is not split, it adds the sums as it finishes each key.
    in_place = results is not None and slices[-1] == 1 and planner.ends_with_every_key(parts)
    num_stored = len(passes) - in_place
    rows = [packed.num_rows * count for packed, count in zip(passes[:num_stored], slices, strict=False)]
    q, k, v, grad_out = inputs[:4]
    workspace = planner.empty(*q.shape[:2], sum(rows), q.shape[-1] + v.shape[-1])
    sums = Sums(workspace, *planner.sources(parts, tuple(slices[:num_stored])))
    source_stride = batch_stride(sums.table)
    targets = results or (workspace, workspace)  # written only by the last pass
    for number, (packed, choice) in enumerate(zip(passes, choices, strict=True)):
        planner.launch(
            dkdv_kernel,
            packed.num_row_tiles * slices[number],
            (*inputs, workspace, *targets, packed.table, packed.data, sums.table, sums.data),
            (q, k, v, grad_out, *targets),
            (
                packed.num_row_tiles,
                slices[number],
                packed.num_rows,
                sum(rows[:number]),
                *sums.sizes(),
                batch_stride(packed.table),
                source_stride,
            ),
            choice.configuration,
            **planner.widths,
            ROWS=int(packed.rows),
            COLUMNS=int(packed.columns[0]),
            BOUNDS=int(packed.bounds[0]),
            EARLIER=packed.earlier[0],
            GROUP=planner.group,
            SCALE=scale,
            DOUBLINGS=choice.configuration.pair_doublings(),
            FINAL=number == num_stored,
            SOURCES=sums.table.shape[-2] > 0,
            SOURCE_FORM=int(sums.form),
        )
    if results is not None and not in_place:
        blocks = triton.cdiv(planner.context, BLOCK_ROWS)
        tensors = (workspace, *results, sums.table, sums.data)
        constants = {"BLOCK": BLOCK_ROWS, "SOURCE_FORM": int(sums.form), **planner.widths}
        sizes = (blocks, *sums.sizes(), source_stride)
        planner.launch(gather_kernel, blocks, tensors, results, sizes, None, **constants)
    return sums


def plan_query_passes(
    planner: Planner, inputs: BackwardInputs, parts: Parts, result: Slot | None, scale: float
) -> Slot:
    """Plan dQ of some parts, into ``result`` or into a new contiguous accumulator (B, H, N, D)."""
    q, k, v, grad_out = inputs[:4]
    choices = planner.choices("dq", parts)
    accumulates = len(choices) > 1 or result is None
    between = planner.empty(*q.shape) if accumulates else q
    result = between if result is None else result
    for number, choice in enumerate(choices):
        packed = planner.pack("queries", parts, number, choice)
        target = result if number == len(choices) - 1 else between
        planner.launch(
            dq_kernel,
            packed.num_row_tiles,
            (*inputs, between, target, packed.table, packed.data),
            (q, k, v, grad_out, target),
            (packed.num_row_tiles, batch_stride(packed.table)),
            choice.configuration,
            **planner.forms(packed),
            SCALE=scale,
            RESUME=number > 0,
        )
    return result


def plan_closed_runs(
    planner: Planner,
    choice: Choice,
    tensors: tuple[Slot, ...],
    grad_lse: Slot | None,
    results: tuple[Slot, ...],
    scale: float,
) -> None:
    """Plan all gradients: of the other parts first, then closed runs add their dQ, dK and dV in one pass."""
    q, k, v, out, grad_out, lse = tensors
    resume = len(planner.groups("queries", "open")) > 0
    # Without other parts, the kernel does not read these two.
    previous, sums = lse, Sums(lse, *planner.sources("open", ()))
    delta = lse if grad_lse is None else grad_lse
    if resume:
        delta = plan_delta(planner, out, grad_out, lse, grad_lse)
        inputs = BackwardInputs(q, k, v, grad_out, delta)
        sums = plan_key_passes(planner, inputs, "open", None, scale)
        previous = plan_query_passes(planner, inputs, "open", None, scale)
    packed = planner.pack("keys", "closed", 0, choice)
    tables = packed.table, packed.data, sums.table, sums.data
    planner.launch(
        closed_kernel,
        packed.num_row_tiles,
        (*tensors, delta, previous, sums.workspace, *results, *tables),
        (q, k, v, out, grad_out, *results),
        (packed.num_row_tiles, *sums.sizes()),
        choice.configuration,
        **planner.closed_forms(packed),
        SCALE=scale,
        RESUME=resume,
        GRAD_LSE=grad_lse is not None,
        SOURCE_FORM=int(sums.form),
    )
