"""Tokens predicted one after another in a random order: XLNet (Yang et al. 2019) and MPNet (Song et al. 2020).

Letters: B contexts, N positions, R rows of the network, b predicted tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from longstride.kernels import ConfigError, Problem
from longstride.kernels.selections import Part, Selection
from longstride.sparse_model.objectives.base import Layout
from longstride.sparse_model.objectives.spans import Spans


class Permuted(Spans):
    """Predict tokens in a random order, each from all that are not predicted and from those predicted before it.

    A network has rows of all tokens, and a query for each predicted one, which holds its position and not the token
    (two streams, Yang et al. 2019, section 2.3). Song et al. (section 2.3) add masks at the predicted positions: a row
    reads the masks of the tokens that it does not read, so that it has all positions. Then queries hold what masks
    hold, which ``random`` and ``unchanged`` may replace. Spans are predicted in a random order, and the tokens of a
    span from left to right, as MPNet's code treats words.
    """

    type: Literal["permuted"] = Field(description="tokens in a random order, from all that are not predicted later")
    compensate: bool = Field(
        default=True, description="masks stand for tokens that are predicted later (MPNet); false: nothing does (XLNet)"
    )
    causal = False
    in_order = False
    counted = "predicted"

    @model_validator(mode="after")
    def _without_masks(self) -> Self:
        rule = "replaces masks, but compensate false has none; give 0"
        values = {"random": self.random, "unchanged": self.unchanged}
        if not self.compensate and any(values.values()):
            raise ConfigError(*(Problem(name, rule, value) for name, value in values.items() if value))
        return self

    @property
    def mask_rows(self) -> int:
        return 1

    def num_rows(self, length: int) -> int:
        return length + (2 if self.compensate else 1) * self.num_predicted(length)

    def num_pairs(self, length: int) -> int:
        """Return N² without masks. With masks every row reads N rows."""
        return length * (self.num_rows(length) if self.compensate else length)

    def layout(self, tokens: Tensor, inputs: Tensor, predicted: Tensor, real: Tensor | None) -> Layout:
        """Return rows [N tokens | b masks, if any | b queries]; masks and queries in the order of prediction.

        ``predicted`` numbers at most ``num_predicted(N)`` tokens, from 1. Masks and queries beyond them stand for
        nothing, and so do those of a context that is shorter than N. Nothing reads them.
        """
        context, most = tokens.shape[1], self.num_predicted(tokens.shape[1])
        order = predicted.long()
        count = (order > 0).sum(1, keepdim=True)  # of predicted tokens
        targets = order.where(order > 0, context + 1).argsort(stable=True)[:, :most]
        number = torch.arange(most, device=tokens.device).expand(len(tokens), -1)  # of masks and queries
        exists = number < count
        masks, added = inputs.int().gather(1, targets), 2 if self.compensate else 1
        places = torch.arange(context, device=tokens.device).expand_as(tokens)
        return Layout(
            torch.cat([tokens.int(), *added * [masks]], 1),
            torch.cat([places, *added * [targets]], 1),
            None if real is None else torch.cat([real, *added * [exists]], 1),
            self._selection(order, number, count, real),
            targets,
        )

    def _selection(self, order: Tensor, number: Tensor, count: Tensor, real: Tensor | None) -> Selection:
        """Return what rows read of the columns [unpredicted tokens | predicted ones in their order | masks].

        Args:
            order: (B, N) int64, numbers of predicted tokens from 1, else 0.
            number: (B, b) int64, numbers of masks and queries from 0.
            count: (B, 1) int64, predicted tokens.
            real: (B, N) bool, False for padding; None: there is none.
        """
        context = order.shape[1]
        length = context if real is None else real.sum(1, keepdim=True)
        unread = 2 * context + 1  # columns of padding, and of masks that stand for nothing, come last
        columns = order if real is None else order.where(real, unread)
        masks = [(context + 1 + number).where(number < count, unread)] if self.compensate else []
        key_order = torch.cat([columns, *masks], 1).argsort(stable=True)
        # How many predicted tokens each row reads. It reads the masks of the others.
        read = torch.cat([order, *(torch.zeros_like(mask) for mask in masks), number.minimum(count)], 1)
        read, query_order = read.sort(stable=True)
        end = length - count + read
        bounds = [(torch.zeros_like(end), end)]
        if self.compensate:
            bounds.append((end + count, (length + count).expand_as(end)))
        parts = ((query_order, key_order, low, high) for low, high in bounds)
        return Selection(tuple(Part(*(x.int().contiguous()[:, None] for x in part)) for part in parts), span=context)
