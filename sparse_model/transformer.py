"""The Sparse Transformer from tokens to logits (Child et al. 2019, section 5), and its initial values.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.kernels.selections import Selection, within_documents
from longstride.sparse_model.config import BlockConfig, ModelConfig
from longstride.sparse_model.division import Division
from longstride.sparse_model.documents import Documents, places_of
from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.output import Logits
from longstride.sparse_model.part import Mixed, State, Work, joined
from longstride.sparse_model.reversible import OnGrid, RandomStates, Reversible, closed, opened
from longstride.sparse_model.rotary import Rotary


class Role(NamedTuple):
    """What an optimiser has to know of a parameter."""

    part: str  # of the network: matrices, embeddings, vectors or output
    rows: tuple[int, ...] = ()  # of the matrices that lie below each other in it; none: it is one


class SparseTransformer(nn.Module):
    """A deep pre-activation residual network whose blocks attend over patterns (Child et al. 2019, section 5)."""

    def __init__(
        self, config: ModelConfig, blocks: Sequence[BlockConfig] | None = None, initialize: bool = True
    ) -> None:
        """Of a configuration.

        Args:
            config: of the network.
            blocks: of these alone in place of its own, for counting.
            initialize: whether to set first values; otherwise anything may be there, until weights are loaded.
        """
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        rotary = Rotary.of(config)
        made = config.blocks() if blocks is None else blocks
        kind = ReversibleBlock if config.reversible else ResidualBlock
        self.blocks = nn.ModuleList(kind(config, block, rotary) for block in made)
        self.norm = norm_of(config)
        self.logits = Logits(config.width, config.vocabulary, bias=False)
        # Where set, called as (block, h, …) in place of each block, to recompute activations in the backward pass.
        self.activation_checkpoint: Callable[..., Any] | None = None
        self.division = Division()
        self._kept_apart = False  # whether documents are, by all mixers: once it is known
        for module in self.modules() if initialize else ():  # once all is made: published models keep their draws
            if (set_values := getattr(module, "initialize", None)) is not None:
                set_values()

    @staticmethod
    def num_parameters(config: ModelConfig) -> int:
        """Parameters of the model of a configuration, without allocating it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in SparseTransformer(config).parameters())

    @staticmethod
    def of_each_kind(config: ModelConfig) -> tuple[SparseTransformer, dict[BlockConfig, int]]:
        """The model with one block of each kind, in the order of the first of them, and how many there are of each.

        It has shapes, and neither memory nor values: on torch's meta device. However many layers a configuration asks
        for, it is made in a moment.

        Raises:
            ConfigError: a tensor has more bytes than can be counted.
        """
        kinds = Counter(config.blocks())
        try:
            with torch.device("meta"):
                return SparseTransformer(config, list(kinds), initialize=False), dict(kinds)
        except RuntimeError as error:  # of torch, which multiplies sizes in 64 bits
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"is larger than any machine can hold; give smaller sizes: {what}") from None

    def divide(self, division: Division) -> None:
        """Have this process compute its section of every context alone, together with the others of its group."""
        parts: list[Any] = [module for module in self.modules() if hasattr(module, "division")]
        for part in parts:
            part.division = division

    def parameter_roles(self) -> dict[str, Role]:
        """The role of each parameter by name, in the order of ``named_parameters``.

        A module whose parameters are of another part than their kind says has an attribute ``trained_as``; one with
        matrices stacked in a linear layer, their rows by the layer's name as ``stacked_rows``.
        """
        modules, roles = dict(self.named_modules()), {}
        for name, parameter in self.named_parameters():
            path, _, kind = name.rpartition(".")
            above, _, layer = path.rpartition(".")
            owner = modules[path]
            # Under ZeRO 3 a parameter at rest is empty; ds_shape is what it was.
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2:
                part = "vectors"
            else:
                part = getattr(owner, "trained_as", "embeddings" if isinstance(owner, nn.Embedding) else "matrices")
            stacked = getattr(modules[above], "stacked_rows", {}) if kind == "weight" else {}
            roles[name] = Role(part, tuple(stacked.get(layer, ())))
        return roles

    def forward(
        self,
        tokens: Tensor,
        return_nats: bool = False,
        return_mixed: bool = False,
        begins: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Any:
        """Row i predicts tokens[:, i] from tokens[:, :i], or with ``begins`` from those of them in its document.

        Args:
            tokens: (B, N) integers of any type, N at most the configured context; the last one is a target only.
                As bytes, they reach a device with an eighth of the traffic of int64.
            return_nats: return each token's cross-entropy instead of the logits, which are then never in memory whole.
            return_mixed: return what the parts give beside rows too, as training needs it.
            begins: (B, N) bool, True on the first token of each document; position 0 begins one in any case. Each
                document is then computed as in a context of its own.
            real: (B, N) bool, False where a token is padding, behind all others of its context; None: all are real.
                Padding has no nats, counts in no average, statistics or capacity, and gives no gradient.

        Returns:
            Logits (B, N, V), or nats (B, N) in fp32, 0 of padding; with ``return_mixed`` these as the rows of a
            ``Mixed``, with the sum of the auxiliary losses, if any part has one, and the statistics for each of
            ``observers``. Of a model that is divided, rows of this process's section alone. It looks at those tokens,
            and at as many before them as the embedding's ``reach``. Auxiliary losses are of whole contexts; statistics
            add up over processes.

        Raises:
            ValueError: tokens are not (B, N) with 1 to ``context`` positions, or the division does not divide them.
            ConfigError: ``begins`` is given, and a mixer reads whole contexts (``ModelConfig.check_documents``).
        """
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be (B, N) with N from 1 to {self.config.context}")
        places = None if begins is None else places_of(begins)
        more, own = self.beside(tokens.shape[1], places, real), self.division.section(tokens.shape[1])
        stream, columns = self.residual(
            lambda: self.embedding(tokens, places, real=real), more, self.activation_checkpoint
        )
        if return_nats:  # targets and nats travel, which are less than rows
            rows = self.norm(stream.rows)
            targets = self.division.divided_anew(tokens[:, own, None], 0, columns)[..., 0].long()
            nats = self.logits(rows, targets)
            scored = self.division.divided_anew(nats[..., None], columns, 0)[..., 0]
            if real is not None:
                scored = scored.where(real[:, own], 0.0)
        else:
            scored = self.logits(self.norm(self.division.divided_anew(stream.rows, columns, 0)))
        return stream._replace(rows=scored) if return_mixed else scored

    def residual(
        self,
        embedded: Callable[[], Tensor],
        more: Sequence[tuple[Any, ...]],
        recompute: Callable[..., Any] | None = None,
    ) -> tuple[Mixed, int]:
        """All residual blocks as training has them, before the last norm.

        Args:
            embedded: returns (B, N, C), embedded positions. It is no tensor, as Python 3.10 would keep that until this
                call ends, and where blocks' inputs are on the host nothing else needs it.
            more: what each block takes beside its rows, as ``beside`` gives it.
            recompute: called as (block, rows, …) in place of each block.

        Returns:
            Rows (B, N, C) with what the parts give beside them, and the stride of the columns by which these rows are
            divided; 0: by sections.
        """
        if self.config.reversible and recompute is None and torch.is_grad_enabled():
            rows, auxiliary, *statistics = Reversible.apply(embedded(), self.blocks, more)
            return Mixed(rows, auxiliary, tuple(statistics)), 0
        columns, stream = 0, Mixed(embedded())
        dtype = stream.rows.dtype
        if self.config.reversible:
            stream = Mixed(opened(stream.rows))
        for block, rest in zip(self.blocks, more, strict=True):
            wanted = rest[3] if len(rest) > 3 else 0
            rows, columns = self.division.divided_anew(stream.rows, columns, wanted), wanted
            given = block(rows, *rest) if recompute is None else recompute(block, rows, *rest)
            # Torch's recomputation makes a plain tuple of it.
            stream = joined(stream, Mixed(*given) if isinstance(given, tuple) else given)
        if self.config.reversible:
            stream = stream._replace(rows=closed(stream.rows, dtype))
        return stream, columns

    def beside(self, context: int, places: Tensor | None = None, real: Tensor | None = None) -> list[tuple[Any, ...]]:
        """Extra inputs for each block in training: no state, first position, ``Documents``, columns and real rows.

        A block whose extra inputs are all defaults has none.

        Args:
            context: N.
            places: (B, N), the place of each position in its document, where documents are kept apart.
            real: (B, N) bool, False where a row is padding; None: all are real.

        Raises:
            ConfigError: as ``ModelConfig.check_documents`` does.
        """
        more: list[tuple[Any, ...]] = []
        mixer: Any
        if places is None:
            columns = 0
            for block in self.blocks if self.division.size > 1 else ():
                mixer = block.attention
                if self.config.reversible or getattr(block.feed_forward, "in_sections", False):
                    columns = 0
                elif mixer is not None:
                    columns = mixer.columns(context) if hasattr(mixer, "columns") else 0
                more.append((None, 0, None, columns, real) if columns or real is not None else ())
            return more or [() if real is None else (None, 0, None, 0, real)] * len(self.blocks)
        if not self._kept_apart:
            self.config.check_documents()
            self._kept_apart = True
        starts = torch.arange(places.shape[1], device=places.device) - places
        own = places[:, self.division.section(places.shape[1])]
        known: dict[tuple[Pattern, ...], Selection] = {}  # layers of the same patterns share theirs
        for block in self.blocks:
            mixer = block.attention
            if mixer is not None and mixer.patterns not in known:
                known[mixer.patterns] = within_documents(mixer.patterns, starts)
            more.append((None, 0, Documents(own, None if mixer is None else known[mixer.patterns]), 0, real))
        return more

    @property
    def observers(self) -> list[Any]:
        """The parts that give statistics in training, and ``observe`` their sums; in the order of the statistics."""
        return [module for module in self.modules() if hasattr(module, "observe")]

    @property
    def mixers(self) -> list[Any]:
        """The mixers of all blocks that have one, in their order."""
        return [block.attention for block in self.blocks if block.attention is not None]

    def new_states(
        self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int | None = None
    ) -> list[State | None]:
        """What each block keeps of contexts of up to ``length`` positions, empty; None where it has no mixer.

        ``back``: how many positions may be forgotten again, beside all; None: any number.

        Raises:
            ConfigError: the model's backend cannot run here.
        """
        room = batch, length, device, dtype, length if back is None else back
        mixers: Any = [block.attention for block in self.blocks]
        return [None if mixer is None else mixer.new_state(*room) for mixer in mixers]

    def through(self, h: Tensor, states: Sequence[State | None], first: int) -> Tensor:
        """All residual blocks, for positions after those in the states.

        Args:
            h: (B, n, C), embedded positions from ``first`` on.
            states: one a block; rows before ``first`` are read, those of ``h`` are written.
            first: position of the first row of ``h``.

        Returns:
            (B, n, C), as in ``forward`` before the last norm.
        """
        rows = opened(h) if self.config.reversible else h
        for block, state in zip(self.blocks, states, strict=True):
            given = block(rows, state, first)
            rows = given.rows if isinstance(given, Mixed) else given
        return closed(rows, h.dtype) if self.config.reversible else rows


class ResidualBlock(nn.Module):
    """H + a + b with a = dropout(attention(norm(H))) and b = dropout(ff(norm(H + a))) (section 5.2), or one of them.

    ``attention`` is the mixer, whichever it is, so that published models have the names of their tensors.
    """

    def __init__(self, config: ModelConfig, block: BlockConfig, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention = self.feed_forward = None
        if block.mixer is not None:
            self.attention_norm = norm_of(config)
            self.attention = block.mixer.make(config, rotary)
        if block.feed_forward is not None:
            self.feed_forward_norm = norm_of(config)
            self.feed_forward = block.feed_forward.make(config)
        self.dropout = nn.Dropout(config.dropout)
        self.division: Division | None = None  # where set, what is dropped goes by positions

    def forward(
        self,
        h: Tensor,
        state: State | None = None,
        first: int = 0,
        documents: Documents | None = None,
        columns: int = 0,
        real: Tensor | None = None,
    ) -> Tensor | Mixed:
        """(B, N, C) to (B, N, C), with what the parts have to tell beside that, if they have.

        With a state: one position, which reads the kept ones too, or the first N. With documents: none sees another.
        With columns: rows are those of this process's columns of that stride. ``real`` is that of whole contexts.
        """
        more: list[Mixed] = []
        if self.attention is not None:
            h = h + _rows(self.mix(h, state, first, documents, columns, real), more)
        if self.feed_forward is not None:
            h = h + _rows(self.feed(h, columns, real), more)
        return functools.reduce(joined, more)._replace(rows=h) if more else h

    def mix(
        self,
        h: Tensor,
        state: State | None = None,
        first: int = 0,
        documents: Documents | None = None,
        columns: int = 0,
        real: Tensor | None = None,
    ) -> Tensor | Mixed:
        """What the mixer adds to a stream, (B, N, C) as it reads it."""
        assert self.attention is not None
        rest: tuple[Any, ...] = (state, first) if documents is None else (state, first, documents)
        if columns:
            rest = (state, first, documents, columns)
        mask = {} if real is None else {"real": real}
        return self._dropped(self.attention(self.attention_norm(h), *rest, **mask), columns)

    def feed(self, h: Tensor, columns: int = 0, real: Tensor | None = None) -> Tensor | Mixed:
        """What the feed-forward adds to a stream, (B, N, C) as it reads it."""
        assert self.feed_forward is not None
        rows = self.feed_forward_norm(h)
        if real is None:
            return self._dropped(self.feed_forward(rows), columns)
        if self.division is not None:
            real = real[:, self.division.positions_of(h.shape[1], columns, h.device)]
        return self._dropped(self.feed_forward(rows, real), columns)

    def work(self, positions: int, batch: int) -> Work:
        """Of all sub-layers."""
        parts: list[Any] = [part for part in (self.attention, self.feed_forward) if part is not None]
        return sum((part.work(positions, batch) for part in parts), Work())

    def _dropped(self, given: Tensor | Mixed, columns: int = 0) -> Tensor | Mixed:
        # Tested here and not in the module: for a single row, calling it takes longer than an addition.
        if not self.dropout.training:
            return given
        dropout: Callable[[Tensor], Tensor] = self.dropout
        if self.division is not None and self.dropout.p:
            dropout = functools.partial(self.division.drop, share=self.dropout.p, columns=columns)
        return given._replace(rows=dropout(given.rows)) if isinstance(given, Mixed) else dropout(given)


class ReversibleBlock(ResidualBlock):
    """The same parts on two streams: (a, b) becomes (b, a + f(b)), for f the mixer and then the feed-forward."""

    def forward(
        self,
        h: Tensor,
        state: State | None = None,
        first: int = 0,
        documents: Documents | None = None,
        columns: int = 0,
        real: Tensor | None = None,
        starts: list[RandomStates] | None = None,
    ) -> Tensor | Mixed:
        """Streams (2, B, N, C) to such, as ``reversible`` has them; ``starts`` gets what each part draws from."""
        assert not columns, "streams are divided by sections"
        before, written = h.unbind()
        more: list[Mixed] = []
        for sublayer in self.sublayers(state, first, documents, columns, real):
            if starts is not None:
                starts.append(RandomStates.now(h))
            rows = _rows(sublayer(written.to(self._dtype)), more)
            before, written = written, before + OnGrid.apply(rows)
        h = torch.stack([before, written])
        return functools.reduce(joined, more)._replace(rows=h) if more else h

    def sublayers(
        self,
        state: State | None = None,
        first: int = 0,
        documents: Documents | None = None,
        columns: int = 0,
        real: Tensor | None = None,
    ) -> list[Callable[[Tensor], Tensor | Mixed]]:
        """In their order, each from a stream (B, N, C) to what is added to the other."""
        found: list[Callable[[Tensor], Tensor | Mixed]] = []
        if self.attention is not None:
            found.append(functools.partial(self.mix, state=state, first=first, documents=documents, real=real))
        return found if self.feed_forward is None else [*found, functools.partial(self.feed, real=real)]

    @property
    def _dtype(self) -> torch.dtype:
        norm: Any = self.feed_forward_norm if self.attention is None else self.attention_norm
        dtype: torch.dtype = norm.weight.dtype
        return dtype


def _rows(given: Tensor | Mixed, more: list[Mixed]) -> Tensor:
    """What is added to the stream, of what a part gives; the whole goes to ``more``, if it is more."""
    if isinstance(given, Mixed):
        more.append(given)
        return given.rows
    return given
