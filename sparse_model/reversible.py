"""Reversible blocks: what enters a block is computed from what leaves it (Gomez et al. 2017; Kitaev et al. 2020).

Letters: B batch, N positions, C width.

Two streams (a, b) begin as the embedding, both of them. A sub-layer f makes (b, a + f(b)) of them, so that the mixer
and the feed-forward of a block write into one stream each: y1 = x1 + attention(x2), y2 = x2 + ff(y1). Their mean leaves
the last block, so that every tensor has the shape that it has without a second stream. (The paper does not say how they
end. Its authors' code joins them side by side, and others take the mean.)

Subtraction does not undo an addition that was rounded. A stream that came back a little off would change who reads
whom: a hash, a router, a cluster has edges. So the streams are fp64 and hold multiples of 2^-36 alone. Such sums are
exact below 65,536, fp16's largest number, and going back gives the very bits that went in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from longstride.sparse_model.block import ResidualBlock
from longstride.sparse_model.part import PLAIN, BlockContext, MixerOutput

STEP = 2.0**-36  # of the grid; a sum of its multiples is exact in fp64 up to 2^53 of them


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
    """What ``OnGrid`` gives."""
    return rows.to(torch.float64, copy=True).div_(STEP).round_().mul_(STEP)


def opened(h: Tensor) -> Tensor:
    """The streams before the first block, (2, B, N, C) fp64, of embedded positions (B, N, C)."""
    rows = OnGrid.apply(h)
    return torch.stack([rows, rows])


def closed(streams: Tensor, dtype: torch.dtype) -> Tensor:
    """What leaves the last block, (B, N, C) of that type, of streams (2, B, N, C)."""
    return streams.mean(0).to(dtype)


class RandomStates(NamedTuple):
    """From which a sub-layer draws what it drops."""

    cpu: Tensor
    devices: tuple[list[int], list[Tensor]]

    @classmethod
    def now(cls, like: Tensor) -> RandomStates:
        """Of the CPU and of the device that ``like`` is on."""
        return cls(torch.get_rng_state(), get_device_states(like))

    def restore(self) -> None:
        """Have the generators draw the same again."""
        torch.set_rng_state(self.cpu)
        set_device_states(*self.devices)


class ReversibleBlock(ResidualBlock):
    """The same parts on two streams: (a, b) becomes (b, a + f(b)), for f the mixer and then the feed-forward."""

    def forward(
        self, h: Tensor, context: BlockContext = PLAIN, starts: list[RandomStates] | None = None
    ) -> MixerOutput:
        """Streams (2, B, N, C) to such; ``starts`` gets the random states before each sub-layer."""
        assert not context.columns, "streams are divided by sections"
        before, written = h.unbind()
        output = MixerOutput(h)
        for sublayer in self.sublayers():
            if starts is not None:
                starts.append(RandomStates.now(h))
            output = sublayer(written.to(self._dtype), context).after(output)
            before, written = written, before + OnGrid.apply(output.rows)
        return output._replace(rows=torch.stack([before, written]))

    def sublayers(self) -> list[Callable[[Tensor, BlockContext], MixerOutput]]:
        """Return the mixer and the feed-forward, each from a stream (B, N, C) to what is added to the other."""
        parts = (self.attention, self.mix), (self.feed_forward, self.feed)
        return [sublayer for part, sublayer in parts if part is not None]

    @property
    def _dtype(self) -> torch.dtype:
        norm: Any = self.feed_forward_norm if self.attention is None else self.attention_norm
        dtype: torch.dtype = norm.weight.dtype
        return dtype


class Reversible(torch.autograd.Function):
    """All residual blocks, keeping nothing of them but the streams that leave the last one.

    It takes embedded positions h (B, N, C), the blocks, and the context of each. It returns rows (B, N, C), the sum of
    the auxiliary losses or None, and the statistics. The backward pass goes through the sub-layers from the last to the
    first: it computes one again, which gives its gradients and the stream that it was added to.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, blocks: Sequence[ReversibleBlock], contexts: Sequence[BlockContext]
    ) -> tuple[Any, ...]:
        output = MixerOutput(opened(h))
        starts: list[RandomStates] = []
        for block, context in zip(blocks, contexts, strict=True):
            output = block(output.rows, context, starts=starts).after(output)
        ctx.save_for_backward(output.rows)
        ctx.starts, ctx.dtype = starts, h.dtype
        ctx.sublayers = [
            (part, context) for block, context in zip(blocks, contexts, strict=True) for part in block.sublayers()
        ]
        ctx.mark_non_differentiable(*output.statistics)
        ctx.set_materialize_grads(False)
        return closed(output.rows, h.dtype), output.auxiliary_loss, *output.statistics

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_auxiliary: Tensor | None, *_: None) -> tuple[Any, ...]:
        (streams,) = ctx.saved_tensors
        before, written = streams.unbind()  # written in place: a second backward pass is told so by torch
        grad_before, grad_written = grad_rows.double() / 2, grad_rows.double() / 2
        for (part, context), start in zip(reversed(ctx.sublayers), reversed(ctx.starts), strict=True):
            with torch.enable_grad(), torch.random.fork_rng(devices=start.devices[0]):
                start.restore()
                read = before.to(ctx.dtype).detach().requires_grad_()
                again = part(read, context)
            outputs, grads = [again.rows], [grad_written.to(again.rows.dtype)]
            if again.auxiliary_loss is not None and grad_auxiliary is not None:
                outputs.append(again.auxiliary_loss)
                grads.append(grad_auxiliary)
            torch.autograd.backward(outputs, grads)
            before, written = written.sub_(on_grid(again.rows.detach())), before
            grad_before, grad_written = grad_written, grad_before.add_(read.grad)
        return grad_before.add_(grad_written).to(ctx.dtype), None, None
