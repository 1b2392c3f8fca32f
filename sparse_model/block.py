"""Residual blocks: a mixer and a feed-forward, each behind a norm (Child et al. 2019, section 5.2).

Letters: B batch, N positions, C width.

A reversible block's input is recomputed from its output (Gomez et al. 2017; Kitaev et al. 2020). Two streams (a, b)
both begin as the embedding. A sub-layer f turns them into (b, a + f(b)), so that the mixer and the feed-forward of a
block write to one stream each: y1 = x1 + attention(x2), y2 = x2 + ff(y1). The output is their mean, so that every
tensor has the shape that it has without a second stream. (The paper does not say how the streams end. Its authors' code
concatenates them; others take the mean.)

Subtraction does not undo a rounded addition. A stream that came back slightly off could change who reads whom, since
hashes, routers and clusters have thresholds. Therefore the streams are fp64 multiples of 2^-36. Their sums are exact
below 65,536, about fp16's largest number, and going back restores the very bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states
from typing_extensions import Self

from longstride.sparse_model.config import BlockConfig, ModelConfig
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.part import PLAIN, BlockContext, FeedForward, Mixer, MixerOutput, Part, Work
from longstride.sparse_model.rotary import Rotary

STEP = 2.0**-36  # of the grid; a sum of its multiples is exact in fp64 up to 2^53 of them


class ResidualBlock(Part):
    """H + a + b with a = dropout(attention(norm(H))) and b = dropout(ff(norm(H + a))) (section 5.2), or one of the two.

    With ``norm_position`` "after" it is norm(G + dropout(ff(G))) with G = norm(H + dropout(attention(H))) instead.

    The mixer is called ``attention`` whatever its kind, so that published models keep the names of their tensors.
    ``mixer`` is the one in use: ``attention``, or during a stage of a run another one with the same parameters.
    """

    attention: Mixer | None
    feed_forward: FeedForward | None
    mixer: Mixer | None

    def __init__(self, config: ModelConfig, block: BlockConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention = self.feed_forward = None
        self.normalizes_after = config.norm_position == "after"
        if block.mixer is not None:
            self.attention_norm = norm_of(config)
            self.attention = block.mixer.make(config, rotary)
        self.use(self.attention)
        if block.feed_forward is not None:
            self.feed_forward_norm = norm_of(config)
            self.feed_forward = block.feed_forward.make(config)
        self.dropout = nn.Dropout(config.dropout)

    def use(self, mixer: Mixer | None) -> None:
        """Mix by this mixer from now on. It is not registered: its parameters are those of ``attention``."""
        object.__setattr__(self, "mixer", mixer)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.mixer is not None:
            self.mixer.training = mode
        return self

    def forward(self, h: Tensor, context: BlockContext = PLAIN, shared: Tensor | None = None) -> MixerOutput:
        """Return the residual stream (B, N, C) after the block, as the rows of an output.

        ``shared`` replaces ``context.shared``: recomputation differentiates by tensors that are arguments.
        """
        context = context if shared is None else context._replace(shared=shared)
        output = MixerOutput(h)
        if self.mixer is not None:
            output = self._add(h, self.mix(h, context), self.attention_norm)
        if self.feed_forward is not None:
            h = output.rows
            output = self._add(h, self.feed(h, context), self.feed_forward_norm).after(output)
        return output

    def mix(self, h: Tensor, context: BlockContext) -> MixerOutput:
        """Return the mixer's output for a stream (B, N, C), with dropout and without the residual."""
        assert self.mixer is not None
        rows = h if self.normalizes_after else self.attention_norm(h)
        return self._dropped(self.mixer(rows, context), context.columns)

    def feed(self, h: Tensor, context: BlockContext) -> MixerOutput:
        """Return the feed-forward's output for a stream (B, N, C), with dropout and without the residual."""
        assert self.feed_forward is not None
        if context.real is not None and self.is_divided:
            positions = self.division.positions_of(h.shape[1], context.columns, h.device)
            context = context._replace(real=context.real[:, positions])
        rows = h if self.normalizes_after else self.feed_forward_norm(h)
        return self._dropped(self.feed_forward(rows, context), context.columns)

    def work(self, positions: int, batch: int) -> Work:
        parts = [part for part in (self.mixer, self.feed_forward) if part is not None]
        return sum((part.work(positions, batch) for part in parts), Work())

    def _add(self, h: Tensor, output: MixerOutput, norm: nn.Module) -> MixerOutput:
        """Add a part's output to the stream (B, N, C), and normalise the sum if ``norm_position`` is "after"."""
        rows = h + output.rows
        return output._replace(rows=norm(rows) if self.normalizes_after else rows)

    def _dropped(self, output: MixerOutput, columns: int) -> MixerOutput:
        # Tested here: for a single row, calling the module takes longer than an addition.
        if not self.dropout.training:
            return output
        if self.is_divided and self.dropout.p:
            return output._replace(rows=self.division.drop(output.rows, self.dropout.p, columns))
        return output._replace(rows=self.dropout(output.rows))


class OnGrid(torch.autograd.Function):
    """Rows (…, C) rounded to multiples of ``STEP``, in fp64. The gradient is that of no rounding."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.dtype = rows.dtype
        return on_grid(rows)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Tensor:
        return grad_out.to(ctx.dtype)


def on_grid(rows: Tensor) -> Tensor:
    """Round as ``OnGrid`` does, without a gradient."""
    return rows.to(torch.float64, copy=True).div_(STEP).round_().mul_(STEP)


def opened(h: Tensor) -> Tensor:
    """Make the streams before the first block, (2, B, N, C) fp64, from embedded positions (B, N, C)."""
    rows = OnGrid.apply(h)
    return torch.stack([rows, rows])


def closed(streams: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the output of the last block, (B, N, C) in ``dtype``, from streams (2, B, N, C)."""
    return streams.mean(0).to(dtype)


# States of the generators of the CPU and of devices, from which a sub-layer's dropout draws.
RandomStates = tuple[Tensor, tuple[list[int], list[Tensor]]]


class ReversibleBlock(ResidualBlock):
    """A residual block on two streams: (a, b) becomes (b, a + f(b)), for f the mixer and then the feed-forward."""

    def forward(
        self,
        h: Tensor,
        context: BlockContext = PLAIN,
        shared: Tensor | None = None,
        starts: list[RandomStates] | None = None,
    ) -> MixerOutput:
        """Map streams (2, B, N, C) to streams; ``starts`` collects the random states before each sub-layer."""
        assert not context.columns, "streams are divided by sections"
        context = context if shared is None else context._replace(shared=shared)
        norm: Any = self.feed_forward_norm if self.attention is None else self.attention_norm
        before, written = h.unbind()
        output = MixerOutput(h)
        for sublayer in self.sublayers():
            if starts is not None:
                starts.append((torch.get_rng_state(), get_device_states(h)))
            output = sublayer(written.to(norm.weight.dtype), context).after(output)
            before, written = written, before + OnGrid.apply(output.rows)
        return output._replace(rows=torch.stack([before, written]))

    def sublayers(self) -> list[Callable[[Tensor, BlockContext], MixerOutput]]:
        """Return the mixer and the feed-forward. Each maps a stream (B, N, C) to what is added to the other stream."""
        parts = (self.mixer, self.mix), (self.feed_forward, self.feed)
        return [sublayer for part, sublayer in parts if part is not None]


class Reversible(torch.autograd.Function):
    """All residual blocks, storing only the streams after the last one.

    Takes embedded positions h (B, N, C), the tensor that all layers share or None, the blocks, and the context of each.
    Returns the fields of an output: rows (B, N, C), the sum of the auxiliary losses or None, and tuples of tensors
    without gradients. The backward pass visits the sub-layers from last to first. Running one again gives its gradients
    and the stream before it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        shared: Tensor | None,
        blocks: Sequence[ReversibleBlock],
        contexts: Sequence[BlockContext],
    ) -> tuple[Any, ...]:
        output = MixerOutput(opened(h))
        starts: list[RandomStates] = []
        for block, context in zip(blocks, contexts, strict=True):
            output = block(output.rows, context, starts=starts).after(output)
        ctx.save_for_backward(output.rows, shared)
        ctx.starts, ctx.dtype = starts, h.dtype
        ctx.sublayers = [
            (part, context) for block, context in zip(blocks, contexts, strict=True) for part in block.sublayers()
        ]
        ctx.set_materialize_grads(False)
        return closed(output.rows, h.dtype), output.auxiliary_loss, output.statistics, output.carried

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_auxiliary: Tensor | None, *_: None) -> tuple[Any, ...]:
        streams, shared = ctx.saved_tensors
        if shared is not None:  # a leaf, in which the gradients of all sub-layers are summed
            shared = shared.detach().requires_grad_(ctx.needs_input_grad[1])
        before, written = streams.unbind()  # written in place: torch detects a second backward pass
        grad_before, grad_written = grad_rows.double() / 2, grad_rows.double() / 2
        for (part, context), (cpu, (devices, states)) in zip(ctx.sublayers[::-1], ctx.starts[::-1], strict=True):
            with torch.enable_grad(), torch.random.fork_rng(devices=devices):
                torch.set_rng_state(cpu)  # draws as in the forward pass
                set_device_states(devices, states)
                read = before.to(ctx.dtype).detach().requires_grad_()
                again = part(read, context._replace(shared=shared))
            outputs, grads = [again.rows], [grad_written.to(again.rows.dtype, copy=True)]  # a part may store it
            if again.auxiliary_loss is not None and grad_auxiliary is not None:
                outputs.append(again.auxiliary_loss)
                grads.append(grad_auxiliary)
            torch.autograd.backward(outputs, grads)
            before, written = written.sub_(on_grid(again.rows.detach())), before
            grad_before, grad_written = grad_written, grad_before.add_(read.grad)
        grad_shared = None if shared is None else shared.grad
        return grad_before.add_(grad_written).to(ctx.dtype), grad_shared, None, None
