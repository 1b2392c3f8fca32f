"""Classes of documents, predicted from a summary of all rows (Devlin et al. 2019, section 4; released code)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.objectives.base import Objective

MOST_CLASSES = 1 << 20  # far above every existing data set


class Classify(Objective):
    """Predict the class of a context's document.

    The rows of the context are summarised as one, and a linear layer maps the summary to a logit for each class. A loss
    is divided by the number of contexts.
    """

    type: Literal["classify"] = Field(description="the class of a document, from all its rows")
    classes: int = Field(ge=2, le=MOST_CLASSES, description="labels are below it")
    causal: bool = Field(  # type: ignore[misc]  # decided by the model that is fine-tuned
        default=False, description="whether rows read earlier positions only, as in autoregressive models"
    )
    pool: Literal["mean", "first"] = Field(
        default="mean", description="the summary: average of all rows, or the first row (BERT)"
    )
    pooler: bool = Field(default=True, description="a linear layer and tanh after the summary (BERT)")

    @model_validator(mode="after")
    def _first_row_reads(self) -> Self:
        if self.pool == "first" and self.causal:
            raise ConfigError.at("pool", self.pool, "reads no other rows, as causal is true; take mean")
        return self

    @property
    def num_classes(self) -> int:
        return self.classes

    def num_predicted(self, length: int) -> int:
        return 1

    def unit(self, unit: str) -> str:
        """Return "label", whatever a token stands for."""
        return "label"

    def corrupt(self, tokens: Tensor, lengths: Tensor, numbers: Tensor, seed: int, vocabulary: int) -> None:
        return None
