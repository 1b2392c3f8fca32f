"""From tokens to the rows that enter the residual blocks. Letters: B batch, N positions, C width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.ngrams import NO_TOKEN, Ngrams
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.part import Part, draw

Index = TypeVar("Index", int, Tensor)  # one position, or many


class Embedding(Part):
    """Token embedding plus one embedding for each position table, shifted right (section 5.1; released code).

    With ``ngrams``, tables of the last tokens are added as well. With ``embedding_norm``, the sum is normalised. If the
    objective is not causal, nothing is shifted, and there is no start.
    """

    part = "embedding"
    start: nn.Parameter  # (C,), the row before the first token; None if the objective is not causal

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary + config.objective.mask_rows, config.width)
        self.sizes = config.embedding.table_sizes(config.context)
        self.positions = nn.ModuleList(nn.Embedding(size, config.width) for size in self.sizes)
        start = nn.Parameter(torch.empty(config.width)) if config.objective.causal else None
        self.register_parameter("start", start)
        self.ngrams: Ngrams | None = None
        if config.ngrams is not None:
            self.ngrams = Ngrams(config.ngrams.orders, config.ngrams.rows, config.vocabulary, config.width)
        self.norm: nn.Module = norm_of(config) if config.embedding_norm else nn.Identity()
        self.reach = config.reach

    def initialize(self) -> None:
        """Set the tables.

        The terms of a row are scaled so that their sum has the stream's size; n-gram tables begin at 0.
        """
        if self.config.objective.causal:
            draw(self.start, self.config, self.config.width)
        draw(self.tokens.weight, self.config, self.config.width)
        for table in self.positions:
            assert isinstance(table, nn.Embedding)
            draw(table.weight, self.config, self.config.width * len(self.positions))

    def forward(
        self,
        tokens: Tensor,
        places: Tensor | None = None,
        embedded: Tensor | None = None,
        real: Tensor | None = None,
        last: Tensor | None = None,
    ) -> Tensor:
        """Embed tokens (B, N), integers of any type, to (B, N, C): row i holds token i - 1 and position i.

        If the objective is not causal, row i holds token i, where the vocabulary's size stands for a masked token.

        Args:
            tokens: (B, N). With sequence parallelism, only the rows of this process's section are returned.
            places: (B, N), each position's place in its document. Positions then count from its first one, and earlier
                tokens do not exist.
            embedded: (B, N - 1, C), replaces the rows of the token table; only without sequence parallelism and for
                causal objectives.
            real: (B, N) bool, False where a row is padding.
            last: (B, ``reach``) integers, the tokens before the context, each plus 1; 0: there was none.
        """
        section = self.division.section(tokens.shape[1])
        positions = torch.arange(section.start, section.stop, device=tokens.device)
        places = None if places is None else places[:, section]
        if self.config.objective.causal:
            h = self._shifted(tokens, section, places, embedded, None if real is None else real[:, section], last)
        else:
            inputs = tokens[:, section].long()
            if self.config.objective.mask_rows:
                h = self.tokens(inputs)
            else:
                masked = inputs == self.config.vocabulary
                h = self.tokens(inputs.masked_fill(masked, 0)).masked_fill(masked[..., None], 0.0)
        for table, index in self._places(positions if places is None else places):
            h = h + table(index)
        rows: Tensor = self.norm(h)
        return rows

    def _shifted(
        self,
        tokens: Tensor,
        section: slice,
        places: Tensor | None,
        embedded: Tensor | None,
        real: Tensor | None,
        last: Tensor | None,
    ) -> Tensor:
        """Return a section's rows without positions; ``places`` and ``real`` are the section's."""
        before = tokens[:, max(0, section.start - self.reach) : section.stop - 1].long()
        before = F.pad(before, (section.stop - section.start + self.reach - 1 - before.shape[1], 0), value=NO_TOKEN)
        if self.division.size == 1:
            start = self.start.expand(tokens.shape[0], 1, -1)
            h = torch.cat([start, self.tokens(before[:, self.reach :]) if embedded is None else embedded], dim=1)
        else:  # the start has a gradient on every process
            previous = before[:, self.reach - 1 :]
            positions = torch.arange(section.start, section.stop, device=tokens.device)
            h = torch.where((positions == 0)[:, None], self.start, self.tokens(previous.clamp_min(0)))
        if places is not None:
            h = torch.where((places == 0)[..., None], self.start, h)
        if last is not None:  # sections are not divided
            before = torch.cat([last.long() - 1, before[:, self.reach :]], 1)
            goes_on = last[:, -1:] > 0
            first = torch.where(goes_on[..., None], self.tokens(before[:, None, self.reach - 1].clamp_min(0)), h[:, :1])
            h = torch.cat([first, h[:, 1:]], 1)
            if places is not None:  # the first document's n-grams reach back
                places = places + self.reach * (goes_on & (places == torch.arange(places.shape[1], device=h.device)))
        if self.ngrams is not None:
            h = self.ngrams(h, before, places, real)
        return h

    def rows(self, before: Tensor, first: int, goes_on: bool = False) -> Tensor:
        """Compute rows ``first`` to ``first + n - 1`` of ``forward``, (B, n, C), from the tokens before them.

        ``before``: (B, ``reach`` + n - 1) int64, the newest last; ``NO_TOKEN`` before the beginning. n is 1 if
        ``first`` is 0 and the contexts do not go on from others.
        """
        has_tokens = first or goes_on
        h = self.tokens(before[:, self.reach - 1 :]) if has_tokens else self.start.expand(len(before), 1, -1)
        if self.ngrams is not None:
            h = self.ngrams(h, before)
        # A number for a single row, which takes fewer operations.
        index: Any = first if h.shape[1] == 1 else torch.arange(first, first + h.shape[1], device=before.device)
        for table, place in self._places(index):
            h = h + table.weight[place]
        rows: Tensor = self.norm(h)
        return rows

    def _places(self, index: Index) -> Iterator[tuple[nn.Embedding, Index]]:
        """Yield each position table with the index of the positions in it."""
        # Mixed radix, last table fastest: row-major (row, column[, channel]).
        for size, table in reversed(list(zip(self.sizes, self.positions, strict=True))):
            assert isinstance(table, nn.Embedding)
            yield table, index % size
            index = index // size
