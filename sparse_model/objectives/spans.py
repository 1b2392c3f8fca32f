"""What objectives that predict spans of tokens have in common. Letters: B contexts, N positions."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.objectives.base import Corrupted, Objective

SHARE = Field(ge=0, le=1)


class Spans(Objective):
    """Predict spans of tokens.

    In a context of n tokens exactly round(``share`` · n) are predicted, and at least one. So the divisor of a loss is
    known before anything is computed. They lie in spans of ``span`` tokens, of which one may be shorter; all
    arrangements are equally likely. A span is read as masks, with the probability ``random`` as random tokens, or with
    ``unchanged`` as it is.
    """

    counted: ClassVar[str]  # which bytes or pixels a loss counts, in its name: "masked"

    share: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.15, description="share of tokens that are predicted")
    span: int = Field(default=1, gt=0, description="tokens that are masked together; 20 is usual for bytes")
    random: Annotated[float, SHARE] = Field(default=0.1, description="share of spans that are read as random tokens")
    unchanged: Annotated[float, SHARE] = Field(default=0.1, description="share of spans that are read as they are")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.random + self.unchanged > 1:
            rule = f"must be at most {1 - self.random:g}, as random is {self.random:g}, and both are shares of all"
            raise ConfigError.at("unchanged", self.unchanged, rule)
        return self

    def num_predicted(self, length: int) -> int:
        return max(1, round(self.share * length))

    def unit(self, unit: str) -> str:
        """Return "masked byte", or "masked pixel" where a token stands for one."""
        return f"{self.counted} {unit if unit == 'pixel' else 'byte'}"

    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> Corrupted:
        """Draw as ``Objective.corrupt`` says; spans are predicted in random order, the tokens of each in theirs."""
        inputs = tokens.to(torch.int32)
        predicted = torch.zeros_like(inputs)
        for row, (length, number) in enumerate(zip(lengths.tolist(), numbers.tolist(), strict=True)):
            if length:
                places, replacements, order = self._draw(length, number, seed, vocabulary)
                predicted[row, places] = order
                inputs[row, places] = torch.where(replacements < 0, inputs[row, places], replacements)
        return Corrupted(inputs, predicted)

    def _draw(self, length: int, number: int, seed: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw the predicted positions of one context (m,) int64, ascending, what is read there, and their order.

        What is read is (m,) int32, -1 for the token itself. The order is (m,) int32, a permutation of 1 to m.

        NumPy guarantees the raw words of Philox for ever. The order of the data uses other counters (lanes.py).
        """
        count = self.num_predicted(length)
        spans = -(-count // self.span)
        slots = length - count + spans  # of the tokens between spans and of the spans, which take one each
        key = np.array([seed, number % 2**64], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(slots + 1 + spans + count + spans)
        arrangement, short, kinds, values, ranks = np.split(words, np.cumsum([slots, 1, spans, count]))
        first = np.sort(np.argpartition(arrangement, spans - 1)[:spans])
        sizes = np.full(spans, self.span)
        sizes[int(short[0]) % spans] -= spans * self.span - count
        first[1:] += np.cumsum(sizes - 1)[:-1]  # from slots to positions
        before = np.cumsum(sizes) - sizes  # tokens of the spans before each
        places = np.repeat(first - before, sizes) + np.arange(count)
        kind = np.repeat((kinds >> np.uint64(11)) / 2**53, sizes)  # from 0 to below 1
        replacements = np.where(kind < self.random, (values % vocabulary).astype(np.int64), vocabulary)
        replacements[kind >= 1 - self.unchanged] = -1
        turns = np.argsort(ranks, kind="stable")
        earlier = np.empty_like(sizes)  # tokens that are predicted before each span
        earlier[turns] = np.cumsum(sizes[turns]) - sizes[turns]
        order = np.repeat(earlier - before, sizes) + np.arange(1, count + 1)
        drawn = torch.from_numpy(np.stack([replacements, order]).astype(np.int32))
        return torch.from_numpy(places), drawn[0], drawn[1]
