"""Attention over a pattern, the paper's mixer.

Letters: B batch, H heads of queries, K heads of keys and values, N positions, C width, D head width, Dv that of values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from longstride.kernels import ConfigError, empty_cache, num_pairs, selected_attention, sparse_attention
from longstride.kernels.patterns import Column, Dense, Local, Pattern, declares_causal, pattern_to_json
from longstride.kernels.selections import selection_mask
from longstride.sparse_model.division import Division, Traffic
from longstride.sparse_model.mixers.cache import KeyValues, RowCache, with_sinks
from longstride.sparse_model.mixers.convolution import CausalConvolution
from longstride.sparse_model.mixers.sections import section_attention
from longstride.sparse_model.network import POSITIVE, NetworkConfig, nearest_divisor
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
NOT_FLEX = 'needs another backend than "flex"; nearest "auto"'
KEY_VALUE_HEADS = "heads of keys and values, each shared by a group of query heads; divides heads; null: heads"
KeyValueHeads = Annotated[Annotated[int, POSITIVE] | None, Field(description=KEY_VALUE_HEADS)]


class AttentionConfig(MixerConfig):
    """The configuration of a mixer with queries and keys. It may have a field ``key_value_heads``."""

    supports: ClassVar = frozenset({"convolution", "output_gate", "padding", "reversible", "sections"})

    has_queries = True

    def check(self, network: NetworkConfig, context: int) -> None:
        heads, shared = network.heads, getattr(self, "key_value_heads", None)
        if shared is not None and heads % shared:
            rule = f"must divide heads={heads}; nearest {nearest_divisor(heads, shared)}"
            raise ConfigError.at("key_value_heads", shared, rule)

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        shared = getattr(self, "key_value_heads", None)
        return HeadWidths(network.query_key_width // network.heads, network.width // network.heads, kept_heads=shared)


@dataclass(frozen=True)
class HeadPatterns(AttentionConfig):
    """Configuration of attention with one fixed pattern per head."""

    patterns: tuple[Pattern, ...]
    key_value_heads: int | None = None
    type: str = field(default="patterns", init=False)
    supports: ClassVar = AttentionConfig.supports | {"documents", "keys", "sinks"}

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        for pattern in dict.fromkeys(self.patterns):
            pattern.check(context)

    def causality(self, network: NetworkConfig) -> dict[str, bool]:
        """Map the type of each pattern to whether rows read no later positions."""
        patterns = dict.fromkeys(self.patterns)
        return {str(pattern_to_json(pattern)["type"]): declares_causal(pattern) for pattern in patterns}

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return self.patterns

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Attention:
        return Attention(network, self.patterns, rotary, key_value_heads=self.key_value_heads)

    def reads_all(self, context: int) -> bool:
        """Whether every head reads all positions."""
        return all(num_pairs(pattern, context) == context**2 for pattern in set(self.patterns))


class Attention(Mixer):
    """Projects to heads, attends over each head's pattern, and projects back (section 5.2).

    Optionally a convolution over positions comes first, and queries and keys are normalised (Henry et al. 2020;
    Dehghani et al. 2023: a root mean square of 1, without weights) and rotated by their positions. Gates
    (``network.output_gate``) may come before the projection. A sink (``network.sinks``) is a learned logit of each head
    without a value, which takes weight from the keys (OpenAI 2025, gpt-oss).

    Subclasses may override ``attend`` or ``attend_in``, ``new_cache``, ``num_pairs``, ``allowed``, ``weigh`` and
    ``compared``.
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
        """Make an attention of H heads.

        Args:
            network: its sizes and options.
            patterns: one for each head that does not choose by content.
            rotary: rotates queries and keys.
            widths: channels of the parts of the projection; None: queries, keys and values of all heads.
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
        self.query_key_value = self.linear(network.width, sum(self.widths))
        self.projection = self.linear(network.width, network.width)
        self.output_gate = nn.Linear(network.width, network.width, bias=network.bias) if network.output_gate else None
        self.sinks = nn.Parameter(torch.empty(network.heads)) if network.sinks else None
        self.stacked_rows = {"query_key_value": tuple(width for width in self.widths if width)}

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """Make a projection."""
        return nn.Linear(inputs, outputs, bias=self.network.bias)

    def initialize(self) -> None:
        draw_linear(self.query_key_value, self.network)
        draw_linear(self.projection, self.network, into_stream=True)
        if self.output_gate is not None:
            draw_linear(self.output_gate, self.network)
        if self.sinks is not None:  # as one more key with a score of 0
            nn.init.zeros_(self.sinks)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Attend from each row of h (B, N, C); with a state, to the cached positions too."""
        state: Any = context.state
        first, columns = context.first, context.columns
        if self.convolution is not None:
            h = self.convolution(h, None if state is None else state.recent, first, context.places)
        rows = self.query_key_value(h)
        if state is not None and h.shape[1] == 1:
            q, k, v = self.heads_of_row(rows, first)
            return MixerOutput(self._project(state.step(q, k, v, first).view(h.shape), h))
        if state is not None:
            q, k, v = self.heads_of(rows, slice(first, first + h.shape[1]))
            out = state.extend(q, k, v, first) if first else state.begin(q, k, v)
            return MixerOutput(self._project(out.transpose(1, 2).flatten(2), h))
        division = self.division
        places: Tensor | slice = division.positions(h.shape[1])
        if context.places is not None:
            places = context.places
        elif columns:
            places = division.positions_of(h.shape[1], columns, h.device)
        q, k, v = self.heads_of(rows, places)
        exchange = "heads"  # which does nothing with one process
        if division.size > 1:
            exchange = self.traffic(division, h.shape[1] * division.size, context.selection is not None).exchange
        if columns:
            patterns = [_within_columns(pattern, division.size)[1] for pattern in self.patterns]
            output = MixerOutput(self._attend_by(sparse_attention, q, k, v, patterns))
        elif exchange == "keys":
            output = MixerOutput(section_attention(q, k, v, self.patterns, division, self.backend, self.sinks))
        else:
            output = self._by_heads(q, k, v, context)
        return output._replace(rows=self._project(output.rows.transpose(1, 2).flatten(2), h))

    def _project(self, joined: Tensor, h: Tensor) -> Tensor:
        """Apply gates of rows h (B, n, C), if the network has any, to what all heads give (B, n, C), and project it.

        By the gate a query can give less than its keys' values, although its weights sum to 1 (Qiu et al. 2025).
        """
        if self.output_gate is not None:
            joined = joined * self.output_gate(h).sigmoid()
        rows: Tensor = self.projection(joined)
        return rows

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, context: BlockContext) -> MixerOutput:
        """Swap sections for heads, attend over whole contexts, and swap back.

        Without sequence parallelism only attend.
        """
        division = self.division
        if self.copies > 1:
            k, v = (x.repeat_interleave(self.copies, 1) for x in (k, v))
        q, k, v = division.to_heads(q, k, v)
        output = self.attend_in(context, q, k, v, division.heads(self.heads))
        (rows,) = division.to_sections(output.rows)
        return output._replace(rows=rows)

    def attend_in(self, context: BlockContext, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> MixerOutput:
        """Attend as ``attend`` does, or over the selection of a context."""
        if context.selection is None:
            return self.attend(q, k, v, heads, context.real)
        selection = context.selection if self.division.size == 1 else context.selection.of_heads(heads)
        return MixerOutput(self._attend_by(selected_attention, q, k, v, selection, heads))

    def _attend_by(self, attend: Any, q: Tensor, k: Tensor, v: Tensor, reads: Any, heads: slice = ALL_HEADS) -> Tensor:
        """Call an attention of the kernels for some heads, and apply their sinks, if any."""
        if self.sinks is None:
            out: Tensor = attend(q, k, v, reads, backend=self.backend)
            return out
        out, lse = attend(q, k, v, reads, backend=self.backend, return_lse=True)
        return with_sinks(out, lse, self.sinks[heads])

    @property
    def copies(self) -> int:
        """How many times each key/value head is repeated, so that processes share heads evenly."""
        return math.lcm(self.key_value_heads, self.division.size) // self.key_value_heads

    def traffic(self, division: Division, context: int, apart: bool = False) -> Traffic:
        """Count what the attention sends in a forward pass over one context.

        Keys can be exchanged only if fixed patterns determine all reads, which separated documents (``apart``) rule
        out, and only by backends that attend over selections.
        """
        can_exchange_keys = type(self) is Attention and self.backend != "flex" and not apart
        widths = self.network.query_key_width // self.heads, self.network.width // self.heads
        patterns = self.patterns if can_exchange_keys else None
        return division.traffic(context, self.heads, self.key_value_heads, widths, patterns)

    def columns(self, context: int) -> int:
        """Return the stride by which rows are best divided into columns, or 0 for contiguous sections.

        Divided by columns, nothing is exchanged. All heads must stay in columns of one stride, and redistributing the
        rows before and after must not send more than the other exchanges.
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
        """Attend over whole contexts: q (B, H, N, D), k and v (B, K, N, ·) to rows (B, H, N, Dv), and losses.

        With sequence parallelism these are only some ``heads``. ``real`` (B, N) bool is False where a row is padding,
        which is excluded from statistics and averages; None: all are real.
        """
        return MixerOutput(self._attend_by(sparse_attention, q, k, v, self.patterns[heads], heads))

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> RowCache:
        """Make an empty cache of keys and values with room for ``length`` positions."""
        keys, values = self.empty_rows(batch, length, device, dtype)
        sinks = None if self.sinks is None else self.sinks.detach()
        return KeyValues(keys, values, self.patterns, self.backend, sinks=sinks)

    def empty_rows(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Allocate keys (B, K, length, D) and values (B, K, length, Dv) in the memory order that suits the patterns."""
        heads, patterns = self.key_value_heads, self.patterns or Dense()
        keys, values = (
            empty_cache(batch, heads, length, width // heads, patterns, device=device, dtype=dtype)
            for width in self.widths[-2:]
        )
        return keys, values

    def num_pairs(self, positions: int) -> int:
        """Count pairs of a query and a key in all heads together; an upper bound if the data decide."""
        return sum(count * num_pairs(pattern, positions) for pattern, count in Counter(self.patterns).items())

    def visited_pairs(self, positions: int, like: Tensor) -> int:
        """Count ``num_pairs`` with those that kernels compute and mask, for tensors of this dtype and device.

        For heads whose keys depend on the data, this is ``num_pairs``.
        """
        chooses = (type(self).attend, type(self).attend_in) != (Attention.attend, Attention.attend_in)
        if chooses or len(self.patterns) < self.heads:
            return self.num_pairs(positions)
        rows, counts = like.new_empty(0, self.widths[0] // self.heads), Counter(self.patterns)
        return sum(count * num_pairs(pattern, positions, rows, self.backend) for pattern, count in counts.items())

    def allowed(self, q: Tensor, k: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Return a function that maps P query positions (P,) int64 to a mask (P, N) of the keys that a head reads.

        q and k are those of ``heads_of``.
        """
        positions = torch.arange(k.shape[2], device=k.device)
        return lambda queries: self.patterns[head].mask(queries[:, None], positions)

    def weigh(self, scores: Tensor, queries: Tensor, head: int) -> Tensor:
        """Turn scores (P, N) of queries (P,), -inf for keys that are not read, into weights; undefined without keys."""
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sink = self.sinks[head].to(scores.dtype).expand(len(scores), 1)
        return torch.softmax(torch.cat([scores, sink], 1), -1)[:, :-1]

    def compared(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries (B, H, N, D) and keys (B, K, N, D) whose products are the scores."""
        return q, k

    def heads_of(self, rows: Tensor, places: Tensor | slice | None = None) -> Sequence[Tensor]:
        """Split rows of ``query_key_value`` (B, N, channels) into q (B, H, N, D), k and v (B, K, N, ·).

        Their positions are ``places``, a slice of N or (B, N); None: 0 to N - 1.
        """
        if not self.as_projected:
            channels, width = sum(self.widths[:-1]), self.widths[0] // self.heads
            table = None
            if self.rotary is not None:
                table = self.rotary.table(rows.device)[slice(rows.shape[1]) if places is None else places]
            rows = PreparedHeads.apply(rows, channels, width, self.normed, table)
        parts = zip(rows.split(self.widths, dim=-1), self.part_heads, strict=True)
        return [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part, heads in parts]

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> RowCache:
        """Make an empty state with room for ``length`` positions; a CPU takes memory only as it is written.

        ``back``: the most positions that ``truncate`` can remove without clearing the state.

        Raises:
            ConfigError: the backend cannot run here.
        """
        cache = self.new_cache(batch, length, device, dtype)
        if self.convolution is not None:
            cache.recent = self.convolution.new_state(batch, length, device, back)
        return cache

    def work(self, positions: int, batch: int) -> Work:
        """Count the pairs that the heads read, the projections and the convolution."""
        pairs = self.num_pairs(positions)
        weights = self.query_key_value.weight.numel() + self.projection.weight.numel()
        weights += 0 if self.output_gate is None else self.output_gate.weight.numel()
        scores = 2 * pairs * self.network.query_key_width // self.heads
        work = Work(pairs, 2 * positions * weights, scores, 2 * pairs * self.network.width // self.heads)
        return work if self.convolution is None else work + self.convolution.work(positions, batch)

    def weights(self, h: Tensor, context: BlockContext = PLAIN) -> Callable[[Tensor, int], Tensor]:
        q, k = self._queries_and_keys(h, context)
        factors = self.compared(q, k)

        def of_head(queries: Tensor, head: int) -> Tensor:
            allowed = self.reads(h, head, context)(queries)
            keys = factors[1][0, head // self.group].double()
            scores = (factors[0][0, head, queries].double() @ keys.T) * q.shape[-1] ** -0.5
            weights = self.weigh(scores.masked_fill(~allowed, -math.inf), queries, head)
            return weights.masked_fill(~allowed, 0.0)  # a query without keys has a softmax of NaN

        return of_head

    def reads(self, h: Tensor, head: int, context: BlockContext = PLAIN) -> Callable[[Tensor], Tensor]:
        return self._allowed(*self._queries_and_keys(h, context), head, context)

    def _allowed(self, q: Tensor, k: Tensor, head: int, context: BlockContext) -> Callable[[Tensor], Tensor]:
        selection = context.selection
        if selection is None:
            return self.allowed(q, k, head)
        return lambda queries: selection_mask(selection.of_heads(slice(head, head + 1)), k.shape[2], queries)[0, 0]

    def _queries_and_keys(self, h: Tensor, context: BlockContext) -> tuple[Tensor, Tensor]:
        """Compute queries (1, H, N, D) and keys (1, K, N, D) of one context (1, N, C)."""
        rows = self.query_key_value(h if self.convolution is None else self.convolution(h))
        q, k, _ = self.heads_of(rows)
        return q, k

    def heads_of_row(self, row: Tensor, position: int) -> Sequence[Tensor]:
        """Split one position (B, 1, ·) into q (B, H, D), k and v (B, K, ·).

        It makes few views, as each takes as long as a row's arithmetic.
        """
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
    """Return the stride of the columns that a pattern stays in, and the pattern among the columns of one process.

    If it does not stay in columns: 0, and the pattern itself. With ``align`` "target", keys are in the next column.
    """
    if not isinstance(pattern, Column | Local) or pattern.align == "target":
        return 0, pattern
    if isinstance(pattern, Column):
        return pattern.stride, replace(pattern, stride=max(1, pattern.stride // sharing))
    if pattern.dilation > 1:
        return pattern.dilation, replace(pattern, dilation=max(1, pattern.dilation // sharing))
    return 0, pattern
