"""The protocol of objectives, and the default: each token is predicted from those before it.

Letters: B contexts, N positions, R rows of the network, b of them predict tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from torch import Tensor

from longstride.kernels.selections import Selection
from longstride.sparse_model.strict import StrictModel


class Corrupted(NamedTuple):
    """Contexts as a network reads them, and the tokens that it predicts."""

    inputs: Tensor  # (B, N) int32, read in place of the tokens; the vocabulary's size stands for a masked token
    predicted: Tensor  # (B, N) bool; or int32, each predicted token's number in their order from 1 on, and else 0


class Layout(NamedTuple):
    """The rows of a network where row i is not position i. The last b rows predict tokens."""

    tokens: Tensor  # (B, R) int32, as ``Corrupted.inputs``
    places: Tensor  # (B, R) int64, the position of each row
    real: Tensor | None  # (B, R) bool, False for rows that stand for nothing; None: all are real
    selection: Selection  # the rows that each row reads; tensors (B, 1, ·), alike in all heads
    targets: Tensor  # (B, b) int64, distinct positions whose tokens the last rows predict


class Objective(StrictModel):
    """Decide what a network reads and predicts, and so what its logits mean."""

    type: str
    causal: ClassVar[bool]  # whether a row may only depend on earlier positions
    next_token: ClassVar[bool] = False  # whether the last row predicts the next token, so that texts can go on
    in_order: ClassVar[bool] = True  # whether row i is position i; otherwise ``layout`` decides who reads whom

    @property
    def dense(self) -> dict[str, Any]:
        """The dense attention, as JSON, that reads what the objective lets a row read."""
        return {"type": "dense"} if self.causal else {"type": "dense", "causal": False}

    @property
    def num_classes(self) -> int:
        """How many classes of documents are predicted; 0: tokens are."""
        return 0

    @property
    def mask_rows(self) -> int:
        """How many rows the token table has for masked tokens."""
        return 0

    def num_predicted(self, length: int) -> int:
        """Return how many predictions there are for a context of so many tokens."""
        return length

    def num_rows(self, length: int) -> int:
        """Return how many rows of the network a context of so many tokens has."""
        return length

    def num_pairs(self, length: int) -> int | None:
        """Return how many pairs of rows a head reads; None: the mixers' patterns decide."""
        return None

    def unit(self, unit: str) -> str:
        """Return what a loss counts, such as "masked byte", where tokens stand for a ``unit``."""
        return unit

    @abstractmethod
    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> Corrupted | None:
        """Draw what is predicted in each context, and replace tokens; None: every token is predicted as it is.

        The draw is a pure function of the seed and of a context's number and length, whichever contexts are beside it.

        Args:
            tokens: (B, N) integers.
            lengths: (B,) int64, the tokens of each context. Those after them are padding, which is never predicted.
            numbers: (B,) int64, from -1.
            seed: from 0 to 2**64 - 1.
            vocabulary: tokens are below it.
        """

    def layout(self, tokens: Tensor, inputs: Tensor, predicted: Tensor, real: Tensor | None) -> Layout | None:
        """Return the network's rows for corrupted contexts; None: row i is position i, with its ``inputs``.

        Args:
            tokens: (B, N) integers of any type.
            inputs: as in ``Corrupted``.
            predicted: as in ``Corrupted``.
            real: (B, N) bool, False for padding; None: there is none.
        """
        return None


class Autoregressive(Objective):
    """Predict each token from those before it. Losses are code lengths."""

    type: Literal["autoregressive"] = Field(default="autoregressive", description="each token from those before it")
    causal = True
    next_token = True

    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> None:
        return None
