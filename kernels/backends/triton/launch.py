"""Launches the kernels. Forward: pass by pass. Backward: delta, then passes over keys and passes over queries.

Where runs of rows are independent (``closed_kernel``), one pass over them gives all three gradients at once.
Letters: B batch, H heads, N positions, D width of q and k, Dv width of v, R rows of the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from longstride.kernels.backends.triton.call import Call, again, batch_stride, positive_scale
from longstride.kernels.backends.triton.closed_forward_kernel import closed_forward_kernel
from longstride.kernels.backends.triton.closed_kernel import closed_kernel
from longstride.kernels.backends.triton.configurations import ARCHITECTURES, Choice, closed_choice
from longstride.kernels.backends.triton.dkdv_kernel import delta_kernel, dkdv_kernel
from longstride.kernels.backends.triton.dq_kernel import dq_kernel
from longstride.kernels.backends.triton.forward_kernel import forward_kernel
from longstride.kernels.backends.triton.packing import Form, Parts, groups
from longstride.kernels.backends.triton.recording import Inputs, Recorder, Recording, look
from longstride.kernels.backends.triton.selected import SelectedCall
from longstride.kernels.backends.triton.sums_kernel import gather_kernel, groups_kernel
from longstride.kernels.kept import Kept
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection

BLOCK_ROWS = 64  # rows a program of the kernels of delta, gather and groups


class Known(NamedTuple):
    """What is known of calls with one look."""

    recording: Recording | None  # None: they cannot be made again
    tables: tuple[object, ...]  # that were in force, by identity in the key: kept, so that it is theirs alone


RECORDINGS: Kept[Known] = Kept()


def recorded(what: tuple[Any, ...], device: torch.device, inputs: Inputs, as_written: Callable[..., Any]) -> Any:
    """A call: made again from its recording where there is one, else as it is written, and noted down.

    Args:
        what: the kind of call, and all that it depends on beside the inputs; hashable.
        device: of the inputs.
        inputs: tensors, or None.
        as_written: from a recorder, or None, and the inputs to the results, a tuple of tensors.
    """
    tables = tuple(ARCHITECTURES.values())
    key = (what, device, tuple(map(id, tables)), look(inputs))
    known = RECORDINGS.get(key)
    # For AMD's cards kernels also depend on how much memory a tensor is a part of.
    if known is None and torch.version.hip is None:
        inputs = [None if tensor is None else tensor.detach() for tensor in inputs]
        recorder = Recorder(inputs)
        results = as_written(recorder, *inputs)
        RECORDINGS.put(key, Known(recorder.recording(results), tables))
        return results
    if known is None or known.recording is None:
        return as_written(None, *inputs)
    return again(known.recording, inputs, device)


def forward(q: Tensor, k: Tensor, v: Tensor, patterns: tuple[Pattern, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv) in v's dtype and logsumexp (B, H, N); ``patterns`` is one a head."""

    def as_written(recorder: Recorder | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return forward_of(Call(q, v, patterns, recorder), q, k, v, scale)

    return recorded(("forward", patterns, scale), q.device, (q, k, v), as_written)


def selected_forward(q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """The same for a selection."""
    return forward_of(SelectedCall(q, v, selection), q, k, v, scale)


def forward_of(call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All passes of a call, one after another."""
    q, scale = positive_scale(q, scale)
    out, lse = call.empty_like_rows(v, call.heads), call.empty(*q.shape[:3])
    q, k, v = (call.readable(t) for t in (q, k, v))
    choices = call.choices("forward", "all")
    between = call.empty(*out.shape) if len(choices) > 1 else out
    for number, choice in enumerate(choices):
        final = number == len(choices) - 1
        packed = call.packed("queries", "all", number, choice)
        target = out if final else between
        if choice.closed:
            call.launch(
                closed_forward_kernel,
                packed.num_row_tiles,
                (q, k, v, between, target, lse, packed.table, packed.data),
                (q, k, v, target),
                (packed.num_row_tiles,),
                None,
                **call.widths,
                BLOCK=choice.configuration.block_k,
                ROWS=int(packed.rows),
                BOUNDS=int(packed.bounds[0]),
                SCALE=scale,
                GROUP=call.group,
                RESUME=number > 0,
                FINAL=final,
                ROUND_BF16=call.round_bf16,
                **choice.configuration.options(),
            )
            continue
        call.launch(
            forward_kernel,
            packed.num_row_tiles,
            (q, k, v, between, target, lse, packed.table, packed.data),
            (q, k, v, target),
            (packed.num_row_tiles, batch_stride(packed.table)),
            choice.configuration,
            **call.widths,
            **call.forms(packed),
            SCALE=scale,
            RESUME=number > 0,
            FINAL=final,
        )
    return out.to(call.dtype), lse


class BackwardInputs(NamedTuple):
    """What every backward kernel reads."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    per_query: Tensor  # (B, H, N, 2), accumulator dtype: logsumexp in units of log2, and delta


class Sums(NamedTuple):
    """dK and dV as passes over keys leave them: rows in the order of each pass, one set for each slice of queries."""

    workspace: Tensor  # (B, H, R, D + Dv), accumulator dtype
    table: Tensor  # where the rows of a position are: see ``packing.sources``
    data: Tensor
    form: Form

    def sizes(self) -> tuple[int, int]:
        """R, and the number of sources."""
        return self.workspace.shape[2], self.table.shape[-2]


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    patterns: tuple[Pattern, ...],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their shapes and dtypes; the same bits on every run."""

    def as_written(recorder: Recorder | None, *inputs: Any) -> Any:
        call = Call(q, v, patterns, recorder)
        closed = closed_choice(call.candidates("closed"), patterns, call.context)
        return backward_of(call, closed, *(*inputs, scale))

    return recorded(("backward", patterns, scale), q.device, (grad_out, grad_lse, q, k, v, out, lse), as_written)


def selected_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Selection,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for a selection."""
    call = SelectedCall(q, v, selection)
    return backward_of(call, None, grad_out, grad_lse, q, k, v, out, lse, scale)


def backward_of(
    call: Call,
    closed: Choice | None,  # by which closed runs get all gradients at once
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """All passes over keys, then all over queries."""
    dq, dk, dv = (call.empty_like_rows(x) for x in (q, k, v))
    keys: tuple[Tensor, ...] = (dk, dv)
    by_head = keys
    if call.group > 1:  # heads of q that share keys leave sums of their own, to be added up and rounded once
        by_head = tuple(call.empty(*q.shape[:3], x.shape[3]) for x in keys)
    sign = float(np.sign(scale))
    q, scale = positive_scale(q, scale)
    q, k, v, out, grad_out = (call.readable(t) for t in (q, k, v, out, grad_out))
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    if closed is None:
        inputs = BackwardInputs(q, k, v, grad_out, per_query_of(call, out, grad_out, lse, grad_lse))
        over_keys(call, inputs, "all", by_head, scale)
        over_queries(call, inputs, "all", dq, scale)
    else:
        over_closed_runs(call, closed, (q, k, v, out, grad_out, lse), grad_lse, (dq, *by_head), scale)
    if call.group > 1:
        blocks = triton.cdiv(call.context, BLOCK_ROWS * call.group)  # of a head of q: the group shares out all of them
        constants = {"BLOCK": BLOCK_ROWS, "GROUP": call.group, **call.widths}
        call.launch(groups_kernel, blocks, (*by_head, *keys), keys, (blocks,), None, **constants)
    dq = dq if sign == 1 else dq * sign
    return dq.to(call.dtype), dk.to(call.dtype), dv.to(call.dtype)


def per_query_of(call: Call, out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """For each query lse / ln 2, and delta, the sum of out * grad_out minus the gradient of lse: (B, H, N, 2)."""
    per_query = call.empty(*lse.shape, 2)
    blocks = triton.cdiv(call.context, BLOCK_ROWS)
    call.launch(
        delta_kernel,
        blocks,
        (out, grad_out, lse, lse if grad_lse is None else grad_lse, per_query),
        (out, grad_out),
        (blocks,),
        None,
        VALUE_WIDTH=call.widths["VALUE_WIDTH"],
        WV=call.widths["WV"],
        BLOCK=BLOCK_ROWS,
        GRAD_LSE=grad_lse is not None,
    )
    return per_query


def over_keys(
    call: Call, inputs: BackwardInputs, parts: Parts, results: tuple[Tensor, ...] | None, scale: float
) -> Sums:
    """dK and dV of some parts, in the workspace that is returned and, where given, summed into ``results``."""
    choices = call.choices("dkdv", parts)
    passes = [call.packed("keys", parts, number, choice) for number, choice in enumerate(choices)]
    slices = [call.num_slices(parts, number, choice) for number, choice in enumerate(choices)]
    # Where the last pass holds every key of every head and is not split, it adds up as it finishes each key.
    in_place = results is not None and slices[-1] == 1 and call.ends_with_every_key(parts)
    through = len(passes) - in_place
    rows = [packed.num_rows * count for packed, count in zip(passes[:through], slices, strict=False)]
    q, k, v, grad_out = inputs[:4]
    workspace = call.empty(*q.shape[:2], sum(rows), q.shape[-1] + v.shape[-1])
    sums = Sums(workspace, *call.sources(parts, tuple(slices[:through])))
    source_stride = batch_stride(sums.table)
    targets = results or (workspace, workspace)  # written by the last pass alone
    for number, (packed, choice) in enumerate(zip(passes, choices, strict=True)):
        call.launch(
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
            **call.widths,
            ROWS=int(packed.rows),
            COLUMNS=int(packed.columns[0]),
            BOUNDS=int(packed.bounds[0]),
            EARLIER=packed.earlier[0],
            GROUP=call.group,
            SCALE=scale,
            DOUBLINGS=choice.configuration.pair_doublings(),
            FINAL=number == through,
            SOURCES=sums.table.shape[-2] > 0,
            SOURCE_FORM=int(sums.form),
        )
    if results is not None and not in_place:
        blocks = triton.cdiv(call.context, BLOCK_ROWS)
        tensors = (workspace, *results, sums.table, sums.data)
        constants = {"BLOCK": BLOCK_ROWS, "SOURCE_FORM": int(sums.form), **call.widths}
        call.launch(gather_kernel, blocks, tensors, results, (blocks, *sums.sizes(), source_stride), None, **constants)
    return sums


def over_queries(call: Call, inputs: BackwardInputs, parts: Parts, result: Tensor | None, scale: float) -> Tensor:
    """dQ of some parts: into ``result``, or where there is none into a new accumulator, (B, H, N, D) contiguous."""
    q, k, v, grad_out = inputs[:4]
    choices = call.choices("dq", parts)
    several = len(choices) > 1 or result is None
    between = call.empty(*q.shape) if several else q
    result = between if result is None else result
    for number, choice in enumerate(choices):
        packed = call.packed("queries", parts, number, choice)
        target = result if number == len(choices) - 1 else between
        call.launch(
            dq_kernel,
            packed.num_row_tiles,
            (*inputs, between, target, packed.table, packed.data),
            (q, k, v, grad_out, target),
            (packed.num_row_tiles, batch_stride(packed.table)),
            choice.configuration,
            **call.widths,
            **call.forms(packed),
            SCALE=scale,
            RESUME=number > 0,
        )
    return result


def over_closed_runs(
    call: Call,
    choice: Choice,
    tensors: tuple[Tensor, ...],
    grad_lse: Tensor | None,
    results: tuple[Tensor, ...],
    scale: float,
) -> None:
    """All gradients: first those of the other parts, then closed runs add theirs, dQ, dK and dV at once."""
    q, k, v, out, grad_out, lse = tensors
    resume = len(groups(call.patterns, call.context, "queries", "open")) > 0
    # Without other parts, the kernel reads neither of these two.
    previous, sums = lse, Sums(lse, *call.sources("open", ()))
    delta = lse if grad_lse is None else grad_lse
    if resume:
        delta = per_query_of(call, out, grad_out, lse, grad_lse)
        inputs = BackwardInputs(q, k, v, grad_out, delta)
        sums = over_keys(call, inputs, "open", None, scale)
        previous = over_queries(call, inputs, "open", None, scale)
    packed, tiles = call.packed("keys", "closed", 0, choice), choice.configuration
    call.launch(
        closed_kernel,
        packed.num_row_tiles,
        (*tensors, delta, previous, sums.workspace, *results, packed.table, packed.data, sums.table, sums.data),
        (q, k, v, out, grad_out, *results),
        (packed.num_row_tiles, *sums.sizes()),
        None,
        **call.widths,
        BLOCK=tiles.block_k,
        ROWS=int(packed.rows),
        BOUNDS=int(packed.bounds[0]),
        GROUP=call.group,
        SCALE=scale,
        RESUME=resume,
        GRAD_LSE=grad_lse is not None,
        SOURCE_FORM=int(sums.form),
        ROUND_BF16=call.round_bf16,
        **tiles.options(),
    )
