"""Synthesizer: attention whose scores need not be products of queries and keys (Tay et al. 2020, section 3).

Letters: B batch, H heads, N positions of the model's context, n of what is computed, C width, D channels of queries and
keys, Dv of values, k rank, a·b = N.

The scores of a head, followed by a softmax over the allowed keys as in attention:

- random: a learned table S[i, j] (H, N, N), the same for every input.
- factorized_random: S[i, j] = R1[i] · R2[j], two learned tables (H, N, k).
- dense: S[i, j] = relu(W1 x_i) · W2[j]: from the reading row alone, with a learned table W2 (H, N, hidden).
- factorized_dense: S[i, j] = A_i[j // b] · B_i[j mod b], where A_i and B_i, of a and b numbers, are such dense
  products. The paper repeats both vectors to N columns and multiplies them. One is repeated element by element and the
  other as a whole, so that every column has its own pair.
- attention: products of queries and keys, divided by √D.

Several can be mixed: S = Σ α_s S_s, with α a learned softmax over the kinds of a layer, which begins uniform.

Tables have N rows, the model's context. Shorter contexts use their first rows and columns.

All but random and factorized_dense are attention with learned keys or queries, and a mixture of them is attention with
concatenated channels. So they cost what their pattern costs in time and memory: O(N·√N) with strided and fixed
patterns. The other two hold N² scores for each head (random in its weights too) under any pattern, which only masks
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import BeforeValidator, Field, WithJsonSchema
from torch import Tensor, nn

from longstride.kernels import ConfigError, Problem, empty_cache, nearest, num_pairs, sparse_attention
from longstride.kernels.patterns import GROUP as PATTERN_GROUP
from longstride.kernels.patterns import PATTERNS, Dense, Pattern, pattern_from_json
from longstride.kernels.registry import foreign_schema
from longstride.sparse_model.division import Division, Traffic
from longstride.sparse_model.mixers.cache import KeyValues, Rows
from longstride.sparse_model.mixers.convolution import CausalConvolution
from longstride.sparse_model.network import POSITIVE, NetworkConfig, nearest_divisor
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    HeadWidths,
    Mixer,
    MixerConfig,
    MixerOutput,
    Work,
    draw,
    draw_linear,
)
from longstride.sparse_model.rotary import PreparedHeads, Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

Kind = Literal["random", "factorized_random", "dense", "factorized_dense", "attention"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WHOLE_SCORES = ("random", "factorized_dense")  # kinds whose scores are computed for all pairs
RANK = 8  # the paper's k
# Configuration keys that only apply to some kinds.
OF_KINDS = {
    "hidden": ("dense", "factorized_dense"),
    "rank": ("factorized_random",),
    "blocks": ("factorized_dense",),
    "fixed": ("random", "factorized_random"),
}


def _kinds(value: Any) -> tuple[Kind, ...]:
    """Parse one kind, or a list of kinds to mix."""
    kinds = value if isinstance(value, list) else [value]
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError.at("", value, f"must be a kind of scores, or a list of them; {nearest(str(kind), KINDS)}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise ConfigError.at("", value, 'must name each kind once; such as ["random", "attention"]')
    if kinds == ["attention"]:
        raise ConfigError.at("", value, 'is plain attention; use {"type": "dense"}, or add another kind')
    return tuple(kinds)


def one_pattern(value: Any) -> Pattern:
    """Parse `pattern`, which all heads of a mixer share; null is dense."""
    if isinstance(value, dict) and "index" in value:
        raise ConfigError.at("index", value["index"], "must be left out: it follows from the number of the head")
    return Dense() if value is None else pattern_from_json(value)


def check_pattern(pattern: Pattern, context: int) -> None:
    """Raise ConfigError, about `pattern`, if it does not fit the context."""
    try:
        pattern.check(context)
    except ConfigError as error:
        raise error.under("pattern") from None


_OF_KINDS = {"enum": list(KINDS)}
_KIND_SCHEMA: dict[str, Any] = {"anyOf": [_OF_KINDS, {"type": "array", "items": _OF_KINDS, "minItems": 1}]}
PATTERN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": list(PATTERNS), "description": "of the pattern, whose keys are listed next to it"}
            },
            "required": ["type"],
        },
        foreign_schema(PATTERN_GROUP),
        {"type": "null"},
    ]
}
OnePattern = Annotated[Any, BeforeValidator(one_pattern), WithJsonSchema(PATTERN_SCHEMA)]


class SynthesizerConfig(MixerConfig, StrictModel):
    """Attention with synthesized scores."""

    supports: ClassVar = frozenset({"convolution", "padding", "reversible", "sections"})
    type: Literal["synthesizer"] = Field(description="scores without products of queries and keys (Tay et al. 2020)")
    kind: Annotated[Any, BeforeValidator(_kinds), WithJsonSchema(_KIND_SCHEMA)] = Field(
        description="of scores: one, or a list of those that are mixed"
    )
    hidden: Annotated[int, POSITIVE] | None = Field(
        default=None, description="channels inside a head of a dense kind; null: those of its values"
    )
    rank: Annotated[int, POSITIVE] | None = Field(default=None, description="of factorized_random; null: the paper's 8")
    blocks: Annotated[int, POSITIVE] | None = Field(
        default=None,
        description="of factorized_dense, the paper's a; null: the divisor of the context nearest to its root",
    )
    fixed: bool = Field(default=False, description="random tables stay as they were drawn")
    pattern: OnePattern = Field(
        default=None, validate_default=True, description="which keys a query may read; null: all before it"
    )

    @property
    def has_queries(self) -> bool:
        return "attention" in self.kind

    def check(self, network: NetworkConfig, context: int) -> None:
        problems = []
        for key, kinds in OF_KINDS.items():
            value = getattr(self, key)
            if value not in (None, False) and not set(kinds) & set(self.kind):
                kind = self.kind[0] if len(self.kind) == 1 else list(self.kind)
                rule = f"only applies to {' and '.join(kinds)}, and kind is {kind}; leave it out"
                problems.append(Problem(key, rule, value))
        if "factorized_dense" in self.kind and network.context % (self.blocks or 1):
            near = nearest_divisor(network.context, self.blocks or 1)
            problems.append(Problem("blocks", f"must divide context {network.context}; nearest {near}", self.blocks))
        if problems:
            raise ConfigError(*problems)
        check_pattern(self.pattern, context)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return tuple(self.pattern.for_head(head) for head in range(network.heads))

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """Concatenate the channels of all kinds that are products. With any other kind, no kernel computes them."""
        value = network.width // network.heads
        products = {
            "attention": network.query_key_width // network.heads,
            "factorized_random": self.rank or RANK,
            "dense": self.hidden or value,
        }
        in_kernels = not any(kind in WHOLE_SCORES for kind in self.kind)
        return HeadWidths(sum(products.get(kind, 0) for kind in self.kind), value, in_kernels)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Synthesizer:
        return Synthesizer(network, self, rotary)


class Heads(NamedTuple):
    """Parts of the projected rows of some positions, for some heads."""

    values: Tensor  # (B, H, n, Dv)
    queries: Tensor | None  # (B, H, n, D), scaled; None: no kind is a product
    keys: Tensor | None  # (B, H, n, D)
    blocks: Tensor | None  # (B, H, n, a): A_i, scaled; None: no kind is factorized_dense
    places: Tensor | None  # (B, H, n, b): B_i


class Synthesizer(Mixer):
    """Projects to heads, weighs values by synthesized scores, and projects back (Tay et al. 2020, section 3)."""

    part = "synthesizer"
    trained_as = "embeddings"  # of its tables, which have a row for each position, like position embeddings
    random: Tensor  # the tables; each exists if a kind uses it
    random_queries: Tensor
    random_keys: Tensor
    dense_keys: Tensor
    block_keys: Tensor
    place_keys: Tensor

    def __init__(self, network: NetworkConfig, config: SynthesizerConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.network, self.heads, self.kinds, self.backend = network, network.heads, config.kind, network.backend
        self.key_value_heads = network.heads  # each has its own
        self.patterns = config.head_patterns(network)
        widths = config.head_widths(network)
        self.product_width, self.whole_scores = widths.query_key, not widths.in_kernels
        self.rotary, self.normed = rotary, network.query_key_norm
        context, heads, width = network.context, network.heads, network.width
        hidden, rank = config.hidden or width // heads, config.rank or RANK
        # Parts of the projection, in this order: queries and keys first, which are normalised and rotated together.
        self.widths: dict[str, int] = {}
        if "attention" in self.kinds:
            self.widths |= {"queries": network.query_key_width, "keys": network.query_key_width}
        self.widths["values"] = width
        if "dense" in self.kinds:
            self.widths["dense"] = heads * hidden
        if "factorized_dense" in self.kinds:
            self.widths |= {"blocks": heads * hidden, "places": heads * hidden}
        self.convolution = CausalConvolution(network.convolution, width) if network.convolution else None
        self.rows = nn.Linear(width, sum(self.widths.values()), bias=network.bias)
        self.projection = nn.Linear(width, width, bias=network.bias)
        self.stacked_rows = {"rows": tuple(self.widths.values())}  # matrices in one, see ``parameter_roles``
        self.mixing = nn.Parameter(torch.zeros(len(self.kinds))) if len(self.kinds) > 1 else None
        self.tables: dict[str, int] = {}  # names, and the d of their first values
        if "random" in self.kinds:
            self._add_table("random", (context, context), 1, config.fixed)
        if "factorized_random" in self.kinds:
            self._add_table("random_queries", (context, rank), 1, config.fixed)
            self._add_table("random_keys", (context, rank), rank, config.fixed)
        if "dense" in self.kinds:
            self._add_table("dense_keys", (context, hidden), hidden)
        self.blocks = 0
        if "factorized_dense" in self.kinds:
            self.blocks = config.blocks or nearest_divisor(context, math.sqrt(context))
            self._add_table("block_keys", (self.blocks, hidden), hidden)
            self._add_table("place_keys", (context // self.blocks, hidden), hidden)

    def _add_table(self, name: str, shape: tuple[int, int], fan_in: int, fixed: bool = False) -> None:
        """Add a table for each head. Scores begin small, so that each output begins near the mean of the values."""
        self.tables[name] = fan_in
        table = torch.empty(self.heads, *shape)
        if fixed:
            self.register_buffer(name, table)
        else:
            setattr(self, name, nn.Parameter(table))

    def initialize(self) -> None:
        """Set the linear layers and tables; mixtures begin uniform."""
        draw_linear(self.rows, self.network)
        draw_linear(self.projection, self.network, into_stream=True)
        for name, fan_in in self.tables.items():
            draw(getattr(self, name), self.network, fan_in)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        state: Any = context.state
        first = context.first
        if self.convolution is not None:
            h = self.convolution(h, None if state is None else state.recent, first)
        head_rows = self.heads_of(self.rows(h), first)
        heads = self.division.heads(self.heads)
        values, queries, keys, *_ = head_rows
        if self.whole_scores:
            if state is not None:
                last = first + values.shape[2]
                state.write(slice(first, last), values[..., :0] if keys is None else keys, values)
                keys, values = state.keys[:, :, :last], state.values[:, :, :last]
            out = self._weigh(head_rows, keys, values, first, heads)
        else:
            assert queries is not None and keys is not None
            if state is None:
                out = sparse_attention(queries, keys, values, self.patterns[heads], scale=1.0, backend=self.backend)
            elif first or h.shape[1] == 1:
                out = state.extend(queries, keys, values, first)
            else:
                out = state.begin(queries, keys, values)
        (out,) = self.division.to_sections(out)
        return MixerOutput(self.projection(out.transpose(1, 2).flatten(2)))

    def heads_of(self, rows: Tensor, first: int = 0) -> Heads:
        """Split projected rows (B, n, channels) of positions from ``first`` on into the parts of their heads.

        With sequence parallelism, the result covers the rows of all processes and the heads of this one. Learned tables
        are not sent.
        """
        division, heads = self.division, self.division.heads(self.heads)
        begin = first + division.positions(rows.shape[1]).start
        if "attention" in self.kinds and (self.rotary is not None or self.normed):
            channels, width = 2 * self.widths["queries"], self.widths["queries"] // self.heads
            table = None if self.rotary is None else self.rotary.table(rows.device)[begin : begin + rows.shape[1]]
            rows = PreparedHeads.apply(rows, channels, width, self.normed, table)
        parts = rows.split(list(self.widths.values()), dim=-1)
        by_head = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        part = dict(zip(self.widths, division.to_heads(*by_head), strict=True))
        place = slice(first, first + part["values"].shape[2])

        def of_all(table: Tensor) -> Tensor:
            table = table.to(rows.dtype).expand(len(rows), -1, -1, -1)
            # Tensor descriptors need non-zero strides. Several kinds are copied by torch.cat anyway.
            return table if len(self.kinds) > 1 else table.contiguous()

        queries: list[Tensor] = []
        keys: list[Tensor] = []
        blocks = places = None
        for kind, share in zip(self.kinds, self.shares(), strict=True):
            if kind == "attention":
                queries.append(part["queries"] * (share * part["queries"].shape[-1] ** -0.5))
                keys.append(part["keys"])
            elif kind == "factorized_random":
                queries.append(of_all(share * self.random_queries[heads, place]))
                keys.append(of_all(self.random_keys[heads, place]))
            elif kind == "dense":
                queries.append(share * part["dense"].relu())
                keys.append(of_all(self.dense_keys[heads, place]))
            elif kind == "factorized_dense":
                blocks = share * (part["blocks"].relu() @ self.block_keys[heads].mT)
                places = part["places"].relu() @ self.place_keys[heads].mT
        q, k = (torch.cat(sides, -1) if len(sides) > 1 else next(iter(sides), None) for sides in (queries, keys))
        return Heads(part["values"], q, k, blocks, places)

    def traffic(self, division: Division, context: int, apart: bool = False) -> Traffic:
        channels = sum(self.widths.values()) + self.network.width
        sent = (division.size - 1) * context // division.size * channels // division.size
        return Traffic("heads", 2 * (division.size > 1), (sent,) * division.size)

    def shares(self) -> Any:
        """Return α of each kind: () tensors, or 1.0 if there is one kind."""
        return [1.0] if self.mixing is None else self.mixing.to(wide_of(self.mixing)).softmax(0).unbind()

    def _weigh(self, head_rows: Heads, keys: Tensor | None, values: Tensor, first: int, heads: slice) -> Tensor:
        """Weigh values for rows from ``first`` on, which read the first m positions: (B, H, n, Dv).

        Args:
            head_rows: of the rows.
            keys, values: (B, H, m, ·).
            first: position of the first row.
            heads: the heads of ``head_rows``.
        """
        rows, reads = head_rows.values.shape[2], values.shape[2]
        place = torch.arange(first, first + rows, device=values.device)
        random = self.random[heads, first : first + rows, :reads] if "random" in self.kinds else None
        allowed = self._allowed(self.patterns[heads], place, reads)
        scores = self._scores(head_rows, keys, random, reads)
        # Not -inf, so that a query without keys gives no NaN; its output becomes 0 below.
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).to(values.dtype)
        if len(weights) == 1 < len(values):  # the same for all contexts: one product
            together = weights[0] @ values.permute(1, 2, 0, 3).flatten(2)
            out = together.unflatten(-1, (len(values), -1)).permute(2, 0, 1, 3)
        else:
            out = weights @ values
        return out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)

    def _scores(self, head_rows: Heads, keys: Tensor | None, random: Tensor | None, reads: int) -> Tensor:
        """Compute scores (B, H, n, m) in fp32 (fp64 for fp64), or (1, H, n, m) if they do not depend on the input.

        Args:
            head_rows: of n rows.
            keys: (B, H, m, D).
            random: rows and columns (H, n, m) of the random table.
            reads: m.
        """
        _, queries, _, blocks, places = head_rows
        wide = wide_of(head_rows.values)
        parts = []
        if random is not None:
            parts.append(random[None].to(wide) * self.shares()[self.kinds.index("random")])
        if queries is not None and keys is not None:
            parts.append(queries.to(wide) @ keys.to(wide).mT)
        if blocks is not None and places is not None:
            some = blocks[..., : -(-reads // places.shape[-1]), None].to(wide)
            parts.append((some * places[..., None, :].to(wide)).flatten(-2)[..., :reads])
        return sum(parts[1:], parts[0])

    def _allowed(self, patterns: tuple[Pattern, ...], queries: Tensor, reads: int) -> Tensor:
        """Return which of the first m positions queries (n,) may read: (H, n, m) bool, or (1, n, m) for all heads."""
        keys = torch.arange(reads, device=queries.device)
        distinct = {pattern: pattern.mask(queries[:, None], keys) for pattern in dict.fromkeys(patterns)}
        return torch.stack([distinct[pattern] for pattern in (patterns if len(distinct) > 1 else patterns[:1])])

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> Rows:
        widths = self.product_width, self.network.width // self.heads
        if self.whole_scores:
            cache = Rows(*(torch.empty(batch, self.heads, length, w, device=device, dtype=dtype) for w in widths))
        else:
            keys, values = (
                empty_cache(batch, self.heads, length, w, self.patterns, device=device, dtype=dtype) for w in widths
            )
            cache = KeyValues(keys, values, self.patterns, self.backend, scale=1.0)
        if self.convolution is not None:
            cache.recent = self.convolution.new_state(batch, length, device, back)
        return cache

    def work(self, positions: int, batch: int) -> Work:
        """Count the projections and the pairs that the patterns allow; all pairs if all scores are computed."""
        pairs = sum(count * num_pairs(pattern, positions) for pattern, count in Counter(self.patterns).items())
        linear = 2 * positions * (self.rows.weight.numel() + self.projection.weight.numel())
        value_width = self.network.width // self.heads
        if self.whole_scores:  # scores are stored for the backward pass, not recomputed
            every = self.heads * positions**2
            if self.blocks:
                linear += 2 * positions * (self.block_keys.numel() + self.place_keys.numel())
            work = Work(pairs, linear + 2 * every * self.product_width, 0, 2 * every * value_width)
        else:
            work = Work(pairs, linear, 2 * pairs * self.product_width, 2 * pairs * value_width)
        return work if self.convolution is None else work + self.convolution.work(positions, batch)

    def weights(self, h: Tensor, context: BlockContext = PLAIN) -> Callable[[Tensor, int], Tensor]:
        head_rows = self.heads_of(self.rows(h if self.convolution is None else self.convolution(h)))
        length = h.shape[1]

        def of_rows(x: Any, head: int, queries: Any = slice(None)) -> Any:
            return None if x is None else x[:, head : head + 1, queries].double()

        def of_head(queries: Tensor, head: int) -> Tensor:
            some = Heads(*(of_rows(x, head, queries) for x in head_rows))
            random = self.random[head : head + 1, queries, :length] if "random" in self.kinds else None
            allowed = self._allowed(self.patterns[head : head + 1], queries, length)[0]
            scores = self._scores(some, of_rows(head_rows.keys, head), random, length)[0, 0]
            weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1)
            return weights.masked_fill(~allowed, 0.0)  # a query without keys has a softmax of NaN

        return of_head
