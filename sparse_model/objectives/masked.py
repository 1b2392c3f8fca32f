"""Masked tokens, predicted from both sides (Devlin et al. 2019, section 3.1; of pictures Chen et al. 2020)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.objectives.base import Corrupted, Objective

SHARE = Field(ge=0, le=1)


class Masked(Objective):
    """Predict masked spans of tokens from all others, to both sides.

    In a context of n tokens exactly round(``share`` · n) are predicted, and at least one. So the divisor of a loss is
    known before anything is computed. They lie in spans of ``span`` tokens, of which one may be shorter; all
    arrangements are equally likely. (Devlin et al. draw tokens or words; bytes of a word are nearly given by their
    neighbours, so ByT5 by Xue et al. 2022 draws spans of 20 bytes on average.) A span is read as masks, with the
    probability ``random`` as random tokens, or with ``unchanged`` as it is.
    """

    type: Literal["masked"] = Field(description="masked tokens, from all others to both sides")
    share: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.15, description="share of tokens that are predicted")
    span: int = Field(default=1, gt=0, description="tokens that are masked together; 20 is usual for bytes")
    random: Annotated[float, SHARE] = Field(default=0.1, description="share of spans that are read as random tokens")
    unchanged: Annotated[float, SHARE] = Field(default=0.1, description="share of spans that are read as they are")
    mask: Literal["learned", "zero"] = Field(
        default="learned", description="a row of the token table for masks, or zeros (Image GPT)"
    )
    causal = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.random + self.unchanged > 1:
            rule = f"must be at most {1 - self.random:g}, as random is {self.random:g}, and both are shares of all"
            raise ConfigError.at("unchanged", self.unchanged, rule)
        return self

    @property
    def mask_rows(self) -> int:
        return int(self.mask == "learned")

    def num_predicted(self, length: int) -> int:
        return max(1, round(self.share * length))

    def unit(self, unit: str) -> str:
        """Return "masked byte", or "masked pixel" where a token stands for one."""
        return f"masked {unit if unit == 'pixel' else 'byte'}"

    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> Corrupted:
        inputs = tokens.to(torch.int32)
        predicted = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, (length, number) in enumerate(zip(lengths.tolist(), numbers.tolist(), strict=True)):
            if length:
                places, replacements = self._draw(length, number, seed, vocabulary)
                predicted[row, places] = True
                inputs[row, places] = torch.where(replacements < 0, inputs[row, places], replacements)
        return Corrupted(inputs, predicted)

    def _draw(self, length: int, number: int, seed: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Draw the predicted positions of one context, (m,) int64, and what is read there, (m,) int32; -1: the token.

        NumPy guarantees the raw words of Philox for ever. The order of the data uses other counters (lanes.py).
        """
        count = self.num_predicted(length)
        spans = -(-count // self.span)
        slots = length - count + spans  # of the tokens between spans and of the spans, which take one each
        key = np.array([seed, number % 2**64], dtype=np.uint64)
        words = np.random.Philox(key=key).random_raw(slots + 1 + spans + count)
        order, short, kinds, values = np.split(words, np.cumsum([slots, 1, spans]))
        first = np.sort(np.argpartition(order, spans - 1)[:spans])
        sizes = np.full(spans, self.span)
        sizes[int(short[0]) % spans] -= spans * self.span - count
        first[1:] += np.cumsum(sizes - 1)[:-1]  # from slots to positions
        before = np.cumsum(sizes) - sizes  # tokens of the spans before each
        places = np.repeat(first - before, sizes) + np.arange(count)
        kind = np.repeat((kinds >> np.uint64(11)) / 2**53, sizes)  # from 0 to below 1
        replacements = np.where(kind < self.random, (values % vocabulary).astype(np.int64), vocabulary)
        replacements[kind >= 1 - self.unchanged] = -1
        return torch.from_numpy(places), torch.from_numpy(replacements.astype(np.int32))
