"""What all parts of a network share: its sizes, its options, and the order of its sub-layers.

A part is made from this and from its own JSON object. ``config`` combines both into the `model` object of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import divisors
from longstride.sparse_model.strict import StrictModel

# Bounds far above every existing network: a larger value is a mistake or an attack.
MOST_POSITIONS = 1 << 30
MOST_LAYERS = 10_000
MOST_HEADS = 1 << 12
MOST_HEADS_IN_ALL = 1 << 18  # of all layers: each has a pattern
MOST_WIDTH = 1 << 20
MOST_CONVOLVED = 1 << 10
MOST_CHANNELS = 1 << 24  # ratio times width
MOST_BUCKETS = 1 << 10
MOST_TOKENS = 1 << 24  # of a vocabulary: as many as colours of 24 bits
POSITIVE = Field(gt=0, le=MOST_POSITIONS)
WHOLE = 1e-6  # tolerance of ratio x width to a whole number of channels: in binary 2.3 x 100 is not 230
MOST_SUBLAYERS = 2 * MOST_LAYERS


class RotaryPositions(StrictModel):
    """Queries and keys rotated by their positions (Su et al. 2021)."""

    base: float = Field(default=10_000.0, gt=1, description="the slowest channels turn once in about 2π·base positions")


class RelativePositions(StrictModel):
    """Learned biases of attention scores by head and distance, in buckets (Raffel et al. 2020, T5, section 2.1)."""

    buckets: Annotated[int, Field(ge=4, le=MOST_BUCKETS, multiple_of=2)] = Field(
        default=32, description="biases per head, half for earlier keys; longer distances share one"
    )
    distance: Annotated[int, POSITIVE] = Field(default=128, description="from here on all distances share a bucket")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.distance <= self.buckets // 4:
            raise ConfigError.at("distance", self.distance, f"must be above buckets // 4 = {self.buckets // 4}")
        return self


class OutputConfig(StrictModel):
    """The layer from the last rows to logits, as masked models have it (Devlin et al. 2019)."""

    tied: bool = Field(
        default=False, description="shares the token embedding's weights, at their rate (Press & Wolf 2017)"
    )
    transform: bool = Field(default=False, description="a linear layer, GELU and a norm before the projection")
    bias: bool = Field(default=False, description="a learned number per token, added to its logit")


class NetworkConfig(StrictModel):
    """Sizes and options of a network, whatever its mixers, feed-forwards and embedding are."""

    context: Annotated[int, POSITIVE] = Field(description="positions that the model reads and predicts at once")
    layers: int = Field(
        gt=0,
        le=MOST_LAYERS,
        description="mixers (attention or others); one per residual block, unless order differs",
    )
    heads: int = Field(
        gt=0, le=MOST_HEADS, description=f"heads of each attention; up to {MOST_HEADS_IN_ALL:,} in all layers"
    )
    width: int = Field(gt=0, le=MOST_WIDTH, description="channels of a position; the paper's d")
    vocabulary: int = Field(
        default=256,
        gt=0,
        le=MOST_TOKENS,
        description="tokens: 256 for bytes, fewer if the data lacks the rest, or the colours of a palette",
    )
    feed_forward_ratio: Annotated[float, POSITIVE] = Field(
        default=4.0, description="inner channels of the feed-forward / width; the paper's half size is 2"
    )
    query_key_ratio: Annotated[float, POSITIVE] = Field(
        default=1.0, description="channels of all queries (and all keys) / width; the paper's half size is 0.5"
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="dropout after attention and feed-forward, not inside attention"
    )
    initialization: Literal["paper", "released", "zero_outputs"] = Field(
        default="released",
        description="the paper's 0.125/√d as a variance (released code) or standard deviation (paper); "
        "zero_outputs: released, with output projections at 0",
    )
    backend: Literal["auto", "triton", "cpu", "reference", "flex"] = Field(
        default="auto",
        description="what computes attention; auto: triton on GPUs, cpu on CPUs",
    )
    # Options that are newer than the paper. Each is off by default.
    order: str | None = Field(
        default=None,
        description="order of mixers (s) and feed-forwards (f), such as s6 (sf)10 f6; null: (sf) per layer",
    )
    norm: Literal["layer", "rms"] = Field(
        default="layer",
        description="kind of all norms; rms: without mean and bias (Zhang & Sennrich 2019)",
    )
    norm_epsilon: Annotated[float, POSITIVE] | None = Field(
        default=None, description="added to a norm's variance or mean square; null: 1e-5 (layer), 1e-6 (rms)"
    )
    norm_position: Literal["before", "after"] = Field(
        default="before",
        description="before each part and the logits; after: x = norm(x + part(x)) (Vaswani et al. 2017)",
    )
    embedding_norm: bool = Field(default=False, description="norm of the embedded rows")
    output: OutputConfig | None = Field(
        default=None,
        description="output layer: tied to the token embedding, transform (linear, GELU, norm) before; null: a matrix",
    )
    bias: bool = Field(default=True, description="biases of linear layers")
    rotary: RotaryPositions | None = Field(
        default=None,
        description="rotary positions (Su et al. 2021) of channel pairs 2i, 2i + 1; needs an even number of channels "
        "per head; null: none",
    )
    relative_bias: RelativePositions | None = Field(
        default=None,
        description="biases of scores by distance, the same in all layers, of two-sided dense attention; null: none",
    )
    query_key_norm: bool = Field(
        default=False,
        description="normalise each head's queries and keys to a root mean square of 1 (Henry et al. 2020; "
        "Dehghani et al. 2023)",
    )
    convolution: Annotated[int, Field(ge=2, le=MOST_CONVOLVED)] | None = Field(
        default=None,
        description="positions of a causal convolution per channel before attention, added to its input; "
        "weights begin at 0 (So et al. 2021); null: none",
    )
    output_gate: bool = Field(
        default=False,
        description="multiply the channels of all heads by sigmoid(W x) (Qiu et al. 2025)",
    )
    sinks: bool = Field(
        default=False,
        description="a learned logit per head without a value, 0 at first (gpt-oss)",
    )
    reversible: bool = Field(
        default=False,
        description="reversible blocks: the backward pass recomputes inputs, so memory does not grow with depth",
    )

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        "order",
        "norm",
        "norm_epsilon",
        "norm_position",
        "embedding_norm",
        "output",
        "bias",
        "rotary",
        "relative_bias",
        "query_key_norm",
        "convolution",
        "output_gate",
        "sinks",
        "reversible",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if problems := list(self.problems()):
            raise ConfigError(*problems)
        return self

    def problems(self) -> Iterator[Problem]:
        """Yield the contradictions: a wrong order, or ratios and heads that give no whole channels."""
        try:
            mixers = self.sublayers.count("s")
            if mixers != self.layers:
                rule = f"has {mixers} mixers (s); must have layers={self.layers}; such as (sf){self.layers}"
                yield Problem("order", rule, self.order)
        except ConfigError as error:
            yield from error.problems
        heads, width = self.heads, self.width
        if heads * self.layers > MOST_HEADS_IN_ALL:
            rule = f"times {self.layers} layers must be at most {MOST_HEADS_IN_ALL:,} heads in total"
            yield Problem("heads", f"{rule}; at most {MOST_HEADS_IN_ALL // self.layers}", heads)
        if width % heads:
            rule = f"{width} channels must divide into heads={heads}; nearest heads {nearest_divisor(width, heads)}"
            yield Problem("width", rule, width)
        if self.reversible and self.norm_position == "after":
            rule = "has no inverse, so blocks cannot be reversible; set model.reversible to false"
            yield Problem("norm_position", rule, self.norm_position)
        ratios = {"feed_forward_ratio": 1, "query_key_ratio": heads}  # names, and the divisor of their channels
        for name, multiple in ratios.items():
            ratio = getattr(self, name)
            channels = ratio * width
            if channels > MOST_CHANNELS:
                rule = f"times width {width} must be at most {MOST_CHANNELS:,} channels; such as"
                yield Problem(name, f"{rule} {NetworkConfig.model_fields[name].default}", ratio)
                continue
            good = max(1, round(channels / multiple)) * multiple / width
            if round(channels) < 1 or abs(channels - round(channels)) > WHOLE:
                yield Problem(name, f"times width {width} must be a whole number of channels; nearest {good}", ratio)
            elif round(channels) % multiple and round(channels) != width:  # the width's problem is reported above
                fitting = nearest_divisor(math.gcd(width, round(channels)), heads)
                rule = f"{round(channels)} channels must divide into heads={heads}; nearest {good}, or heads {fitting}"
                yield Problem(name, rule, ratio)
            elif name == "query_key_ratio" and self.rotary and round(channels) // heads % 2:
                rule = f"rotates pairs of channels, but heads of queries have {round(channels) // heads}; use null"
                even = [d for d in range(1, heads + 1) if round(channels) % (2 * d) == 0 and width % d == 0]
                rule += f", or heads {even[-1]}" if even else ""
                yield Problem("rotary", rule)

    @property
    def query_key_width(self) -> int:
        """Channels of all heads' queries, and likewise of their keys."""
        return round(self.query_key_ratio * self.width)

    @property
    def feed_forward_width(self) -> int:
        """Channels inside the feed-forward part."""
        return round(self.feed_forward_ratio * self.width)

    @property
    def sublayers(self) -> str:
        """A letter for each sub-layer in order: s a mixer, f a feed-forward (Press et al. 2020).

        Raises:
            ConfigError: ``order`` cannot be read.
        """
        if self.order is None:
            return "sf" * self.layers
        wrong = "must be letters s and f, and groups of them, each with a number or none; such as s6 (sf)10 f6"
        groups = [""]  # a stack: the sequence itself, then the open groups
        last = ""  # the letter or group that a number repeats
        tokens = re.findall(r"[sf()]|[0-9]+|\S", self.order)
        for token, before in zip(tokens, ["(", *tokens], strict=False):
            if token == "(":
                groups.append("")
            elif token in ("s", "f"):
                last = token
                groups[-1] += token
            elif token == ")" and len(groups) > 1 and groups[-1]:
                last = groups.pop()
                groups[-1] += last
            elif token.isdecimal() and before in ("s", "f", ")") and token.strip("0"):
                if len(token) > len(str(MOST_SUBLAYERS)) or len(groups[-1]) + len(last) * int(token) > MOST_SUBLAYERS:
                    raise ConfigError.at("order", self.order, f"has more than {MOST_SUBLAYERS:,} sub-layers")
                groups[-1] += last * (int(token) - 1)
            else:
                raise ConfigError.at("order", self.order, wrong)
        if len(groups) > 1 or not groups[0]:
            raise ConfigError.at("order", self.order, wrong)
        return groups[0]


def nearest_divisor(size: int, target: float) -> int:
    """Return the divisor of ``size`` nearest to ``target``; the smaller of two."""
    return min(divisors(size), key=lambda d: abs(d - target))
