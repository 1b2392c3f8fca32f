"""Masked tokens, predicted from both sides (Devlin et al. 2019, section 3.1; of pictures Chen et al. 2020)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from longstride.sparse_model.objectives.base import Corrupted
from longstride.sparse_model.objectives.spans import Spans


class Masked(Spans):
    """Predict masked spans of tokens from all others, to both sides.

    Devlin et al. draw tokens or words. Bytes of a word are nearly given by their neighbours, so ByT5 (Xue et al. 2022)
    draws spans of 20 bytes on average.
    """

    type: Literal["masked"] = Field(description="masked tokens, from all others to both sides")
    mask: Literal["learned", "zero"] = Field(
        default="learned", description="a row of the token table for masks, or zeros (Image GPT)"
    )
    causal = False
    counted = "masked"

    @property
    def mask_rows(self) -> int:
        return int(self.mask == "learned")

    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> Corrupted:
        """Draw as ``Objective.corrupt`` says; all are predicted at once."""
        inputs, order = super().corrupt(tokens, lengths, numbers, seed, vocabulary)
        return Corrupted(inputs, order > 0)
