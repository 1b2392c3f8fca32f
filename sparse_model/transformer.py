"""The Sparse Transformer from tokens to logits (Child et al. 2019, section 5).

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longstride.kernels import ConfigError
from longstride.kernels.selections import Selection
from longstride.sparse_model.block import ResidualBlock, Reversible, ReversibleBlock, closed, opened
from longstride.sparse_model.config import BlockConfig, ModelConfig
from longstride.sparse_model.embedding import Embedding
from longstride.sparse_model.norm import norm_of
from longstride.sparse_model.objectives import Layout
from longstride.sparse_model.output import ClassLogits, Logits
from longstride.sparse_model.part import BlockContext, Carried, Mixer, MixerOutput, Part, State, Work, places_of
from longstride.sparse_model.rotary import Rotary

# Called as (block, rows, context) in place of a block, or as (block, rows, context, shared) if layers share parameters;
# returns the block's output, or its fields as a plain tuple.
Recompute = Callable[..., Sequence[Any]]


class Role(NamedTuple):
    """How an optimiser treats a parameter."""

    part: str  # of the network: matrices, embeddings, vectors or output
    rows: tuple[int, ...] = ()  # of the matrices that lie below each other in it; none: it is one


class SparseTransformer(Part):
    """A deep pre-activation residual network whose blocks attend over patterns (Child et al. 2019, section 5)."""

    shared: Part | None

    def __init__(
        self, config: ModelConfig, blocks: Sequence[BlockConfig] | None = None, initialize: bool = True
    ) -> None:
        """Make the network of a configuration.

        Args:
            config: the configuration.
            blocks: use these blocks instead of the configuration's, for counting.
            initialize: whether to set first values. Otherwise parameters are uninitialised until weights are loaded.
        """
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        mixers = dict.fromkeys(block.mixer for block in config.blocks() if block.mixer is not None)
        self.shared = next(filter(None, (mixer.make_shared(config) for mixer in mixers)), None)
        self._rotary = rotary = Rotary.of(config)
        kind = ReversibleBlock if config.reversible else ResidualBlock
        modules = (kind(config, block, rotary) for block in (config.blocks() if blocks is None else blocks))
        self.blocks = cast("Sequence[ResidualBlock]", nn.ModuleList(modules))
        self.norm = norm_of(config) if config.norm_position == "before" else nn.Identity()
        is_classifier = config.objective.num_classes > 0
        self.logits = ClassLogits(config, config.objective) if is_classifier else Logits(config, self.embedding)
        self.activation_checkpoint: Recompute | None = None  # set to recompute activations
        self.attention_from: ModelConfig | None = None  # see ``use_attention``
        self._supported: set[str] = set()  # abilities that have been checked
        if initialize:  # after making all modules, so that published models keep their random values
            for part in self.parts():
                part.initialize()

    @staticmethod
    def num_parameters(config: ModelConfig) -> int:
        """Count the parameters of a configuration's model without allocating it."""
        return sum(parameter.numel() for parameter in SparseTransformer.empty(config).parameters())

    @staticmethod
    def empty(config: ModelConfig, blocks: Sequence[BlockConfig] | None = None) -> SparseTransformer:
        """Build a model on torch's meta device, so that it allocates nothing."""
        with torch.device("meta"), _Uninitialized():
            return SparseTransformer(config, blocks, initialize=False)

    @staticmethod
    def of_each_kind(config: ModelConfig) -> tuple[SparseTransformer, dict[BlockConfig, int]]:
        """Build a model with one block of each kind, in order of first use, and count the blocks of each kind.

        It is ``empty``, and takes no time, however many layers there are.

        Raises:
            ConfigError: a tensor has more bytes than can be counted.
        """
        kinds = Counter(config.blocks())
        try:
            return SparseTransformer.empty(config, list(kinds)), dict(kinds)
        except RuntimeError as error:  # torch multiplies sizes in 64 bits
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"is larger than any machine can hold; give smaller sizes: {what}") from None

    def parts(self) -> Iterator[Part]:
        """Iterate over all parts of the network, outermost first."""
        return (module for module in self.modules() if isinstance(module, Part))

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of all blocks that have one, in order."""
        return [block.mixer for block in self.blocks if block.mixer is not None]

    @property
    def reach(self) -> int:
        """How many tokens before a row its embedding, and what it reads, depend on directly."""
        return max([self.embedding.reach, *(mixer.reach for mixer in self.mixers)])

    @property
    def observers(self) -> list[Part]:
        """The parts that return statistics in training and observe their sums, in the order of the statistics."""
        replaced = [block.attention for block in self.blocks if block.mixer is not block.attention]
        return [part for part in self.parts() if part.observes and part not in replaced]

    def use_attention(self, config: ModelConfig | None) -> None:
        """Mix by the mixers of another configuration, with this network's parameters; None: by its own again.

        Raises:
            ConfigError: a mixer has other parameters, or buffers.
        """
        others = (self.config if config is None else config).blocks()
        for block, usual, other in zip(self.blocks, self.config.blocks(), others, strict=True):
            mixer = block.attention
            if mixer is not None and other.mixer is not None and other.mixer != usual.mixer:
                mixer = mixer.shared_with(other.mixer, self.config, self._rotary)
            block.use(mixer)
        self.attention_from = config

    def block_work(self, block: ResidualBlock, batch: int) -> Work:
        """Count the operations of a block over one context in a batch, by the rows and pairs of the objective."""
        objective, context = self.config.objective, self.config.context
        work, pairs = block.work(objective.num_rows(context), batch), objective.num_pairs(context)
        if pairs is None or not work.pairs:
            return work
        pairs *= self.config.heads
        scores, values = (count * pairs // work.pairs for count in (work.scores, work.values))
        return replace(work, pairs=pairs, scores=scores, values=values)

    def parameter_roles(self) -> dict[str, Role]:
        """Map each parameter's name to its role, in the order of ``named_parameters``.

        A part's ``trained_as`` overrides the role that the parameter's type implies. Its ``stacked_rows`` gives the
        rows of the matrices that are stacked in a linear layer.
        """
        modules, roles = dict(self.named_modules()), {}
        for name, parameter in self.named_parameters():
            path, _, kind = name.rpartition(".")
            above, _, layer = path.rpartition(".")
            owner, outer = modules[path], modules[above]
            role = "embeddings" if isinstance(owner, nn.Embedding) else "matrices"
            if isinstance(owner, Part):
                role = owner.trained_as or role
            # Under ZeRO 3 a released parameter is empty; ds_shape is its full shape.
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2:
                role = "vectors"
            rows = outer.stacked_rows.get(layer, ()) if isinstance(outer, Part) and kind == "weight" else ()
            roles[name] = Role(role, rows)
        return roles

    def forward(
        self,
        tokens: Tensor,
        return_nats: bool = False,
        return_extras: bool = False,
        begins: Tensor | None = None,
        real: Tensor | None = None,
        inputs: Tensor | None = None,
        predicted: Tensor | None = None,
        labels: Tensor | None = None,
        carried: tuple[Tensor, ...] = (),
    ) -> Tensor | MixerOutput:
        """Predict tokens[:, i] in row i from tokens[:, :i], or with ``begins`` from those of them in the same document.

        With another objective than autoregressive, row i predicts tokens[:, i] from ``inputs``, or from the rows that
        the objective's ``layout`` lets it read. Without ``predicted`` all tokens are then read, as by an encoder. With
        objective classify, a single row predicts the class of each context.

        Args:
            tokens: (B, N) integers of any type, N at most the configured context. The last one is only a target. Sent
                to a device as bytes, they need an eighth of the traffic of int64.
            return_nats: return each token's cross-entropy instead of the logits, which are then never all in memory.
            return_extras: also return the auxiliary loss and the statistics that training needs.
            begins: (B, N) bool, True on the first token of each document. Position 0 always begins one. Each document
                is computed as in a context of its own.
            real: (B, N) bool, False where a token is padding, after all other tokens of its context; None: all are
                real. Padding has no nats, no gradient, and no influence on averages, statistics or capacities.
            inputs: (B, N) integers, see ``Corrupted``; None: the tokens themselves.
            predicted: (B, N), see ``Corrupted``. Tokens that are not predicted have no nats; None: all are predicted.
            labels: (B, 1) int64, the class of each context, -1 for one without; None: the mean over classes.
            carried: what contexts before these have returned, or ``new_carried``; (): contexts stand alone, and nothing
                is returned.

        Returns:
            Logits (B, N, V), or nats (B, N) in fp32, 0 for padding and where nothing is predicted (of logits only if
            the objective has a ``layout``). Of K classes logits (B, 1, K), or nats (B, 1). With ``return_extras`` these
            are the rows of a ``MixerOutput`` with the sum of the auxiliary losses, if any, the statistics of each of
            ``observers``, and what the next contexts take as ``carried``.
            With sequence parallelism, only the rows of this process's section. They depend on the section's tokens and
            on ``reach`` tokens before them, or on all tokens where a mixer selects by tokens. Auxiliary losses cover
            whole contexts; statistics add up over processes.

        Raises:
            ValueError: tokens are not (B, N) with 1 to ``context`` positions, or the processes do not divide N.
            ConfigError: a part does not support ``begins`` or ``real``.
        """
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.context:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be (B, N) with N from 1 to {self.config.context}")
        places = None if begins is None else places_of(begins)
        inputs = tokens if inputs is None else inputs
        if predicted is not None:
            layout = self.config.objective.layout(tokens, inputs, predicted, real)
            if layout is not None:
                output = self._predict(tokens, predicted > 0, layout, return_nats)
                return output if return_extras else output.rows
        contexts, section = self.block_contexts(inputs, places, real, carried), self.division.section(tokens.shape[1])
        last: Tensor | None = None
        next_last: tuple[Tensor, ...] = ()
        if carried:
            last, reach = carried[0], self.embedding.reach
            next_last = (torch.cat([last, tokens[:, -reach:].to(last.dtype) + 1], 1)[:, -reach:],)
        output, columns = self.residual(
            lambda: self.embedding(inputs, places, real=real, last=last), contexts, self.activation_checkpoint
        )
        output = output._replace(carried=next_last + output.carried)
        if isinstance(self.logits, ClassLogits):
            scored = self.logits(self.norm(output.rows), real)
            scored = self.logits.nats(scored, labels) if return_nats else scored
        elif return_nats:  # exchange targets and nats, which are smaller than rows
            at: Any = slice(None)  # which rows
            if predicted is not None:  # compute no other logits
                at = self.division.redistribute(predicted[:, section, None], 0, columns)[..., 0] > 0
            rows = self.norm(output.rows[at])
            targets = self.division.redistribute(tokens[:, section, None], 0, columns)[..., 0].long()
            nats = self.logits(rows, targets[at])
            if predicted is not None:
                nats = nats.new_zeros(targets.shape).masked_scatter(at, nats)
            scored = self.division.redistribute(nats[..., None], columns, 0)[..., 0]
            if real is not None:
                scored = scored.where(real[:, section], 0.0)
        else:
            scored = self.logits(self.norm(self.division.redistribute(output.rows, columns, 0)))
        return output._replace(rows=scored) if return_extras else scored

    def _predict(self, tokens: Tensor, is_predicted: Tensor, layout: Layout, return_nats: bool) -> MixerOutput:
        """Return ``forward``'s output by the rows of a layout; logits are those of the last rows alone."""
        contexts = self.layout_contexts(layout)
        output, _ = self.residual(
            lambda: self.embedding(layout.tokens, layout.places), contexts, self.activation_checkpoint
        )
        queries = self.norm(output.rows[:, -layout.targets.shape[1] :])
        rows = self.logits(queries, tokens.gather(1, layout.targets).long() if return_nats else None)
        targets = layout.targets
        if not return_nats:
            targets, is_predicted = targets[..., None].expand_as(rows), is_predicted[..., None]
        scored = rows.new_zeros(*tokens.shape, *rows.shape[2:]).scatter(1, targets, rows)
        return output._replace(rows=scored.where(is_predicted, 0.0))

    def residual(
        self, embedded: Callable[[], Tensor], contexts: Sequence[BlockContext], recompute: Recompute | None = None
    ) -> tuple[MixerOutput, int]:
        """Run all residual blocks as in training, up to the last norm.

        Args:
            embedded: returns the embedded rows (B, N, C). Python 3.10 would keep a tensor argument alive until this
                call ends, although recomputation may not need it.
            contexts: one for each block, as ``block_contexts`` returns them.
            recompute: called in place of each block, see ``Recompute``.

        Returns:
            The output of the blocks, and the stride of the columns by which its rows are divided; 0: by sections.
        """
        if self.config.reversible and recompute is None and torch.is_grad_enabled():
            shared = contexts[0].shared
            return MixerOutput(*Reversible.apply(embedded(), shared, self.blocks, contexts)), 0
        columns, output = 0, MixerOutput(embedded())
        dtype = output.rows.dtype
        if self.config.reversible:
            output = MixerOutput(opened(output.rows))
        for block, context in zip(self.blocks, contexts, strict=True):
            rows, columns = self.division.redistribute(output.rows, columns, context.columns), context.columns
            if recompute is None:
                returned: Sequence[Any] = block(rows, context)
            else:
                tensors = () if context.shared is None else (context.shared,)
                returned = recompute(block, rows, context._replace(shared=None), *tensors)
            output = MixerOutput(*returned).after(output)
        if self.config.reversible:
            output = output._replace(rows=closed(output.rows, dtype))
        return output, columns

    @property
    def carried(self) -> tuple[Carried, ...]:
        """Tensors that contexts hand to the next ones of their lanes: the last tokens and mixers' states; or none."""
        of_mixers = tuple(carried for mixer in self.mixers for carried in mixer.carried)
        return (Carried((self.embedding.reach,), torch.int32), *of_mixers) if of_mixers else ()

    def new_carried(self, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return what ``batch`` contexts carry that begin their lanes, where rows have ``dtype``: zeros."""
        shapes = (((batch, *carried.shape), carried.dtype or dtype) for carried in self.carried)
        return tuple(torch.zeros(shape, dtype=kind, device=device) for shape, kind in shapes)

    def block_contexts(
        self,
        tokens: Tensor,
        places: Tensor | None = None,
        real: Tensor | None = None,
        carried: tuple[Tensor, ...] = (),
    ) -> list[BlockContext]:
        """Return each block's inputs besides its rows, in training.

        Args:
            tokens: (B, N).
            places: (B, N), each position's place in its document, if documents are kept apart.
            real: (B, N) bool, False where a row is padding; None: all are real.
            carried: as ``forward`` takes it.

        Raises:
            ConfigError: a part does not support documents, or padding.
        """
        contexts, columns, context = [], 0, tokens.shape[1]
        to_mixers = iter(carried[1:])
        local_places = None
        readable = places
        if real is not None:
            self._require("padding")
            if not self.config.objective.causal:  # padding stands in documents of its own, which no other row reads
                readable = places_of(~real if places is None else ~real | (places == 0))
        if places is not None:
            self._require("documents")
            local_places = places[:, self.division.section(context)]
        inputs = BlockContext(places=local_places, real=real, shared=self._shared_tensor())
        selections: dict[Hashable, Selection | None] = {None: None}  # shared by layers that read alike
        for block in self.blocks:
            mixer, alike = block.mixer, None
            if mixer is not None:
                alike = mixer.patterns, mixer.choice
                if alike not in selections:
                    selections[alike] = mixer.selection_of(tokens, readable)
            in_sections = block.feed_forward is not None and block.feed_forward.in_sections
            if self.division.size == 1 or self.config.reversible or in_sections or readable is not None:
                columns = 0
            elif mixer is not None:
                columns = mixer.columns(context)
            handed = tuple(itertools.islice(to_mixers, len(mixer.carried))) if mixer is not None else ()
            contexts.append(inputs._replace(selection=selections[alike], columns=columns, carried=handed))
        return contexts

    def layout_contexts(self, layout: Layout) -> list[BlockContext]:
        """Return each block's inputs besides the rows of a layout, the same for all blocks.

        Raises:
            ConfigError: a part does not support padding.
        """
        if layout.real is not None:
            self._require("padding")
        selection = layout.selection.mapped(lambda tensor: tensor.expand(-1, self.config.heads, -1))
        inputs = BlockContext(places=layout.places, selection=selection, real=layout.real)
        return len(self.blocks) * [inputs._replace(shared=self._shared_tensor())]

    def _shared_tensor(self) -> Tensor | None:
        """Compute what all layers read of the part that they share."""
        return None if self.shared is None else self.shared()

    def _require(self, ability: Literal["documents", "padding"]) -> None:
        if ability not in self._supported:  # called in every step
            self.config.require(ability)
            self._supported.add(ability)

    def new_states(
        self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int | None = None
    ) -> list[State | None]:
        """Make an empty cache for each block, for contexts of up to ``length`` positions; None if it has no mixer.

        Args:
            batch: B.
            length: positions to make room for.
            device: of the caches.
            dtype: of keys and values.
            back: how many positions may be forgotten again without forgetting all; None: any number.

        Raises:
            ConfigError: a mixer cannot generate, or the model's backend cannot run here.
        """
        back = length if back is None else back
        mixers = (block.mixer for block in self.blocks)
        return [None if mixer is None else mixer.new_state(batch, length, device, dtype, back) for mixer in mixers]

    def forward_cached(self, h: Tensor, states: Sequence[State | None], first: int, before: Tensor) -> Tensor:
        """Run all residual blocks for positions after those in the states.

        Args:
            h: (B, n, C), embedded positions from ``first`` on.
            states: one for each block. Rows before ``first`` are read, those of ``h`` are written.
            first: position of the first row of ``h``.
            before: (B, ``reach`` + n - 1) int64, the tokens before the rows, the newest last; ``NO_TOKEN`` before the
                beginning.

        Returns:
            (B, n, C), before the last norm.
        """
        rows, shared = opened(h) if self.config.reversible else h, self._shared_tensor()
        for block, state in zip(self.blocks, states, strict=True):
            rows = block(rows, BlockContext(state, first, tokens=before, shared=shared)).rows
        return closed(rows, h.dtype) if self.config.reversible else rows


class _Uninitialized(TorchFunctionMode):
    """Skips the initialisation of weights, which on the meta device would only load torch's compiler (75 MB)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)
