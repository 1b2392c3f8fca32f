"""The protocol of the network's parts: what a mixer or a feed-forward declares, takes, returns and counts.

A mixer (letter s of an order) combines rows of several positions. A feed-forward (letter f) computes each row
independently. A part consists of two classes: a frozen configuration (``MixerConfig``, ``FeedForwardConfig``) that is
parsed from JSON and declares what the part supports, and the module that it makes (``Mixer``, ``FeedForward``).

State that is not learned by gradients belongs in fp32 buffers. They are saved, resumed and exported like weights, and
are equal on all ranks. In training such a part returns statistics with its rows. After each step, ``observe(total)``
receives their sum over all contexts of the step, on all ranks.

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import Pattern, declares_causal, pattern_to_json
from longstride.kernels.selections import Selection, within_documents
from longstride.sparse_model.division import Division, Traffic
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel

Ability = Literal["convolution", "documents", "keys", "output_gate", "padding", "reversible", "sections", "sinks"]


class BlockContext(NamedTuple):
    """Inputs of a block besides its rows. The defaults mean whole contexts of real tokens, one document each."""

    state: State | None = None  # cache of earlier positions, in generation
    first: int = 0  # position of the first row; above 0 only with a state
    places: Tensor | None = None  # (B, n) int64, of its own rows in their documents; None: not kept apart
    selection: Selection | None = None  # what each head of its mixer reads, see ``Mixer.selection_of``
    tokens: Tensor | None = None  # cached or traced: (B, reach + n - 1) int64, those before its rows; -1: none yet
    columns: int = 0  # stride of the columns by which rows are divided over processes; 0: by sections
    # (B, N) bool, False for padding; None: all are real. Of whole contexts for a mixer, local rows for a feed-forward.
    real: Tensor | None = None
    shared: Tensor | None = None  # the output of the part that all layers share, see ``MixerConfig.make_shared``
    # What the mixer returned as ``MixerOutput.carried`` for the contexts before these; (): not asked to carry
    carried: tuple[Tensor, ...] = ()


PLAIN = BlockContext()


def places_of(begins: Tensor) -> Tensor:
    """Return each position's place in its document, (B, N) int64, from a mask that is True where a document begins.

    Position 0 always begins one.
    """
    positions = torch.arange(begins.shape[1], device=begins.device)
    return positions - torch.where(begins, positions, 0).cummax(-1).values


class Carried(NamedTuple):
    """A tensor that a part hands from each context to the next one of its lane."""

    shape: tuple[int, ...]  # of one context, to which (B,) is added in front
    dtype: torch.dtype | None = None  # None: that of the rows


class MixerOutput(NamedTuple):
    """Output of a part, of a block or of all blocks."""

    rows: Tensor  # (B, N, C), to be added to the residual stream
    auxiliary_loss: Tensor | None = None  # () fp32: a mean over positions, added to the training loss, not to the nats
    statistics: tuple[Tensor, ...] = ()  # in training, one for each part that observes; summed over contexts
    carried: tuple[Tensor, ...] = ()  # without gradients: for the next contexts, if the ``BlockContext`` has some

    def after(self, earlier: MixerOutput) -> MixerOutput:
        """Add the auxiliary losses, statistics and carried tensors of earlier parts; the rows stay."""
        loss = self.auxiliary_loss
        if earlier.auxiliary_loss is not None:
            loss = earlier.auxiliary_loss if loss is None else earlier.auxiliary_loss + loss
        return MixerOutput(self.rows, loss, earlier.statistics + self.statistics, earlier.carried + self.carried)


class State(Protocol):
    """The cache of one mixer for generation.

    That of a mixer with ``carried`` also has a method ``carry()``: begin the next context, after a whole one, with what
    training hands to it.
    """

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        """Replace contexts ``into`` by copies of contexts ``order`` of ``source``, in their first ``length`` rows.

        Args:
            source: a state of the same part with any number of contexts, or this one.
            order: (b,) integers, one for each context in ``into``.
            length: rows to copy.
            into: contexts to replace.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``. At most the ``back`` rows of ``new_state`` are dropped, or all."""
        ...


class Part(nn.Module):
    """A module of the network with parameters, buffers or collectives of its own."""

    part: str = ""  # the name under which its parameters are counted; "": that of the enclosing part
    learns_apart: bool = False  # whether its parameters learn from an auxiliary loss alone, in training
    trained_as: str = ""  # the optimiser's role of its parameters; "": by their type, see ``parameter_roles``
    # Rows of the matrices that are stacked in a linear layer, by the name of the layer.
    stacked_rows: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    division = Division()  # set by ``divide``

    def initialize(self) -> None:
        """Set the first values of the part's parameters and buffers. Its submodules set theirs."""

    def observe(self, total: Tensor) -> None:
        """Update buffers from the statistics of a step, summed over all ranks.

        A part that overrides this returns statistics.
        """

    def divide(self, division: Division) -> None:
        """Compute only this process's section of every context from now on, together with the other processes."""
        for module in self.modules():
            if isinstance(module, Part):
                module.division = division

    def parameter_parts(self) -> dict[str, str]:
        """Map each parameter's name to the ``part`` that it belongs to."""
        parts: dict[str, str] = {}
        for path, module in self.named_modules():
            around = parts.get(path.rpartition(".")[0], "")
            parts[path] = (isinstance(module, Part) and module.part) or around
        return {name: parts[name.rpartition(".")[0]] for name, _ in self.named_parameters()}

    def parameter_counts(self) -> Counter[str]:
        """Count parameters by ``part``."""
        counts: Counter[str] = Counter()
        for part, parameter in zip(self.parameter_parts().values(), self.parameters(), strict=True):
            counts[part] += parameter.numel()
        return counts

    @property
    def observes(self) -> bool:
        """Whether it overrides ``observe``."""
        return type(self).observe is not Part.observe

    @property
    def is_divided(self) -> bool:
        """Whether the run uses sequence parallelism, maybe with one process: dropout then depends on positions."""
        return self.division is not Part.division


class Mixer(Part, ABC):
    """The module of a mixer. Only ``forward`` and ``work`` are needed to train."""

    patterns: tuple[Pattern, ...] = ()  # of the first heads; later heads choose by content
    key_value_heads: int = 0  # set if it has ``traffic``
    backend: str = "auto"  # of attention kernels
    reach: int = 1  # how many tokens before a row decide what it reads, in generation
    choice: Hashable = None  # mixers of equal ``patterns`` and ``choice`` have equal selections
    reads_shared: bool = False  # whether it reads ``BlockContext.shared``
    measures: dict[str, float] | None = None  # an empty one is filled in evaluation by some mixers, for reports
    # What it hands to the next context of a lane. Zeros mean that nothing came before: position 0 then begins a text.
    # Later positions that begin a document (place 0) read nothing that was carried. Never kept on the module: a block
    # that is recomputed in the backward pass must read what it read in the forward pass.
    carried: tuple[Carried, ...] = ()

    @abstractmethod
    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Mix normalised rows h (B, N, C). With a state, rows also attend to the cached positions, and are cached."""

    @abstractmethod
    def work(self, positions: int, batch: int) -> Work:
        """Count the operations of one context in a batch."""

    def selection_of(self, tokens: Tensor, places: Tensor | None = None) -> Selection | None:
        """Return which positions each head reads, where that follows from tokens and documents alone.

        Args:
            tokens: (B, N) integers, whole contexts. Row i holds token i - 1.
            places: (B, N) int64, each position's place in its document, if documents are kept apart.

        Returns:
            The selection, which a ``BlockContext`` has; None: the heads' patterns, or what the rows decide.
        """
        if places is None or not self.patterns:
            return None
        return within_documents(self.patterns, torch.arange(places.shape[1], device=places.device) - places)

    def shared_with(self, config: MixerConfig, network: NetworkConfig, rotary: Rotary | None) -> Mixer:
        """Make a mixer that computes with this one's parameters.

        Raises:
            ConfigError: it has other parameters, or buffers, which no checkpoint would save.
        """
        with torch.device("meta"):
            mixer = config.make(network, rotary)

        def shapes(part: Mixer) -> dict[str, torch.Size]:  # under ZeRO 3 a parameter may be released
            return {name: getattr(tensor, "ds_shape", tensor.shape) for name, tensor in part.named_parameters()}

        if shapes(mixer) != shapes(self) or mixer.reads_shared or self.reads_shared:
            raise ConfigError(Problem("attention", f"{config.type} has other parameters than model.attention"))
        if any(True for _ in mixer.buffers()):
            raise ConfigError(Problem("attention", f"{config.type} has buffers, which only model.attention may have"))
        for name, module in self.named_children():
            if getattr(mixer, name, None) is not None:
                setattr(mixer, name, module)
        for name, parameter in self.named_parameters(recurse=False):
            setattr(mixer, name, parameter)
        mixer.training = self.training
        if self.is_divided:
            mixer.division = self.division
        return mixer

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> State:
        """Make an empty state with room for ``length`` positions, of which ``back`` may be forgotten again.

        Raises:
            ConfigError: the mixer cannot generate, or its backend cannot run here.
        """
        self._lacks("new_state, so it cannot generate")

    def weights(self, h: Tensor, context: BlockContext = PLAIN) -> Callable[[Tensor, int], Tensor]:
        """Return a function that computes attention weights of one context, for pictures.

        Args:
            h: (1, N, C), as ``forward`` takes it.
            context: as ``forward`` takes it, without a state.

        Returns:
            A function of queries (P,) int64 and a head's number, to weights (P, N) float64. A row sums to 1, or with
            sinks to less, or to 0 if the query has no key.

        Raises:
            ConfigError: the mixer has no weights.
        """
        self._lacks("weights, so there is no picture of its attention")

    def reads(self, h: Tensor, head: int, context: BlockContext = PLAIN) -> Callable[[Tensor], Tensor]:
        """Return a function that finds which positions a head reads in one context; arguments as for ``weights``.

        Returns:
            A function of queries (P,) int64, to (P, N) bool.

        Raises:
            ConfigError: the mixer does not implement it.
        """
        self._lacks("reads, so there is no picture of what it chooses")

    @property
    def has_reads(self) -> bool:
        """Whether it overrides ``reads``."""
        return type(self).reads is not Mixer.reads

    def traffic(self, division: Division, context: int, apart: bool = False) -> Traffic | None:
        """Count what the mixer sends in a forward pass over one context; None: it is not attention."""
        return None

    def columns(self, context: int) -> int:
        """Return the stride of the columns by which rows are best divided over processes; 0: by sections."""
        return 0

    def visited_pairs(self, positions: int, like: Tensor) -> int | None:
        """Count pairs with those that kernels compute and mask, for tensors like ``like``; None: as ``work`` does."""
        return None

    def _lacks(self, what: str) -> NoReturn:
        raise ConfigError(Problem("model.attention", f"the mixer {type(self).__name__} has no method {what}"))


class FeedForward(Part, ABC):
    """The module of a feed-forward."""

    in_sections: bool = False  # whether its rows must be divided by sections, and not by columns

    @abstractmethod
    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Compute each of the normalised rows h (B, N, C) independently."""

    @abstractmethod
    def work(self, positions: int, batch: int) -> Work:
        """Count the operations of one context in a batch."""


class HeadWidths(NamedTuple):
    """Channels of one head of a mixer. Generation caches keys and values of these widths for each position."""

    query_key: int  # D, of a query and of a key; 0 if its scores are not products
    value: int  # Dv
    in_kernels: bool = True  # whether the attention kernels read them, instead of torch operations
    kept_heads: int | None = None  # of keys and values; None: as many as of queries
    extra_cached: int = 0  # channels of a position that all heads together cache besides these keys and values


class PartConfig(ABC):
    """The configuration of a part. A frozen, hashable value: equal ones make equal modules.

    ``supports`` lists optional abilities. A run that needs an ability that a part lacks is refused, naming the part:

    - "convolution" (mixers): applies ``network.convolution``, a short convolution before it.
    - "documents" (mixers): respects ``context.places``, and reads what ``selection_of`` gives.
    - "output_gate" (mixers with queries): applies ``network.output_gate``.
    - "padding": excludes what ``context.real`` marks as padding from averages, statistics and capacities.
    - "reversible": gives the same output for the same rows again; it stores nothing of a forward pass on the module.
    - "sections": respects ``division``: it computes its section of contexts that several processes share.
    - "sinks" (mixers with queries): applies ``network.sinks``.
    - "keys" (mixers): can exchange keys between these processes. Others exchange heads, which must divide evenly.
    """

    type: str
    supports: ClassVar[frozenset[Ability]] = frozenset()


class MixerConfig(PartConfig):
    """The configuration of a mixer."""

    @property
    def carries(self) -> bool:
        """Whether contexts hand something to the next contexts of their lanes, see ``Mixer.carried``."""
        return False

    def causality(self, network: NetworkConfig) -> dict[str, bool]:
        """Map its type, and those of its patterns that read later positions, to whether rows read none."""
        read_later = (pattern for pattern in self.head_patterns(network) if not declares_causal(pattern))
        return {self.type: True} | {str(pattern_to_json(pattern)["type"]): False for pattern in read_later}

    @property
    @abstractmethod
    def has_queries(self) -> bool:
        """Whether the mixer has queries and keys. Options of the network normalise, rotate and narrow them."""

    @abstractmethod
    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError if a context of this length does not fit. Its paths are relative to the mixer's object."""

    @abstractmethod
    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Return which positions each head may read, for the first heads. The heads after them choose by content."""

    @abstractmethod
    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """Return the channels of each head, and whether the attention kernels compute it."""

    @abstractmethod
    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Mixer:
        """Make the module. All mixers of a model share ``rotary``."""

    def make_shared(self, network: NetworkConfig) -> Part | None:
        """Make the part with the parameters that all layers share, which returns a tensor; None: they share none.

        The network has it once, calls it without arguments, and gives its output to all layers.
        """
        return None


class FeedForwardConfig(PartConfig, StrictModel):
    """The configuration of a feed-forward."""

    @abstractmethod
    def make(self, network: NetworkConfig) -> FeedForward:
        """Make the module."""


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of one pass over one context. A multiplication and an addition count as two."""

    pairs: int = 0  # of a query and a key, in all heads together
    linear: int = 0  # 2 a weight and position
    scores: int = 0  # of attention: queries times keys
    values: int = 0  # of attention: weights times values
    again: int = 0  # part of ``linear`` that the backward pass always computes again
    choosing: int = 0  # to decide which keys are read; has no gradient
    bound: str = ""  # describes the bound if the data decide and ``pairs`` is an upper bound

    def __add__(self, term: Work) -> Work:
        return Work(
            self.pairs + term.pairs,
            self.linear + term.linear,
            self.scores + term.scores,
            self.values + term.values,
            self.again + term.again,
            self.choosing + term.choosing,
            "; ".join(dict.fromkeys(filter(None, (self.bound, term.bound)))),
        )

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return self.linear + self.scores + self.values + self.choosing

    @property
    def backward(self) -> int:
        """Operations of the backward pass: gradients of both factors, scores once more, and ``again``."""
        return 2 * (self.forward - self.choosing) + self.scores + self.again


def draw(parameter: Tensor, network: NetworkConfig, fan_in: int, *, into_stream: bool = False) -> None:
    """Fill a tensor with normal values from torch's global generator (section 5.2).

    The paper writes N(0, 0.125/√d). Read as a standard deviation ("paper") that is 0.125/√d. The authors' later code
    reads it as a variance ("released"): std = √(0.125/d).

    Args:
        parameter: overwritten.
        network: its ``initialization`` selects the formula.
        fan_in: the formula's d.
        into_stream: the output is added to the residual stream. Scale by 1/√(sub-layers), so that the stream keeps its
            size with depth, unless a norm after each addition does; 0 if ``initialization`` is "zero_outputs" (Zhang et
            al. 2019, Fixup).
    """
    if into_stream and network.initialization == "zero_outputs":
        nn.init.zeros_(parameter)
        return
    std = 0.125 / math.sqrt(fan_in) if network.initialization == "paper" else math.sqrt(0.125 / fan_in)
    scale = 1 / math.sqrt(len(network.sublayers)) if into_stream and network.norm_position == "before" else 1.0
    nn.init.normal_(parameter, std=scale * std)


def draw_linear(linear: nn.Linear, network: NetworkConfig, *, into_stream: bool = False) -> None:
    """Initialise a linear layer: the weight as ``draw`` does, the bias, if any, with 0."""
    draw(linear.weight, network, linear.in_features, into_stream=into_stream)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
