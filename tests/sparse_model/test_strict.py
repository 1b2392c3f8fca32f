"""Strict configurations: every wrong field is named by path, value, rule and nearest good value."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from longstride.kernels import ConfigError, Problem
from longstride.sparse_model.strict import StrictModel


class Column(StrictModel):
    type: Literal["column"]
    stride: int = Field(gt=0)


class Fixed(StrictModel):
    type: Literal["fixed"]
    stride: int = Field(gt=0)
    summary: int = Field(gt=0)


class Model(StrictModel):
    context: int = Field(gt=0)
    attention: Annotated[Column | Fixed, Field(discriminator="type")]
    dropout: float = Field(default=0.0, ge=0, lt=1)
    cycle: list[Column] = Field(default=[])
    rows: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _stride_divides_context(self) -> Model:
        if self.context % self.attention.stride:
            raise ConfigError.at("attention.stride", self.attention.stride, f"must divide context {self.context}")
        return self


class Run(StrictModel):
    model: Model
    name: str = ""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)


GOOD = {"model": {"context": 64, "attention": {"type": "fixed", "stride": 8, "summary": 2}}, "betas": [0.9, 1]}


def changed(**model: object) -> dict[str, object]:
    return {"model": {**GOOD["model"], **model}}  # type: ignore[dict-item]


def test_good_configuration_round_trips() -> None:
    run = Run.model_validate(GOOD)
    assert run.betas == (0.9, 1.0)
    assert Run.model_validate(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (changed(contxt=3), ["model.contxt: unknown key; nearest context"]),
        (
            changed(attention={"type": "fixed", "stride": 8, "summary": 2, "sumary": 3}),
            ["model.attention.sumary: unknown key; nearest summary"],
        ),
        (
            changed(attention={"type": "column", "stride": 8, "quux": 3}),
            ["model.attention.quux: unknown key; known: type, stride"],
        ),
        (changed(attention={"type": "fixed", "stride": 8}), ["model.attention.summary: required, and missing"]),
        (changed(attention={"type": "column", "stride": 7}), ["model.attention.stride=7: must divide context 64"]),
        (changed(attention={"type": "column", "stride": 0}), ["model.attention.stride=0: must be greater than 0"]),
        (changed(context="64"), ['model.context="64": must be a valid integer']),
        (changed(context=True), ["model.context=true: must be a valid integer"]),
        (changed(context=1.5), ["model.context=1.5: must be a valid integer"]),
        (changed(dropout=float("nan")), ["model.dropout=NaN: must be a finite number"]),
        (
            changed(cycle=[{"type": "column", "stride": 1}, {"type": "column", "strid": 1}]),
            ["model.cycle[1].stride: required, and missing", "model.cycle[1].strid: unknown key; nearest stride"],
        ),
        (changed(rows="all"), ["model.rows=\"all\": must be a valid integer or must be 'auto'"]),
        (changed(attention={"type": "fixd"}), ['model.attention.type="fixd": is not known; nearest fixed']),
        (changed(attention={"stride": 8}), ["model.attention.type: required, and missing"]),
        ({"model": 3}, ["model=3: must be an object"]),
        ([], ["must be a JSON object"]),
        ({}, ["model: required, and missing"]),
        (
            {"model": {"attention": {"type": "column", "stride": 8}, "dropout": 1}, "naem": ""},
            [
                "model.context: required, and missing",
                "model.dropout=1: must be less than 1",
                "naem: unknown key; nearest name",
            ],
        ),
    ],
)
def test_wrong_configuration_names_every_field(data: object, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Run.model_validate(data)
    assert str(caught.value).splitlines() == lines


def test_configuration_is_frozen() -> None:
    run = Run.model_validate(GOOD)
    with pytest.raises(ValueError, match="frozen"):
        run.name = "other"  # type: ignore[misc]


def test_error_lines_stay_one_line_and_short() -> None:
    line = str(Problem("data.path", "must exist", "a\nb" * 200))
    assert "\n" not in line
    assert len(line) < 120


def test_errors_move_under_a_prefix_and_join() -> None:
    inner = ConfigError.at("stride", 100, "must divide context 12288; nearest 96, 128")
    joined = ConfigError.joined([inner.under("model.attention"), ConfigError("plain")])
    assert str(joined) == "model.attention.stride=100: must divide context 12288; nearest 96, 128\nplain"
