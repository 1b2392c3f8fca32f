"""Attention over a pattern, the paper's mixer.

Letters: B batch, H heads of queries, K heads of keys and values, N positions, C width, D head width, Dv that of values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longstride.kernels import ConfigError, empty_cache, num_pairs, selected_attention, sparse_attention
from longstride.kernels.patterns import Column, Local, Pattern
from longstride.sparse_model.division import Division, Traffic
from longstride.sparse_model.mixers.cache import Cache, KeyValues
from longstride.sparse_model.mixers.convolution import CausalConvolution, RecentRows
from longstride.sparse_model.mixers.sections import section_attention
from longstride.sparse_model.network import NetworkConfig, nearest_divisor
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    HeadWidths,
    Mixer,
    MixerConfig,
    MixerOutput,
    Work,
    draw_linear,
)
from longstride.sparse_model.rotary import PreparedHeads, Rotary, prepared_row

ALL_HEADS = slice(None)
KEY_VALUE_HEADS = "heads of keys and values, each for a group of heads of queries; a divisor of heads; null: as many"


class OfQueriesAndKeys(MixerConfig):
    """What the configurations of all attention have in common."""

    supports: ClassVar = frozenset({"convolution", "padding", "reversible", "sections"})

    @property
    def has_queries(self) -> bool:
        """All have queries and keys."""
        return True

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """Each head's share of both widths."""
        kept = getattr(self, "key_value_heads", None)  # a choice that not all mixers have
        return HeadWidths(network.query_key_width // network.heads, network.width // network.heads, kept_heads=kept)


def check_key_value_heads(key_value_heads: int | None, network: NetworkConfig) -> None:
    """Raise ConfigError unless so many heads of keys and values can serve the network's heads of queries evenly."""
    heads = network.heads
    if key_value_heads is not None and heads % key_value_heads:
        rule = f"must divide heads={heads}; nearest {nearest_divisor(heads, key_value_heads)}"
        raise ConfigError.at("key_value_heads", key_value_heads, rule)


@dataclass(frozen=True)
class HeadPatterns(OfQueriesAndKeys):
    """Attention as the configuration asks for it: a pattern for each head."""

    patterns: tuple[Pattern, ...]
    key_value_heads: int | None = None
    type: str = field(default="patterns", init=False)
    supports: ClassVar = OfQueriesAndKeys.supports | {"documents", "keys"}

    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError unless all patterns divide the context evenly, and heads of keys those of queries."""
        check_key_value_heads(self.key_value_heads, network)
        for pattern in dict.fromkeys(self.patterns):
            pattern.check(context)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Which positions each head may read."""
        return self.patterns

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Attention:
        """The module."""
        return Attention(network, self.patterns, rotary, key_value_heads=self.key_value_heads)


@dataclass(slots=True)
class AttentionState:
    """What one attention knows of earlier positions."""

    keys_values: Cache
    recent: RecentRows | None  # what its convolution reads

    def take(self, source: AttentionState, order: Tensor, known: int, into: slice) -> None:
        """Contexts ``into`` become copies of contexts ``order`` of such a state in its first ``known`` rows."""
        self.keys_values.take(source.keys_values, order, known, into)
        if self.recent is not None:
            self.recent.take(source.recent, order, known, into)

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``."""
        self.keys_values.truncate(length)
        if self.recent is not None:
            self.recent.truncate(length)


class Attention(Mixer):
    """Projects to heads, attends over each head's pattern, and projects back (section 5.2).

    As the configuration asks, a convolution over positions comes first, and queries and keys are normalised (Henry et
    al. 2020; Dehghani et al. 2023: a root mean square of 1, without weights) and turned by their positions.
    """

    part = "attention"

    def __init__(
        self,
        network: NetworkConfig,
        patterns: tuple[Pattern, ...],
        rotary: Rotary | None,
        widths: tuple[int, ...] | None = None,
        key_value_heads: int | None = None,
    ) -> None:
        """An attention of H heads.

        Args:
            network: its sizes and options.
            patterns: one a head, of those that do not choose by content.
            rotary: by which queries and keys are turned.
            widths: channels of what is projected, where that is not queries, keys and values of all heads.
            key_value_heads: K, each for a group of H / K heads of queries (Ainslie et al. 2023, section 2.2; of K = 1
                Shazeer 2019, section 3); None: H.
        """
        super().__init__()
        self.network, self.heads, self.backend, self.patterns = network, network.heads, network.backend, patterns
        self.key_value_heads = key_value_heads or network.heads
        self.group = self.heads // self.key_value_heads
        shared = network.query_key_width // self.group, network.width // self.group
        self.widths = widths or (network.query_key_width, *shared)
        self.part_heads = (self.heads,) + (len(self.widths) - 1) * (self.key_value_heads,)  # of each of these
        self.equal_widths = len(set(self.widths)) == 1
        self.rotary, self.normed = rotary, network.query_key_norm
        self.as_projected = self.rotary is None and not self.normed  # queries and keys
        self.convolution = CausalConvolution(network.convolution, network.width) if network.convolution else None
        self.query_key_value = nn.Linear(network.width, sum(self.widths), bias=network.bias)
        self.projection = nn.Linear(network.width, network.width, bias=network.bias)
        self.stacked_rows = {"query_key_value": tuple(width for width in self.widths if width)}

    def initialize(self) -> None:
        """Set its linear layers."""
        draw_linear(self.query_key_value, self.network)
        draw_linear(self.projection, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Attend from each row of h (B, N, C); with a state, to the kept positions too."""
        state: Any = context.state
        first, documents, columns = context.first, context.documents, context.columns
        if self.convolution is not None:
            of_document = None if documents is None else documents.places
            h = self.convolution(h, None if state is None else state.recent, first, of_document)
        rows = self.query_key_value(h)
        if state is not None and h.shape[1] == 1:
            q, k, v = self._heads_of_one(rows, first)
            return MixerOutput(self.projection(state.keys_values.step(q, k, v, first).view(h.shape)))
        if state is not None and first:
            q, k, v = self.heads_of(rows, slice(first, first + h.shape[1]))
            out = state.keys_values.extend(q, k, v, first)
            return MixerOutput(self.projection(out.transpose(1, 2).flatten(2)))
        division = self.division
        places: Tensor | slice = division.positions(h.shape[1])
        if documents is not None:
            places = documents.places
        elif columns:
            places = division.positions_of(h.shape[1], columns, h.device)
        q, k, v = self.heads_of(rows, places)
        exchange = "heads"  # of nothing, where there is one process
        if division.size > 1:
            exchange = self.traffic(division, h.shape[1] * division.size, documents is not None).exchange
        if state is not None:
            output = MixerOutput(state.keys_values.begin(q, k, v))
        elif columns:
            patterns = [_within_columns(pattern, division.size)[1] for pattern in self.patterns]
            output = MixerOutput(sparse_attention(q, k, v, patterns, backend=self.backend))
        elif exchange == "keys":
            output = MixerOutput(section_attention(q, k, v, self.patterns, division, self.backend))
        else:
            output = self._by_heads(q, k, v, context)
        return output._replace(rows=self.projection(output.rows.transpose(1, 2).flatten(2)))

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, context: BlockContext) -> MixerOutput:
        """Attention under sequence parallelism: swap sections for heads, attend over whole contexts, swap back."""
        division = self.division
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 1) for x in (k, v))
        q, k, v = division.to_heads(q, k, v)
        heads = division.heads(self.heads)
        if context.documents is not None:
            selection = context.documents.selection
            assert selection is not None
            selection = selection if division.size == 1 else selection.of_heads(heads)
            output = MixerOutput(selected_attention(q, k, v, selection, backend=self.backend))
        else:
            output = self.attend(q, k, v, heads, context.real)
        (rows,) = division.to_sections(output.rows)
        return output._replace(rows=rows)

    @property
    def copies(self) -> int:
        """How often each head of keys and values travels, so that as many as the processes divide do."""
        return math.lcm(self.key_value_heads, self.division.size) // self.key_value_heads

    def traffic(self, division: Division, context: int, apart: bool = False) -> Traffic:
        """What it sends in a forward pass over one context of so many positions.

        Keys may travel where patterns alone tell who reads them (``apart``: so do documents, kept apart), by backends
        that attend over selections.
        """
        is_told = type(self) is Attention and self.backend != "flex" and not apart
        widths = self.network.query_key_width // self.heads, self.network.width // self.heads
        patterns = self.patterns if is_told else None
        return division.traffic(context, self.heads, self.key_value_heads, widths, patterns)

    def columns(self, context: int) -> int:
        """The stride of the columns by which its rows are best divided, so that nothing travels; 0: by sections.

        That is where all heads stay in columns of one stride, and to divide the rows anew before and behind it sends
        no more than its other exchanges.
        """
        division = self.division
        strides = {_within_columns(pattern, division.size)[0] for pattern in self.patterns}
        stride = strides.pop() if type(self) is Attention and len(strides) == 1 else 0
        if self.convolution is not None or division.exchange == "heads" or not division.divides(context, stride):
            return 0
        sent = 2 * context * (division.size - 1) // division.size * self.network.width
        return stride if sent <= sum(self.traffic(division, context).sent) else 0

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: slice = ALL_HEADS, real: Tensor | None = None
    ) -> MixerOutput:
        """q (B, H, N, D), k and v (B, K, N, ·) of whole contexts to rows (B, H, N, Dv), and losses.

        These are of some ``heads`` alone where contexts are divided. ``real`` (B, N) bool is False where a row is
        padding, which takes part in no statistics and no average; None: all are real. What attends otherwise overrides
        this, ``new_cache``, ``num_pairs``, ``allowed`` and ``weigh``, or some of them.
        """
        return MixerOutput(sparse_attention(q, k, v, self.patterns[heads], backend=self.backend))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Cache:
        """Empty keys and values with room for ``length`` positions, and how one more query reads them."""
        keys, values = self.empty_rows(batch, length, device, dtype)
        return KeyValues(keys, values, self.patterns, self.backend)

    def empty_rows(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Uninitialised keys (B, K, length, D) and values (B, K, length, Dv), as its patterns read them best."""
        kept = self.key_value_heads
        keys, values = (
            empty_cache(batch, kept, length, width // kept, self.patterns, device=device, dtype=dtype)
            for width in self.widths[-2:]
        )
        return keys, values

    def num_pairs(self, positions: int) -> int:
        """Pairs of a query and a key, in all heads together; the most there can be where the data decide."""
        return sum(count * num_pairs(pattern, positions) for pattern, count in Counter(self.patterns).items())

    def visited_pairs(self, positions: int, like: Tensor) -> int:
        """``num_pairs``, with those that kernels compute and mask, for tensors of this one's dtype on its device.

        Of heads whose keys the data choose, ``num_pairs``.
        """
        if type(self).attend is not Attention.attend:
            return self.num_pairs(positions)
        rows, counts = like.new_empty(0, self.widths[0] // self.heads), Counter(self.patterns)
        return sum(count * num_pairs(each, positions, rows, self.backend) for each, count in counts.items())

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Which positions a head reads in one context, q and k as ``heads_of`` has them: (P,) int64 to (P, N) bool."""
        positions = torch.arange(k.shape[2], device=k.device)
        return lambda queries: self.patterns[head].mask(queries[:, None], positions)

    def weigh(self, scores: Tensor, queries: Tensor, head: int) -> Tensor:
        """Scores (P, N) of queries (P,), -inf where they do not read, to weights; of a query without keys, anything."""
        return torch.softmax(scores, -1)

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, N, D) and keys (B, K, N, D) of ``heads_of`` as scores are made of them."""
        return q, k

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> Sequence[Tensor]:
        """q (B, H, N, D), k and v (B, K, N, ·), from what ``query_key_value`` gives, (B, N, channels).

        Their positions are ``places``, a run of N or (B, N); else 0 to N - 1.
        """
        if not self.as_projected:
            channels, width = sum(self.widths[:-1]), self.widths[0] // self.heads
            table = None
            if self.rotary is not None:
                table = self.rotary.table(rows.device)[slice(rows.shape[1]) if places is None else places]
            rows = PreparedHeads.apply(rows, channels, width, self.normed, table)
        parts = zip(rows.split(self.widths, dim=-1), self.part_heads, strict=True)
        return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in parts]

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> AttentionState:
        """An empty state with room for ``length`` positions; a CPU takes memory only as it is written.

        ``back``: how many positions it may be told to forget, beside all.

        Raises:
            ConfigError: the backend cannot run here.
        """
        recent = None if self.convolution is None else self.convolution.new_state(batch, length, device, back)
        return AttentionState(self.new_cache(batch, length, device, dtype), recent)

    def work(self, positions: int, batch: int) -> Work:
        """Of the pairs that its heads read, its projections, and its convolution."""
        pairs = self.num_pairs(positions)
        weights = self.query_key_value.weight.numel() + self.projection.weight.numel()
        scores = 2 * pairs * self.network.query_key_width // self.heads
        own = Work(pairs, 2 * positions * weights, scores, 2 * pairs * self.network.width // self.heads)
        return own if self.convolution is None else own + self.convolution.work(positions, batch)

    def weights(self, h: Tensor) -> Callable[[Tensor, int], Tensor]:
        """How its heads weigh the positions of one context, for pictures.

        Args:
            h: (1, N, C), as ``forward`` takes it.

        Returns:
            A function of queries (P,) int64 and the number of a head, to (P, N) float64: the softmax over the keys that
            the head reads. A row sums to 1, or to 0 where a query has no key.
        """
        q, k = self._queries_and_keys(h)
        left, right = self.compared(q, k)

        def of_head(queries: Tensor, head: int) -> Tensor:
            allowed = self.allowed(q, k, head)(queries)
            keys = right[0, head // self.group].double()
            scores = (left[0, head, queries].double() @ keys.T) * q.shape[-1] ** -0.5
            weights = self.weigh(scores.masked_fill(~allowed, -math.inf), queries, head)
            return weights.masked_fill(~allowed, 0.0)  # a query without keys has a softmax of NaN

        return of_head

    def reads(self, h: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Which positions a head reads in one context, h (1, N, C): queries (P,) int64 to (P, N) bool."""
        return self.allowed(*self._queries_and_keys(h), head)

    def _queries_and_keys(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (1, H, N, D) and keys (1, K, N, D) of one context (1, N, C)."""
        rows = self.query_key_value(h if self.convolution is None else self.convolution(h))
        q, k, _ = self.heads_of(rows)
        return q, k

    def _heads_of_one(self, row: Tensor, position: int) -> Sequence[Tensor]:
        """q (B, H, D), k and v (B, K, ·) of one position, (B, 1, ·), with few views: each takes as long as a row's
        arithmetic."""
        if self.as_projected:
            if self.equal_widths:
                return row.view(len(row), len(self.widths), self.heads, -1).unbind(1)
            parts = zip(row.split(self.widths, dim=-1), self.part_heads, strict=True)
            return [part.view(len(row), heads, -1) for part, heads in parts]
        turns = None if self.rotary is None else self.rotary.table(row.device)[position]
        prepared, v = row.split((sum(self.widths[:-1]), self.widths[-1]), dim=-1)
        prepared = prepared_row(prepared.view(len(row), -1, self.widths[0] // self.heads), self.normed, turns)
        return *prepared.split(self.part_heads[:-1], 1), v.view(len(row), self.key_value_heads, -1)


def _within_columns(pattern: Pattern, sharing: int) -> tuple[int, Pattern]:
    """The stride of the columns in which a pattern stays, and what it is among those that one of ``sharing`` has.

    0, and the pattern itself, where it does not stay in them.
    """
    if isinstance(pattern, Column):
        return pattern.stride, Column(max(1, pattern.stride // sharing))
    if isinstance(pattern, Local) and pattern.dilation > 1:
        return pattern.dilation, replace(pattern, dilation=max(1, pattern.dilation // sharing))
    return 0, pattern
