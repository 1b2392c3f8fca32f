"""Residual blocks: a mixer and a feed-forward, each behind a norm (Child et al. 2019, section 5.2).

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

from torch import Tensor, nn

from longstride.sparse_model.config import BlockConfig, ModelConfig
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.part import PLAIN, BlockContext, FeedForward, Mixer, MixerOutput, Part, Work
from longstride.sparse_model.rotary import Rotary


class ResidualBlock(Part):
    """H + a + b with a = dropout(attention(norm(H))) and b = dropout(ff(norm(H + a))) (section 5.2), or one of the two.

    The mixer is called ``attention`` whatever its kind, so that published models keep the names of their tensors.
    """

    attention: Mixer | None
    feed_forward: FeedForward | None

    def __init__(self, config: ModelConfig, block: BlockConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention = self.feed_forward = None
        if block.mixer is not None:
            self.attention_norm = norm_of(config)
            self.attention = block.mixer.make(config, rotary)
        if block.feed_forward is not None:
            self.feed_forward_norm = norm_of(config)
            self.feed_forward = block.feed_forward.make(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Return the residual stream (B, N, C) after the block, as the rows of an output."""
        if self.attention is None:
            output = self.feed(h, context)
            return output._replace(rows=h + output.rows)
        output = self.mix(h, context)
        if self.feed_forward is not None:
            h = h + output.rows
            output = self.feed(h, context).after(output)
        return output._replace(rows=h + output.rows)

    def mix(self, h: Tensor, context: BlockContext) -> MixerOutput:
        """Return the mixer's output for a stream (B, N, C), with dropout and without the residual."""
        assert self.attention is not None
        return self._dropped(self.attention(self.attention_norm(h), context), context.columns)

    def feed(self, h: Tensor, context: BlockContext) -> MixerOutput:
        """Return the feed-forward's output for a stream (B, N, C), with dropout and without the residual."""
        assert self.feed_forward is not None
        if context.real is not None and self.is_divided:
            positions = self.division.positions_of(h.shape[1], context.columns, h.device)
            context = context._replace(real=context.real[:, positions])
        return self._dropped(self.feed_forward(self.feed_forward_norm(h), context), context.columns)

    def work(self, positions: int, batch: int) -> Work:
        """Count the operations of all sub-layers."""
        parts = [part for part in (self.attention, self.feed_forward) if part is not None]
        return sum((part.work(positions, batch) for part in parts), Work())

    def _dropped(self, output: MixerOutput, columns: int) -> MixerOutput:
        # Tested here: for a single row, calling the module takes longer than an addition.
        if not self.dropout.training:
            return output
        if self.is_divided and self.dropout.p:
            return output._replace(rows=self.division.drop(output.rows, self.dropout.p, columns))
        return output._replace(rows=self.dropout(output.rows))
