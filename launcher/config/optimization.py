"""What `train.optimizer` and `train.schedule` may be beside their names."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from longstride.sparse_model import StrictModel

_RATES = "learning rates of parts of the network; default: train.learning_rate"


class RatesConfig(StrictModel):
    """The learning rate of each part of the network; null: ``train.learning_rate``. One schedule scales them all."""

    matrices: float | None = Field(default=None, gt=0, description="linear layers of the residual blocks")
    embeddings: float | None = Field(
        default=None, gt=0, description="token and position embeddings, tables of synthesizers"
    )
    vectors: float | None = Field(
        default=None,
        gt=0,
        description="norms, biases, convolutions, expert routers, spans, the first position",
    )
    output: float | None = Field(default=None, gt=0, description="the projection to logits")
    tables: float | None = Field(default=None, gt=0, description="n-gram tables")


class AdamWConfig(StrictModel):
    """AdamW (Loshchilov and Hutter 2019) with a rate for each part."""

    type: Literal["adamw"] = Field(description="AdamW (Loshchilov and Hutter 2019)")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)


class MuonConfig(StrictModel):
    """Muon on matrices (Jordan et al. 2024), AdamW on all other parts."""

    type: Literal["muon"] = Field(description="Muon (Jordan et al. 2024) for matrices, AdamW for the rest")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of a matrix's mean gradient")
    nesterov: bool = Field(default=True, description="whether to use Nesterov momentum")
    steps: int = Field(default=5, gt=0, description="iterations that orthogonalise an update")


class AdafactorConfig(StrictModel):
    """Adafactor (Shazeer and Stern 2018): second moments by row and column, steps relative to a tensor's size."""

    type: Literal["adafactor"] = Field(description="Adafactor (Shazeer and Stern 2018); only with ZeRO 0")
    rates: RatesConfig = Field(default=RatesConfig(), description=_RATES)
    beta2_decay: float = Field(
        default=-0.8, lt=0, description="exponent: at step t, the weight of the past is 1 - t^beta2_decay"
    )
    smallest_scale: float = Field(default=1e-3, gt=0, description="smallest tensor size to which a step is relative")
    clip: float = Field(default=1.0, gt=0, description="largest root mean square of a tensor's update")


class WsdConfig(StrictModel):
    """Warm-up, a constant rate, and a linear decay to the final one."""

    type: Literal["wsd"] = Field(description="warm-up, constant rate, linear decay to the final rate")
    decay_fraction: float = Field(
        default=0.5, gt=0, le=1, description="share of the steps, at the end, in which the rate decays"
    )


OptimizerConfig = Annotated[AdamWConfig | MuonConfig | AdafactorConfig, Field(discriminator="type")]
ScheduleConfig = Annotated[
    Annotated[Literal["cosine", "constant"], Tag("name")] | Annotated[WsdConfig, Tag("object")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "object"),  # so that a mistake is told once
]
