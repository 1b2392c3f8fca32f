"""Attention to the keys that a learned indexer chooses (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1).

Letters: B batch, H heads of queries, K heads of keys and values, N positions, D head width, J heads of the indexer of
width I, T numbers of chosen blocks, L positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError, attend_listed, empty_cache, selected_attention, sparse_attention
from longstride.kernels.indexed import choose_keys, index_scores, indexed_attention, indexer_loss
from longstride.kernels.patterns import Dense, Local, Pattern
from longstride.kernels.selections import listed_positions, within_documents
from longstride.sparse_model.mixers.attention import NOT_FLEX, Attention, AttentionConfig, KeyValueHeads
from longstride.sparse_model.mixers.cache import KeyValues, Rows
from longstride.sparse_model.mixers.moba import pairs_of_head
from longstride.sparse_model.mixers.routing import LocalHeads
from longstride.sparse_model.network import POSITIVE, NetworkConfig
from longstride.sparse_model.part import PLAIN, BlockContext, HeadWidths, MixerOutput, Part, Work, draw_linear
from longstride.sparse_model.rotary import PreparedHeads, Rotary
from longstride.sparse_model.strict import StrictModel

MEASURED_QUERIES = 64
HeadRows: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, k and v of some heads


class IndexedConfig(AttentionConfig, StrictModel):
    """Attention to the keys with the highest scores of a learned indexer, and to the last ones."""

    supports: ClassVar = frozenset({"convolution", "documents", "output_gate", "padding", "reversible"})

    type: Literal["indexed"] = Field(description="attention to the keys that a learned indexer chooses")
    keys: Annotated[int, POSITIVE] = Field(
        description="keys that a query reads at most, the window counted; from context on it is dense attention"
    )
    block: Annotated[int, POSITIVE] = Field(
        default=1, description="positions that are chosen together, by their highest score; divides keys"
    )
    window: Annotated[int, POSITIVE] = Field(
        default=1, description="last positions, the query's own counted, that it reads always"
    )
    local: LocalHeads | None = Field(
        default=None, description="heads that read the last positions alone; null: the indexer chooses for all"
    )
    index_heads: Annotated[int, POSITIVE] = Field(default=4, description="heads of the indexer")
    index_width: Annotated[int, POSITIVE] = Field(default=32, description="channels of each; even with rotary")
    loss_weight: float = Field(default=1.0, ge=0, description="factor of the indexer's loss; 0: it does not learn")
    key_value_heads: KeyValueHeads = None

    def check(self, network: NetworkConfig, context: int) -> None:
        super().check(network, context)
        if self.keys % self.block:
            nearest = max(1, round(self.keys / self.block)) * self.block
            raise ConfigError.at("keys", self.keys, f"must be a multiple of block={self.block}; nearest {nearest}")
        blocks = 1 + -(-(self.window - 1) // self.block)
        if blocks * self.block > self.keys:
            rule = f"may lie in {blocks} blocks, of {blocks * self.block} positions; take keys of at least that many"
            raise ConfigError.at("window", self.window, rule)
        local, group = self.local, network.heads // (self.key_value_heads or network.heads)
        most = network.heads - group
        if local is not None and (local.heads > most or local.heads % group):
            rule = f"must be below heads={network.heads}, as the indexer chooses for some heads"
            if group > 1:
                rule = f"must be a multiple of {group}, as so many heads share keys, below heads={network.heads}"
            nearest = min(most, max(1, round(local.heads / group)) * group)
            advice = f"nearest {nearest}" if most else "remove local"
            raise ConfigError.at("local.heads", local.heads, f"{rule}; {advice}")
        if network.rotary is not None and self.index_width % 2:
            raise ConfigError.at("index_width", self.index_width, f"must be even; nearest {self.index_width + 1}")
        if network.backend == "flex":
            raise ConfigError.at("type", self.type, NOT_FLEX)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return () if self.local is None else (Local(self.local.window),) * self.local.heads

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        return super().head_widths(network)._replace(extra_cached=self.index_width)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> IndexedAttention:
        return IndexedAttention(network, self, rotary)


class Index(NamedTuple):
    """The projections of an indexer for rows at n positions."""

    q: Tensor  # (B, n, J, I)
    k: Tensor  # (B, n, I)
    weights: Tensor  # (B, n, J)


class Indexer(Part):
    """Scores each key of a query by Σ_j w_j · ReLU(q_j · k), with one k a position (equation 1).

    q and k are rotated by their positions if those of attention are. The weights are linear in the row, and scaled by
    1/√(J · I). Rows are detached: the network learns nothing from the indexer's loss.
    """

    part, learns_apart = "indexer", True

    def __init__(self, network: NetworkConfig, config: IndexedConfig) -> None:
        super().__init__()
        self.network, self.heads, self.width = network, config.index_heads, config.index_width
        widths = (self.heads * self.width, self.width, self.heads)
        self.projection = nn.Linear(network.width, sum(widths), bias=False)
        self.stacked_rows = {"projection": widths}
        self.rotary = None
        if network.rotary is not None:
            self.rotary = Rotary(network.context, self.width, network.rotary.base)

    def initialize(self) -> None:
        draw_linear(self.projection, self.network)

    def forward(self, h: Tensor, places: Tensor | slice) -> Index:
        """Score rows (B, N, C) at these positions, a slice or (B, N)."""
        rows: Tensor = self.projection(h.detach())
        channels = rows.shape[-1] - self.heads
        if self.rotary is not None:
            table = self.rotary.table(rows.device)[places]
            rows = PreparedHeads.apply(rows, channels, self.width, False, table)
        q, k, weights = rows.split(self.stacked_rows["projection"], -1)
        return Index(q.unflatten(-1, (self.heads, -1)), k, weights * (self.heads * self.width) ** -0.5)


class IndexedAttention(Attention):
    """Attention of a query to the blocks that its indexer scores highest, up to its own position.

    The first heads may read a window instead; then they have no part in the choice, in the loss or in measures.

    The choice has no gradient. In training the loss is the Kullback-Leibler divergence of the indexer's softmax over
    the keys that are read from the attention weights, averaged over heads; only the indexer has its gradient. The
    backward pass, and a block that is recomputed, repeat the choice exactly: the same operations on the same rows.
    """

    def __init__(self, network: NetworkConfig, config: IndexedConfig, rotary: Rotary | None) -> None:
        patterns = config.head_patterns(network)
        super().__init__(network, patterns, rotary, key_value_heads=config.key_value_heads)
        self.config, self.local = config, len(patterns)
        self.indexer = Indexer(network, config)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        state: Any = context.state
        first, places = context.first, context.places
        if self.convolution is not None:
            h = self.convolution(h, None if state is None else state.recent, first, places)
        positions = slice(first, first + h.shape[1]) if places is None else places
        q, k, v = self.heads_of(self.query_key_value(h), positions)
        index = self.indexer(h, positions)
        loss = None
        if state is not None:
            rows = state.extend(q, k, v, index, first)
        else:
            starts = None if places is None else torch.arange(h.shape[1], device=h.device) - places
            local, (q, k, v) = self.by_choice(q, k, v)
            rows, loss = self.attend_chosen(q, k, v, index, starts, context.real)
            if self.local:
                rows = torch.cat([self.attend_in(context, *local, slice(self.local)).rows, rows], 1)
            if not self.training and self.measures == {}:
                self.measures |= self.measure_choice(q, k, index, starts, context.real)
        return MixerOutput(self._project(rows.transpose(1, 2).flatten(2), h), loss)

    def by_choice(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[HeadRows, HeadRows]:
        """Split q (B, H, …), k and v (B, K, …) into those of local heads and those of the others."""
        heads, shared = self.local, self.local // self.group
        return (q[:, :heads], k[:, :shared], v[:, :shared]), (q[:, heads:], k[:, shared:], v[:, shared:])

    def attend_chosen(
        self, q: Tensor, k: Tensor, v: Tensor, index: Index, starts: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in heads that are not local: rows (B, h, N, Dv), and in training the loss of the indexer."""
        loss, backend, learns = None, self.backend, self.training and self.config.loss_weight > 0
        if q.shape[2] <= self.config.keys:
            patterns = (Dense(),) * q.shape[1]
            if starts is None:
                rows = sparse_attention(q, k, v, patterns, backend=backend)
            else:
                rows = selected_attention(q, k, v, within_documents(patterns, starts), backend=backend)
            if learns:
                loss = indexer_loss(*index, (q, k), starts=starts, real=real)
        else:
            numbers, block = self.choose(index, starts), self.config.block if starts is None else 1
            rows = indexed_attention(q, k, v, numbers, block=block, backend=backend, return_weights=learns)
            if learns:
                rows, weights = rows
                loss = indexer_loss(*index, (q, k), numbers=numbers, block=block, target=weights, real=real)
        return rows, None if loss is None else loss.float() * self.config.loss_weight

    def choose(self, index: Index, starts: Tensor | None = None, first: int = 0) -> Tensor:
        """Return the blocks (B, n, T) that queries from position ``first`` on read, as ``choose_keys`` does."""
        config = self.config
        count = config.keys // config.block
        return choose_keys(
            *index, count=count, block=config.block, window=config.window, starts=starts, backend=self.backend,
            first=first,
        )  # fmt: skip

    def new_cache(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Any:
        heads = self.local // self.group

        def empty(heads: int, patterns: Any) -> tuple[Tensor, Tensor]:
            keys, values = (
                empty_cache(batch, heads, length, width // self.key_value_heads, patterns, device=device, dtype=dtype)
                for width in self.widths[-2:]
            )
            return keys, values

        local = KeyValues(*empty(heads, self.patterns), self.patterns, self.backend) if self.local else None
        return IndexedCache(self, *empty(self.key_value_heads - heads, Dense()), local)

    def num_pairs(self, positions: int) -> int:
        """Count the pairs, which do not depend on the choice: a query with fewer keys before it reads all of them."""
        pairs = pairs_of_head(positions, self.config.block, self.config.keys // self.config.block)
        return super().num_pairs(positions) + (self.heads - self.local) * pairs

    def work(self, positions: int, batch: int) -> Work:
        indexer = self.indexer
        scores = positions * (positions + 1) // 2 * indexer.heads * 2 * (indexer.width + 1)
        linear = 2 * positions * indexer.projection.weight.numel()
        return super().work(positions, batch) + Work(linear=linear, choosing=scores)

    def reads(self, h: Tensor, head: int, context: BlockContext = PLAIN) -> Callable[[Tensor], Tensor]:
        if head < self.local:
            return super().reads(h, head, context)
        length, places = h.shape[1], context.places
        if self.convolution is not None:
            h = self.convolution(h, places=places)
        index = self.indexer(h, slice(length) if places is None else places)
        starts = None if places is None else torch.arange(length, device=h.device) - places

        def of_queries(queries: Tensor) -> Tensor:
            mask = torch.zeros(len(queries), length, dtype=torch.bool, device=h.device)
            for row, query in zip(mask, queries.tolist(), strict=True):
                row[self._keys_of(index, 0, query, starts)] = True
            return mask

        return of_queries

    def _keys_of(self, index: Index, entry: int, query: int, starts: Tensor | None) -> Tensor:
        """Return the positions (T,) that the query at one position of a context reads."""
        row = slice(query, query + 1)
        contexts = slice(entry, entry + 1)
        alone = Index(index.q[contexts, row], index.k[contexts, : query + 1], index.weights[contexts, row])
        numbers = self.choose(alone, None if starts is None else starts[contexts, row], first=query)
        block = self.config.block if starts is None else 1
        keys = listed_positions(numbers, block, torch.full((1, 1), query, device=numbers.device))[0, 0]
        return keys[keys >= 0]

    @torch.no_grad()
    def measure_choice(
        self, q: Tensor, k: Tensor, index: Index, starts: Tensor | None, real: Tensor | None
    ) -> dict[str, float]:
        """Measure what queries choose that cannot read all their keys, at evenly spaced ones of them.

        Returns:
            "indexer_kl": the indexer's loss in nats. "indexer_mass": the share of dense attention's weights on the
            chosen keys. Empty if each query reads all its keys.
        """
        counts = torch.arange(1, q.shape[2] + 1, device=q.device).expand(len(q), -1)
        chooses = (counts if starts is None else counts - starts) > self.config.keys
        found = (chooses if real is None else chooses & real).nonzero()
        spaced = torch.linspace(0, len(found) - 1, min(len(found), MEASURED_QUERIES)).round().long()
        measured = []
        for entry, query in found[spaced.to(q.device)].tolist():
            keys = self._keys_of(index, entry, query, starts)
            start = 0 if starts is None else int(starts[entry, query])
            queries = q[entry, :, query].float().view(k.shape[1], self.group, -1)
            scores = (queries @ k[entry, :, start : query + 1].float().mT).flatten(0, 1) * q.shape[-1] ** -0.5
            mass = scores.softmax(-1)[:, keys - start].sum(-1).mean()
            target = scores[:, keys - start].softmax(-1).mean(0)
            row = slice(query, query + 1)
            of_index = index_scores(index.q[entry, row], index.k[entry, : query + 1], index.weights[entry, row], query)
            measured.append(torch.stack([F.kl_div(of_index[0, keys].log_softmax(-1), target, reduction="sum"), mass]))
        if not measured:
            return {}
        divergence, mass = torch.stack(measured).mean(0).tolist()
        return {"indexer_kl": divergence, "indexer_mass": mass}


class IndexedCache(Rows):
    """A cache of keys and values, and of the indexer's keys; local heads have one of their own."""

    def __init__(self, owner: IndexedAttention, keys: Tensor, values: Tensor, local: KeyValues | None) -> None:
        super().__init__(keys, values)
        self.owner, self.local = owner, local
        self.index_keys = keys.new_empty(len(keys), keys.shape[2], owner.indexer.width)

    def extend(self, q: Tensor, k: Tensor, v: Tensor, index: Index, first: int) -> Tensor:
        """Write n rows from position ``first`` on, (B, K, n, ·), and return their outputs, (B, H, n, Dv)."""
        owner, last, rows = self.owner, first + q.shape[2], []
        local, (q, k, v) = owner.by_choice(q, k, v)
        if self.local is not None:
            rows.append(self.local.extend(*local, first) if first else self.local.begin(*local))
        self.write(slice(first, last), k, v)
        self.index_keys[:, first:last] = index.k
        if first:
            numbers = owner.choose(index._replace(k=self.index_keys[:, :last]), first=first)
            query = torch.arange(first, last, device=q.device)
            places = listed_positions(numbers, owner.config.block, query)[:, None].expand(-1, q.shape[1], -1, -1)
            steps = [attend_listed(q[:, :, n], self.keys, self.values, places[:, :, n]) for n in range(q.shape[2])]
            rows.append(torch.stack(steps, 2))
        else:
            rows.append(owner.attend_chosen(q, k, v, index)[0])
        return torch.cat(rows, 1)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        super().take(source, order, length, into)
        self.index_keys[into, :length] = source.index_keys[order, :length]
        if self.local is not None:
            self.local.take(source.local, order, length, into)
