"""The network's configuration: the `model` object of a run's JSON."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from longstride.kernels import ConfigError, Problem, check_backend
from longstride.kernels.patterns import PATTERNS, Pattern, divisors
from longstride.kernels.registry import import_path, is_foreign, source_of
from longstride.sparse_model.feed_forwards import (
    FEED_FORWARDS,
    DenseConfig,
    ExpertsConfig,
    feed_forward_schema,
    feed_forwards_from_json,
)
from longstride.sparse_model.mixers import MIXERS, HeadPatterns, attention_schema, mixers_from_json
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.objectives import AnyObjective, Autoregressive
from longstride.sparse_model.part import Ability, FeedForwardConfig, MixerConfig, PartConfig
from longstride.sparse_model.strict import StrictModel

OF_MIXERS = ("convolution", "documents", "keys")  # abilities that feed-forwards do not need
OF_ATTENTION: tuple[Ability, ...] = ("output_gate", "sinks")  # abilities that only mixers with queries need
MOST_ORDER = 1 << 10  # tokens that an n-gram has
MOST_ROWS = (1 << 31) - 1  # of all n-gram tables: their numbers fit in 32 bits


class PositionTables(StrictModel):
    """Position tables, whose entries for a position are added to the token's embedding."""

    type: str

    @property
    def modality(self) -> str:
        """The kind of data, if nothing else says it. Learned and token embeddings fit any, and most is text."""
        return "text" if self.type in ("learned", "tokens") else self.type

    @abstractmethod
    def table_sizes(self, context: int) -> tuple[int, ...]:
        """Return the number of rows of each table."""


class FoldedEmbedding(PositionTables):
    """Two position tables: row and column of the sequence folded to rows of ``row_width`` (section 5.1)."""

    type: Literal["text", "audio"] = Field(default="text", description="the sequence folded to rows; both are the same")
    row_width: Annotated[int, POSITIVE] = Field(description="positions per row; usually the attention's stride")

    def table_sizes(self, context: int) -> tuple[int, ...]:  # the last row may be ragged
        return (-(-context // self.row_width), self.row_width)


class ImageEmbedding(PositionTables):
    """Three position tables: row, column and channel of a picture stored row by row, channels last (section 5.1)."""

    type: Literal["image"] = Field(description="a picture stored row by row, channels last")
    height: Annotated[int, POSITIVE] = Field(description="pixels")
    width: Annotated[int, POSITIVE] = Field(description="pixels; height × width × channels is the context")
    channels: Annotated[int, POSITIVE] = Field(default=3, description="tokens per pixel: 1 for grey and palettes")

    def table_sizes(self, context: int) -> tuple[int, ...]:
        return (self.height, self.width, self.channels)


class LearnedEmbedding(PositionTables):
    """One position table with a row for each position of the context (Radford et al. 2018, GPT; Image GPT)."""

    type: Literal["learned"] = Field(description="one table with a row for each position; it fits all data")

    def table_sizes(self, context: int) -> tuple[int, ...]:
        return (context,)


class TokenEmbedding(PositionTables):
    """No position tables: positions come from ``rotary``, convolutions and the patterns themselves."""

    type: Literal["tokens"] = Field(description="no position tables: for rotary")

    def table_sizes(self, context: int) -> tuple[int, ...]:
        return ()


class NgramTables(StrictModel):
    """Hash n-gram embeddings: a table for each order n. A hash of the last n tokens selects the row.

    ``longstride.sparse_model.ngrams`` defines the hash, and names the sources.
    """

    orders: tuple[Annotated[int, Field(ge=2, le=MOST_ORDER)], ...] = Field(
        default=(2, 3, 4, 5, 6), min_length=1, strict=False, description="tokens per n-gram, ascending; one table each"
    )
    rows: int = Field(gt=0, description="rows per table; n-grams may share one")

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


def _with_defaults(value: Any) -> Any:
    """Fill in the defaults of `model.feed_forward`; an invalid value is returned unchanged."""
    with suppress(ConfigError):
        complete = [config.model_dump(mode="json") for config in feed_forwards_from_json(value)]
        return complete if isinstance(value, list) else complete[0]
    return value


class BlockConfig(NamedTuple):
    """One residual block: a mixer and the feed-forward after it, or one of them. Equal ones make equal modules."""

    mixer: MixerConfig | None
    feed_forward: FeedForwardConfig | None


class ModelConfig(NetworkConfig):
    """A network (Child et al. 2019, section 5): its sizes and options, its embedding and its sub-layers.

    ``attention`` describes the mixers (``mixers_from_json``): a pattern object such as ``{"type": "fixed", "stride":
    128, "summary": 32, "combine": "merged"}``, or a list that the layers take in turn. ``feed_forward`` likewise
    (``feed_forwards_from_json``).

    Raises:
        ConfigError: by ``model_validate``; every wrong field, one line each.
    """

    attention: Annotated[Any, WithJsonSchema(attention_schema())] = Field(
        description="pattern, object with heads, or another mixer; or a list that the layers take in turn"
    )
    embedding: FoldedEmbedding | ImageEmbedding | LearnedEmbedding | TokenEmbedding = Field(
        discriminator="type", description="position tables, added to the token embedding"
    )
    feed_forward: Annotated[Any, WithJsonSchema(feed_forward_schema()), BeforeValidator(_with_defaults)] = Field(
        default=DenseConfig().model_dump(mode="json"),
        description="feed-forward, or a list that the layers take in turn",
    )
    ngrams: NgramTables | None = Field(
        default=None, description="hash tables of the last tokens, added to the token embedding; null: none"
    )

    objective: AnyObjective = Field(
        default=Autoregressive(), description="what is read, and which tokens are predicted"
    )

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        *NetworkConfig.left_out_at_default,
        "feed_forward",
        "ngrams",
        "objective",
    )

    def problems(self) -> Iterator[Problem]:
        """Yield the contradictions of the network and of its embedding, mixers and feed-forwards."""
        yield from super().problems()
        if isinstance(self.embedding, ImageEmbedding):
            size = self.embedding.height * self.embedding.width * self.embedding.channels
            if size != self.context:
                yield Problem("context", f"must be height x width x channels = {size}", self.context)
        elif isinstance(self.embedding, FoldedEmbedding) and self.embedding.row_width > self.context:
            yield Problem("embedding.row_width", f"must not exceed context {self.context}", self.embedding.row_width)
        if self.ngrams is not None and self.ngrams.orders[-1] >= self.context:
            rule = f"the longest must be below context {self.context}, as no position has more tokens before it"
            yield Problem("ngrams.orders", rule, list(self.ngrams.orders))
        if self.output is not None and self.objective.num_classes:
            rule = f"describes logits of tokens, and objective {self.objective.type} has others; set it to null"
            yield Problem("output", rule)
        wrong_parts: list[Problem] = []
        for name in ("mixers", "feed_forwards"):
            try:
                getattr(self, name)
            except ConfigError as error:
                wrong_parts += error.problems
        yield from wrong_parts
        if not wrong_parts:
            yield from self._wrong_sides()
            yield from () if self.objective.in_order else self._out_of_order()
        if self.convolution is not None and not wrong_parts:
            yield from self._lacking("convolution", "does not apply model.convolution; set it to null")
        for option in OF_ATTENTION:
            if getattr(self, option) and not wrong_parts:
                yield from self._lacking(option, f"does not apply model.{option}; set it to false")
        if self.reversible and not wrong_parts:
            yield from self._lacking(
                "reversible", "cannot be computed again from its outputs; set model.reversible to false"
            )

    @cached_property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixers of ``attention``, which the layers take in turn."""
        return mixers_from_json(self.attention, self)

    @cached_property
    def feed_forwards(self) -> tuple[FeedForwardConfig, ...]:
        """The feed-forwards of ``feed_forward``, likewise."""
        return feed_forwards_from_json(self.feed_forward)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, but parse the copy's parts again."""
        copy = super().model_copy(update=update, deep=deep)
        for name in ("mixers", "feed_forwards"):
            copy.__dict__.pop(name, None)
        return copy

    def blocks(self) -> tuple[BlockConfig, ...]:
        """Return all residual blocks: each mixer (s of the order) with the feed-forward (f) after it, if any."""
        mixers = itertools.cycle(self.mixers)
        feed_forwards = itertools.cycle(self.feed_forwards)
        return tuple(
            BlockConfig(next(mixers) if "s" in block else None, next(feed_forwards) if "f" in block else None)
            for block in re.findall("sf|s|f", self.sublayers)
        )

    @staticmethod
    def foreign_types(model: Mapping[str, Any]) -> list[str]:
        """List the types in a model's JSON that other packages define: parsing it would import their code."""
        known_types = {"patterns", *PATTERNS, *MIXERS, *FEED_FORWARDS}
        kinds, unread = [], [model.get("attention"), model.get("feed_forward")]
        while unread:
            value = unread.pop(0)
            if isinstance(value, dict):
                kinds.append(value.get("type"))
                unread += value.values()
            elif isinstance(value, list):
                unread += value
        return list(dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind not in known_types))

    def foreign_code(self) -> dict[str, str]:
        """Map the import path of each class that another package defines to its package and source."""
        parts: list[object] = [part for block in self.blocks() for part in block]
        patterns = itertools.chain.from_iterable(self.layer_patterns())
        classes = dict.fromkeys(type(part) for part in (*parts, *patterns) if part is not None)
        return {import_path(cls): source_of(cls) for cls in classes if is_foreign(cls)}

    @property
    def carries(self) -> bool:
        """Whether contexts hand something to the next contexts of their lanes."""
        return any(block.mixer is not None and block.mixer.carries for block in self.blocks())

    @property
    def reach(self) -> int:
        """How many earlier tokens the embedding of a position depends on."""
        return 1 if self.ngrams is None else self.ngrams.orders[-1]

    def check_backend(self, device: torch.device, dtype: torch.dtype, *, training: bool) -> None:
        """Check that ``backend`` can run the mixers, without computing anything.

        Raises:
            ConfigError: it cannot; the path is ``backend``.
        """
        mixers = (block.mixer for block in self.blocks() if block.mixer is not None)
        for widths in dict.fromkeys(mixer.head_widths(self) for mixer in mixers):
            if widths.in_kernels:
                head, value = widths.query_key, widths.value
                check_backend(
                    self.backend, device=device, dtype=dtype, head_width=head, value_width=value, training=training
                )

    def require(self, ability: Literal["documents", "padding"]) -> None:
        """Check that all parts keep documents of a context apart, or ignore padding in averages.

        Raises:
            ConfigError: a part does not.
        """
        rules = {
            "documents": 'reads whole contexts; take patterns, or data.packing {"attend": "context"}',
            "padding": "counts padding as if it were data; take another, or data whose contexts are full",
        }
        problems = list(self._lacking(ability, rules[ability]))
        if ability == "documents" and not self.objective.in_order:
            rule = f'{self.objective.type} permutes whole contexts; take data.packing {{"attend": "context"}}'
            problems.append(Problem("objective", rule))
        if problems:
            raise ConfigError(*problems)

    def _lacking(self, ability: Ability, rule: str) -> Iterator[Problem]:
        """Yield a problem for each type of part that lacks an ability."""
        mixers: list[PartConfig] = [block.mixer for block in self.blocks() if block.mixer is not None]
        others: list[PartConfig] = [block.feed_forward for block in self.blocks() if block.feed_forward is not None]
        if ability in OF_ATTENTION:
            mixers = [block.mixer for block in self.blocks() if block.mixer is not None and block.mixer.has_queries]
        by_path = {"attention": mixers, "feed_forward": [] if ability in (*OF_MIXERS, *OF_ATTENTION) else others}
        for path, parts in by_path.items():
            for kind in dict.fromkeys(part.type for part in parts if ability not in part.supports):
                yield Problem(path, f"{kind} {rule}")

    def _wrong_sides(self) -> Iterator[Problem]:
        """Yield a problem for each part that reads other sides of a position than the objective needs."""
        kind, causal = self.objective.type, self.objective.causal
        mixers = self.mixers[: self.layers] if self.objective.in_order else ()  # or see ``_out_of_order``
        reads = {name: side for mixer in mixers for name, side in mixer.causality(self).items()}
        for name in (name for name, side in reads.items() if side != causal):
            if causal:
                verb = "predicts" if self.objective.next_token else "does not read"
                rule = f"{name} reads later positions, which objective {kind} {verb}; "
                rule += 'leave out "causal": false, or give another type'
            else:
                rule = f"{name} reads no later positions, and objective {kind} needs both sides; "
                rule += 'give a pattern "causal": false, or another type'
            yield Problem("attention", rule)
        for option in ("convolution", "ngrams") if not causal else ():
            if getattr(self, option) is not None:
                rule = f"reads no later positions, and objective {kind} needs both sides; set it to null"
                yield Problem(option, rule)

    def _out_of_order(self) -> Iterator[Problem]:
        """Yield a problem for each part that depends on the order of rows, or on who reads whom."""
        kind = self.objective.type
        for mixer in dict.fromkeys(self.mixers[: self.layers]):
            if not (isinstance(mixer, HeadPatterns) and mixer.reads_all(self.context)):
                rule = f"{', '.join(mixer.causality(self))} decides who reads whom, which objective {kind} does; "
                yield Problem("attention", rule + 'take {"type": "dense", "causal": false}')
        if any(isinstance(part, ExpertsConfig) and part.capacity is not None for part in self.feed_forwards):
            rule = f"experts with a capacity take rows in their order, in which objective {kind} gives answers away; "
            yield Problem("feed_forward", f"{rule}set capacity to null")
        if self.backend == "flex":
            yield Problem("backend", f"cannot compute objective {kind}; take auto", self.backend)

    def require_next_token(self) -> None:
        """Check that the model predicts each next token, so that it can sample, compress and score text.

        Raises:
            ConfigError: it does not.
        """
        if not self.objective.next_token:
            rule = 'predicts no next token, so it cannot sample, compress or score text; take "autoregressive"'
            raise ConfigError.at("model.objective.type", self.objective.type, rule)

    def require_tokens(self) -> None:
        """Check that the model predicts tokens, as transformers' classes and traced programs do.

        Raises:
            ConfigError: it predicts classes.
        """
        if self.objective.num_classes:
            rule = "predicts classes, which neither transformers' classes nor traced programs do; load_model reads it"
            raise ConfigError.at("model.objective.type", self.objective.type, rule)

    def check_division(
        self, size: int, exchange: Literal["heads", "keys", "auto"] = "auto", *, documents: bool = False
    ) -> None:
        """Check that several processes can share each context.

        Args:
            size: processes.
            exchange: what attention exchanges between them; "auto" is either.
            documents: several in a context are kept apart.

        Raises:
            ConfigError: they cannot; one line for each reason.
        """
        if size == 1:
            return
        by_heads: dict[str, None] = {}  # mixers and options that can only exchange heads
        for mixer in (block.mixer for block in self.blocks() if block.mixer is not None):
            if documents or self.backend == "flex":
                by_heads["attention within documents" if documents else "backend flex"] = None
            elif "keys" not in mixer.supports:
                by_heads[mixer.type] = None
        divided, before = bool(by_heads) or exchange == "heads", (self.convolution or 1) - 1

        def fits(count: int) -> bool:
            rows = self.context // count
            return count == 1 or not (self.context % count or (divided and self.heads % count) or before > rows)

        fitting = [count for count in divisors(self.context) if fits(count)]
        below = max(count for count in fitting if count < size)
        above = next((count for count in fitting if count > size), None)
        good = f"{below}{'' if above is None else f' or {above}'} processes"
        rule = f"must be a multiple of the {size} processes that share each context"
        alone = "computes whole contexts, which processes cannot share; set train.sequence_parallel to 1"
        problems = list(self._lacking("sections", alone))
        if not self.objective.in_order or self.objective.num_classes:
            problems.append(Problem("objective", f"{self.objective.type} {alone}"))
        if exchange == "keys":
            only = 'exchanges heads, and sequence_exchange asks for keys; give "auto"'
            problems += [Problem("attention", f"{kind} {only}") for kind in by_heads]
        if self.context % size:
            near = [str(count) for count in (self.context // size * size, -(-self.context // size) * size) if count]
            problems.append(Problem("context", f"{rule}; nearest {' or '.join(near)}, or {good}", self.context))
        if divided and self.heads % size:
            why = f"{next(iter(by_heads))} exchanges them" if by_heads else "sequence_exchange asks for heads"
            problems.append(Problem("heads", f"{rule}, as {why}; nearest {good}", self.heads))
        if before > self.context // size:
            rows = self.context // size
            rule = f"reads {before} rows before each section, but with {size} processes a section has {rows}"
            problems.append(Problem("convolution", f"{rule}; at most {rows + 1}, or {good}", self.convolution))
        if problems:
            raise ConfigError(*problems)

    def layer_patterns(self) -> tuple[tuple[Pattern, ...], ...]:
        """Return which positions each head of each mixer may read, ``[layer][head]`` (section 4.2)."""
        return tuple(block.mixer.head_patterns(self) for block in self.blocks() if block.mixer is not None)
