"""The network's configuration, the `model` object of a run's JSON, and which pattern each head of each layer gets."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, model_validator
from typing_extensions import Self

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import PATTERNS, Pattern, pattern_from_json
from longstride.sparse_model.strict import StrictModel

POSITIVE = Field(gt=0)
COMBINATIONS = ("merged", "interleaved", "multihead")
RESOLVED_BY_HEAD = ("index",)  # fields of a pattern that are set head by head, and so not in the configuration
MOST_ROWS = (1 << 31) - 1  # of all n-gram tables: their numbers fit in 32 bits
WHOLE = 1e-6  # how far ratio x width may be from a whole number of channels: in binary 2.3 x 100 is not 230


class FoldedEmbedding(StrictModel):
    """Two position tables: row and column of the sequence folded to rows of ``row_width`` (section 5.1)."""

    type: Literal["text", "audio"] = "text"  # the same tables for both
    row_width: Annotated[int, POSITIVE]  # positions; usually the attention's stride

    @property
    def modality(self) -> str:
        """What the bytes are, where nothing else tells."""
        return self.type

    def table_sizes(self, context: int) -> tuple[int, ...]:
        """Rows (the last may be ragged) and columns."""
        return (-(-context // self.row_width), self.row_width)


class ImageEmbedding(StrictModel):
    """Three position tables: row, column and channel of a picture stored row by row, channels last (section 5.1)."""

    type: Literal["image"]
    height: Annotated[int, POSITIVE]
    width: Annotated[int, POSITIVE]
    channels: Annotated[int, POSITIVE] = 3

    @property
    def modality(self) -> str:
        """What the bytes are, where nothing else tells."""
        return self.type

    def table_sizes(self, context: int) -> tuple[int, ...]:
        """Rows, columns and channels."""
        return (self.height, self.width, self.channels)


class LearnedEmbedding(StrictModel):
    """One position table with a row for each position of the context (Radford et al. 2018, GPT; Image GPT)."""

    type: Literal["learned"]

    @property
    def modality(self) -> str:
        """What the bytes are, where nothing else tells: it fits all, and most are text."""
        return "text"

    def table_sizes(self, context: int) -> tuple[int, ...]:
        """As many rows as positions."""
        return (context,)


class TokenEmbedding(StrictModel):
    """No position tables: positions come from ``rotary``, convolutions and the patterns themselves."""

    type: Literal["tokens"]

    @property
    def modality(self) -> str:
        """What the bytes are, where nothing else tells: it fits all, and most are text."""
        return "text"

    def table_sizes(self, context: int) -> tuple[int, ...]:
        """None."""
        return ()


class RotaryPositions(StrictModel):
    """Queries and keys turned by their positions (Su et al. 2021)."""

    base: Annotated[float, Field(gt=1)] = 10_000.0  # the slowest pair of channels turns once in about 2π·base positions


class DenseFeedForward(StrictModel):
    """Two projections around an activation (section 5.2)."""

    type: Literal["dense"] = "dense"
    activation: Literal["sigmoid_gelu", "squared_relu"] = "sigmoid_gelu"  # the paper's; So et al. 2021


class NgramTables(StrictModel):
    """Hash n-gram embeddings: for each order n, a table with a row for the last n tokens, as the hash finds it.

    ``longstride.sparse_model.ngrams`` has the hash, and the sources.
    """

    orders: tuple[Annotated[int, Field(ge=2)], ...] = Field(default=(2, 3, 4, 5, 6), min_length=1, strict=False)
    rows: Annotated[int, POSITIVE]  # of each order

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        orders, most = list(self.orders), MOST_ROWS // len(self.orders)
        if orders != sorted(set(orders)):
            raise ConfigError.at("orders", orders, f"must ascend; such as {sorted(set(orders))}")
        if self.rows > most:
            raise ConfigError.at(
                "rows", self.rows, f"of {len(orders)} orders must be below 2**31 in all; at most {most}"
            )
        return self


def _attention_schema() -> dict[str, Any]:
    """JSON schema of one attention object, from the registered patterns' fields."""
    kinds = {int: {"type": "integer"}, bool: {"type": "boolean"}, str: {"type": "string"}}
    choices = []
    for kind, cls in PATTERNS.items():
        hints = typing.get_type_hints(cls)
        properties: dict[str, Any] = {"type": {"const": kind}, "combine": {"enum": list(COMBINATIONS)}}
        required = ["type"]
        for field in dataclasses.fields(cls):
            if field.name in RESOLVED_BY_HEAD:
                continue
            options = [t for t in (typing.get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None)]
            literal = isinstance(options[0], str)
            properties[field.name] = {"enum": options} if literal else kinds[options[0]]
            if field.default is dataclasses.MISSING:
                required.append(field.name)
        choices.append(
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        )
    one = {"anyOf": choices}
    return {"anyOf": [*choices, {"type": "array", "items": one, "minItems": 1}]}


class ModelConfig(StrictModel):
    """A Sparse Transformer (Child et al. 2019, section 5): sizes, schedule of patterns, embedding, initialisation.

    ``attention`` is a pattern object such as ``{"type": "fixed", "stride": 128, "summary": 32, "combine": "merged"}``,
    or a list of them that the layers take in turn. ``combine`` says how a pattern's factors meet: "merged" (one softmax
    over their union, the default), "interleaved" (a factor a layer, in turn) or "multihead" (heads split over them).

    Raises:
        ConfigError: by ``model_validate``; every wrong field, one line each.
    """

    context: Annotated[int, POSITIVE]  # positions
    layers: Annotated[int, POSITIVE]  # residual blocks; the paper's N
    heads: Annotated[int, POSITIVE]
    width: Annotated[int, POSITIVE]  # the paper's d
    attention: Annotated[Any, WithJsonSchema(_attention_schema())]
    embedding: FoldedEmbedding | ImageEmbedding | LearnedEmbedding | TokenEmbedding = Field(discriminator="type")
    vocabulary: Annotated[int, POSITIVE] = 256
    feed_forward_ratio: Annotated[float, POSITIVE] = 4.0  # of width; the paper's "half-size" is 2
    query_key_ratio: Annotated[float, POSITIVE] = 1.0  # of width; the paper's "half-size" is 0.5
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # after attention and after feed-forward
    initialization: Literal["paper", "released", "zero_outputs"] = "released"
    backend: Literal["auto", "triton", "cpu", "reference", "flex"] = "auto"  # of attention
    # What follows came later than the paper. Each is off where it is left out.
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: Annotated[float, POSITIVE] | None = None  # null: layer 1e-5, as torch has it; rms 1e-6
    bias: bool = True  # of linear layers
    rotary: RotaryPositions | None = None
    query_key_norm: bool = False
    convolution: Annotated[int, Field(ge=2)] | None = None  # positions that a row reads before attention, its own too
    feed_forward: DenseFeedForward = DenseFeedForward()
    ngrams: NgramTables | None = None  # added to the token embedding

    left_out_at_default = (
        "norm", "norm_epsilon", "bias", "rotary", "query_key_norm", "convolution", "feed_forward", "ngrams",
    )  # fmt: skip

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(self._width_problems())
        if isinstance(self.embedding, ImageEmbedding):
            size = self.embedding.height * self.embedding.width * self.embedding.channels
            if size != self.context:
                problems.append(Problem("context", f"must be height x width x channels = {size}", self.context))
        elif isinstance(self.embedding, FoldedEmbedding) and self.embedding.row_width > self.context:
            rule = f"must not exceed context {self.context}"
            problems.append(Problem("embedding.row_width", rule, self.embedding.row_width))
        if self.ngrams is not None and self.ngrams.orders[-1] >= self.context:
            rule = f"the longest must be below context {self.context}, as no position has more tokens before it"
            problems.append(Problem("ngrams.orders", rule, list(self.ngrams.orders)))
        try:
            self.layer_patterns()
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(*problems)
        return self

    def _width_problems(self) -> Iterator[Problem]:
        """Ratios that give no whole number of channels, and channels that do not divide into the heads."""
        heads, width = self.heads, self.width
        if width % heads:
            rule = f"{width} channels must divide into heads={heads}; nearest heads {_nearest_divisor(width, heads)}"
            yield Problem("width", rule, width)
        ratios = {"feed_forward_ratio": 1, "query_key_ratio": heads}  # and what their channels must be a multiple of
        for name, multiple in ratios.items():
            ratio = getattr(self, name)
            channels = ratio * width
            if not math.isfinite(channels):
                yield Problem(name, f"times width {width} is beyond every number", ratio)
                continue
            good = max(1, round(channels / multiple)) * multiple / width
            if round(channels) < 1 or abs(channels - round(channels)) > WHOLE:
                yield Problem(name, f"times width {width} must be a whole number of channels; nearest {good}", ratio)
            elif round(channels) % multiple and round(channels) != width:  # the width's own problem is told above
                fitting = _nearest_divisor(math.gcd(width, round(channels)), heads)
                rule = f"{round(channels)} channels must divide into heads={heads}; nearest {good}, or heads {fitting}"
                yield Problem(name, rule, ratio)
            elif name == "query_key_ratio" and self.rotary and round(channels) // heads % 2:
                rule = f"turns pairs of channels, and heads of queries have {round(channels) // heads}; give null"
                even = [d for d in range(1, heads + 1) if round(channels) % (2 * d) == 0 and width % d == 0]
                rule += f", or heads {even[-1]}" if even else ""
                yield Problem("rotary", rule)

    @property
    def query_key_width(self) -> int:
        """Channels of all heads' queries, and of their keys."""
        return round(self.query_key_ratio * self.width)

    @property
    def feed_forward_width(self) -> int:
        """Channels inside the feed-forward part."""
        return round(self.feed_forward_ratio * self.width)

    def layer_patterns(self) -> tuple[tuple[Pattern, ...], ...]:
        """One pattern for each head of each layer, ``[layer][head]`` (Child et al. 2019, section 4.2).

        Raises:
            ConfigError: paths are relative to the model, as ``attention.stride`` or ``attention[1].stride``.
        """
        listed = isinstance(self.attention, list)  # an explicit cycle: one entry a layer
        if listed and not self.attention:
            raise ConfigError(Problem("attention", "the list needs at least one pattern"))
        cycle, errors = [], []
        for number, entry in enumerate(self.attention if listed else [self.attention]):
            try:
                cycle += _cycle(entry, self.heads, self.context, listed)
            except ConfigError as error:
                errors.append(error.under(f"attention[{number}]" if listed else "attention"))
        if errors:
            raise ConfigError.joined(errors)
        return tuple(cycle[layer % len(cycle)] for layer in range(self.layers))


def _nearest_divisor(size: int, wanted: int) -> int:
    """The divisor of ``size`` nearest to ``wanted``; the smaller of two."""
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - wanted))


def _cycle(entry: Any, heads: int, context: int, listed: bool) -> list[tuple[Pattern, ...]]:
    """The layers that one pattern object makes before it repeats: several only where it is interleaved."""
    if not isinstance(entry, dict):
        raise ConfigError(Problem("", "must be a pattern object, or a list of them"))
    combine = entry.get("combine", "merged")
    if combine not in COMBINATIONS:
        raise ConfigError.at("combine", combine, f"must be one of {', '.join(COMBINATIONS)}")
    pattern = pattern_from_json({key: value for key, value in entry.items() if key != "combine"}, beside=["combine"])
    for key in RESOLVED_BY_HEAD:
        if key in entry:
            raise ConfigError.at(key, entry[key], "must be left out: heads take the sub-blocks in turn")
    pattern.check(context)
    factors = pattern.factors()
    if combine == "merged":
        return [_per_head([pattern], heads)]
    if combine == "multihead":
        if heads % len(factors):
            rule = f"{entry['type']} splits over {len(factors)} factors: heads={heads} must be a multiple of that"
            raise ConfigError.at("combine", combine, rule)
        return [_per_head(list(factors), heads)]
    if listed and len(factors) > 1:
        raise ConfigError.at("combine", combine, "a list is a cycle already: make each factor an entry of the list")
    return [_per_head([factor], heads) for factor in factors]


def _per_head(patterns: list[Pattern], heads: int) -> tuple[Pattern, ...]:
    """Heads split evenly over the patterns, each resolved for its head."""
    return tuple(patterns[head * len(patterns) // heads].for_head(head) for head in range(heads))
