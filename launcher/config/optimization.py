"""What `train.optimizer` and `train.schedule` may be beside their names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from longstride.sparse_model import StrictModel

_RATES = "a learning rate for each part of the network; one that is left out has train.learning_rate"


class RatesConfig(StrictModel):
    """The learning rate of each part of the network; null: ``train.learning_rate``. One schedule scales them all."""

    matrices: float | None = Field(default=None, gt=0, description="linear layers of the residual blocks")
    embeddings: float | None = Field(
        default=None, gt=0, description="of tokens and positions, and the tables of synthesizers"
    )
    vectors: float | None = Field(
        default=None,
        gt=0,
        description="norms, biases, convolutions, routers of experts, spans, the first position",
    )
    output: float | None = Field(default=None, gt=0, description="the projection to logits")
    tables: float | None = Field(default=None, gt=0, description="n-gram tables")


class AdamWConfig(StrictModel):
    """AdamW (Loshchilov and Hutter 2019) with a rate for each part."""

    type: Literal["adamw"] = Field(description="AdamW (Loshchilov and Hutter 2019)")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)


class MuonConfig(StrictModel):
    """Muon on matrices (Jordan et al. 2024), AdamW on all other parts."""

    type: Literal["muon"] = Field(description="Muon (Jordan et al. 2024) on matrices, AdamW on the rest")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of the mean gradient of a matrix")
    nesterov: bool = Field(default=True, description="look one step of the momentum ahead")
    steps: int = Field(default=5, gt=0, description="steps of the iteration that makes an update orthogonal")


class AdafactorConfig(StrictModel):
    """Adafactor (Shazeer and Stern 2018): second moments by row and column, steps relative to a tensor's size."""

    type: Literal["adafactor"] = Field(description="Adafactor (Shazeer and Stern 2018); ZeRO 0 alone")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    beta2_decay: float = Field(default=-0.8, lt=0, description="at step t, 1 - t^this is the weight of the past")
    smallest_scale: float = Field(
        default=1e-3, gt=0, description="smallest size of a tensor that its step is relative to"
    )
    clip: float = Field(default=1.0, gt=0, description="the root mean square at which a tensor's update is cut")


class WsdConfig(StrictModel):
    """Warm-up, a constant rate, and a linear decay to the final one."""

    type: Literal["wsd"] = Field(description="warm-up, a constant rate, and a linear decay to the final one")
    decay_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of all steps in which the rate decays, at the end"
    )


OptimizerConfig = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
ScheduleConfig = Annotated[
    Annotated[Literal["cosine", "constant"], Tag("name")] | Annotated[WsdConfig, Tag("object")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "object"),  # so that a mistake is told once
]
