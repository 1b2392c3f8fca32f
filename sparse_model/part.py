"""The protocol of the network's parts: what a mixer or a feed-forward declares, takes, returns and counts.

A mixer (letter s of an order) brings rows of several positions together. A feed-forward (letter f) computes each row by
itself. A part is two classes: a frozen configuration (``MixerConfig``, ``FeedForwardConfig``) that is parsed from JSON
and declares what the part supports, and the module that it makes (``Mixer``, ``FeedForward``).

A part whose state is not learned by gradients keeps it in fp32 buffers. They are saved, resumed and exported like
weights, and are equal on all ranks. In training the part returns statistics with its rows. After each step,
``observe(total)`` gets their sum over all contexts of the step, of all ranks.

Letters: B batch, N positions, C width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn

from longstride.kernels import ConfigError, Problem
from longstride.kernels.patterns import Pattern
from longstride.sparse_model.division import Division, Traffic
from longstride.sparse_model.documents import Documents
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel

Ability = Literal["convolution", "documents", "keys", "padding", "reversible", "sections"]


class BlockContext(NamedTuple):
    """What a block gets besides its rows; by default they are whole contexts of real tokens, one document each."""

    state: State | None = None  # of earlier positions, in generation
    first: int = 0  # position of the first row; above 0 only with a state
    documents: Documents | None = None  # where documents must not attend to each other
    columns: int = 0  # stride of the columns by which rows are divided over processes; 0: by sections
    # (B, N) bool, False where a token is padding, of whole contexts for a mixer, of its own rows for a feed-forward;
    # None: all are real.
    real: Tensor | None = None


PLAIN = BlockContext()


class MixerOutput(NamedTuple):
    """What a part, a block or all blocks return."""

    rows: Tensor  # (B, N, C), to be added to the residual stream
    auxiliary_loss: Tensor | None = None  # () fp32: a mean over positions, added to the training loss, not to the nats
    statistics: tuple[Tensor, ...] = ()  # in training, one for each part that observes; summed over contexts

    def after(self, earlier: MixerOutput) -> MixerOutput:
        """Add the auxiliary losses and statistics of earlier parts; the rows stay."""
        loss = self.auxiliary_loss
        if earlier.auxiliary_loss is not None:
            loss = earlier.auxiliary_loss if loss is None else earlier.auxiliary_loss + loss
        return MixerOutput(self.rows, loss, earlier.statistics + self.statistics)


class State(Protocol):
    """What generation keeps of earlier positions for one mixer."""

    def take(self, source: Any, order: Tensor, known: int, into: slice) -> None:
        """Contexts ``into`` become copies of contexts ``order`` of such a state in its first ``known`` rows.

        ``order`` is (b,) integers, as many as there are contexts in ``into``. The source is a state of the same part,
        of as many contexts as it may be, or itself.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ``length``: all, or no more than the ``back`` that the state was made for."""
        ...


class Part(nn.Module):
    """A module of the network with parameters, buffers or exchanges of its own."""

    part: str = ""  # the name under which its parameters are counted; "": that of the part around it
    trained_as: str = ""  # the optimiser's role of its parameters; "": by their kind, see ``parameter_roles``
    # Rows of the matrices that lie below each other in one of its linear layers, by the name of the layer.
    stacked_rows: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    division = Division()  # how contexts are divided over processes, as ``divide`` sets it

    def initialize(self) -> None:
        """Set the first values of its own parameters and buffers."""

    def observe(self, total: Tensor) -> None:
        """Update buffers by the statistics of a step, summed over all ranks. Who overrides it returns statistics."""

    def divide(self, division: Division) -> None:
        """Have this process compute its section of every context alone, together with the others of its group."""
        for module in self.modules():
            if isinstance(module, Part):
                module.division = division

    def parameter_counts(self) -> Counter[str]:
        """Count parameters by ``part``."""
        names: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for path, module in self.named_modules():
            around = names.get(path.rpartition(".")[0], "")
            names[path] = (isinstance(module, Part) and module.part) or around
            counts[names[path]] += sum(parameter.numel() for parameter in module.parameters(recurse=False))
        return +counts  # none that has no parameters

    @property
    def observes(self) -> bool:
        """Whether it overrides ``observe``."""
        return type(self).observe is not Part.observe

    @property
    def is_divided(self) -> bool:
        """Whether the run divides contexts, maybe over one process: then dropout goes by positions."""
        return self.division is not Part.division


class Mixer(Part, ABC):
    """The module of a mixer. Only ``forward`` and ``work`` are needed to train."""

    patterns: tuple[Pattern, ...] = ()  # of the first heads; those after them choose by content
    key_value_heads: int = 0  # where it has ``traffic``
    backend: str = "auto"  # of attention kernels

    @abstractmethod
    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Mix normalised rows h (B, N, C). With a state, rows attend to the kept positions, and are kept too."""

    @abstractmethod
    def work(self, positions: int, batch: int) -> Work:
        """Count the operations of one context in a batch."""

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> State:
        """Make an empty state with room for ``length`` positions, of which ``back`` may be forgotten again.

        Raises:
            ConfigError: the mixer cannot generate, or its backend cannot run here.
        """
        self._lacks("new_state, so it cannot generate")

    def weights(self, h: Tensor) -> Callable[[Tensor, int], Tensor]:
        """How its heads weigh the positions of one context, for pictures.

        Args:
            h: (1, N, C), as ``forward`` takes it.

        Returns:
            A function of queries (P,) int64 and the number of a head, to weights (P, N) float64. A row sums to 1, or to
            0 where a query has no key.

        Raises:
            ConfigError: the mixer has no weights.
        """
        self._lacks("weights, so there is no picture of its attention")

    def reads(self, h: Tensor, head: int) -> Callable[[Tensor], Tensor]:
        """Which positions a head reads in one context, h (1, N, C): queries (P,) int64 to (P, N) bool.

        Raises:
            ConfigError: the mixer does not tell.
        """
        self._lacks("reads, so there is no picture of what it chooses")

    @property
    def has_reads(self) -> bool:
        """Whether it overrides ``reads``."""
        return type(self).reads is not Mixer.reads

    def traffic(self, division: Division, context: int, apart: bool = False) -> Traffic | None:
        """Count what it sends in a forward pass over one context; None: it is no attention."""
        return None

    def columns(self, context: int) -> int:
        """The stride of the columns by which its rows are best divided over processes; 0: by sections."""
        return 0

    def visited_pairs(self, positions: int, like: Tensor) -> int | None:
        """Count pairs with those that kernels compute and mask, for tensors like this one; None: as ``work`` does."""
        return None

    def _lacks(self, what: str) -> NoReturn:
        raise ConfigError(Problem("model.attention", f"the mixer {type(self).__name__} has no method {what}"))


class FeedForward(Part, ABC):
    """The module of a feed-forward."""

    in_sections: bool = False  # whether its rows must be divided by sections, and not by columns

    @abstractmethod
    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Compute each of the normalised rows h (B, N, C) by itself."""

    @abstractmethod
    def work(self, positions: int, batch: int) -> Work:
        """Count the operations of one context in a batch."""


class HeadWidths(NamedTuple):
    """Channels of one head of a mixer, of which generation keeps those of each position."""

    query_key: int  # D, of a query and of a key; 0 where its scores are no products
    value: int  # Dv
    in_kernels: bool = True  # whether the attention kernels read them, and not operations of the mixer's own
    kept_heads: int | None = None  # of keys and values; None: as many as of queries


class PartConfig(ABC):
    """A part as the configuration asks for it. A frozen, hashable value: equal ones make equal modules.

    ``supports`` names what else the part gets right. A run that needs another ability is refused, with the part's name:

    - "convolution" (mixers): applies ``network.convolution``, a short convolution before it.
    - "documents" (mixers): heeds ``context.documents``; the module's ``patterns`` say what each head reads.
    - "padding": leaves out of averages, statistics and capacities what ``context.real`` marks as padding.
    - "reversible": computes the same again from the same rows; it keeps nothing of a forward pass on the module.
    - "sections": heeds ``division``, and computes its section of contexts that several processes share.
    - "keys" (mixers): can exchange keys between these processes; others exchange heads, which they must divide.
    """

    type: str
    supports: ClassVar[frozenset[Ability]] = frozenset()


class MixerConfig(PartConfig):
    """A mixer as the configuration asks for it."""

    @property
    @abstractmethod
    def has_queries(self) -> bool:
        """Whether rows are projected to queries and keys, which options of the network normalise, turn and narrow."""

    @abstractmethod
    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError, its paths relative to the mixer's object, where a context of this length does not fit."""

    @abstractmethod
    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Which positions each head may read, of the first heads; those after them choose by content."""

    @abstractmethod
    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """What each head multiplies, and whether it asks the attention kernels to."""

    @abstractmethod
    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Mixer:
        """Make the module; ``rotary`` is shared by all of a model."""


class FeedForwardConfig(PartConfig, StrictModel):
    """A feed-forward as the configuration asks for it."""

    @abstractmethod
    def make(self, network: NetworkConfig) -> FeedForward:
        """Make the module."""


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of one pass over one context. A multiplication and an addition are two."""

    pairs: int = 0  # of a query and a key, in all heads together
    linear: int = 0  # 2 a weight and position
    scores: int = 0  # of attention: queries times keys
    values: int = 0  # of attention: weights times values
    again: int = 0  # of ``linear``, what the backward pass computes again in any case
    choosing: int = 0  # of what decides who reads whom, which has no gradient
    bound: str = ""  # how the pairs are bounded, where the data decide and these are the most there can be

    def __add__(self, other: Work) -> Work:
        return Work(
            self.pairs + other.pairs,
            self.linear + other.linear,
            self.scores + other.scores,
            self.values + other.values,
            self.again + other.again,
            self.choosing + other.choosing,
            "; ".join(dict.fromkeys(filter(None, (self.bound, other.bound)))),
        )

    @property
    def forward(self) -> int:
        """The forward pass."""
        return self.linear + self.scores + self.values + self.choosing

    @property
    def backward(self) -> int:
        """The backward pass: the gradients of both factors, and once more the scores and what is not kept."""
        return 2 * (self.forward - self.choosing) + self.scores + self.again


def draw(parameter: Tensor, network: NetworkConfig, fan_in: int, *, into_stream: bool = False) -> None:
    """Set a tensor with this many inputs to normal values from torch's global generator (section 5.2).

    The paper writes N(0, 0.125/√d). Read as a standard deviation ("paper") that is 0.125/√d; the authors' later code
    takes it for a variance ("released"), std = √(0.125/d).

    Args:
        parameter: is overwritten.
        network: says how the formula is read.
        fan_in: the formula's d.
        into_stream: what it gives is added to the residual stream: scaled by 1/√(sub-layers), so that the stream keeps
            its size with depth; 0 where ``initialization`` is "zero_outputs" (Zhang et al. 2019, Fixup).
    """
    if into_stream and network.initialization == "zero_outputs":
        nn.init.zeros_(parameter)
        return
    std = 0.125 / math.sqrt(fan_in) if network.initialization == "paper" else math.sqrt(0.125 / fan_in)
    scale = 1 / math.sqrt(len(network.sublayers)) if into_stream else 1.0
    nn.init.normal_(parameter, std=scale * std)


def draw_linear(linear: nn.Linear, network: NetworkConfig, *, into_stream: bool = False) -> None:
    """Set a linear layer: its weight as ``draw`` does, its bias, if it has one, to 0."""
    draw(linear.weight, network, linear.in_features, into_stream=into_stream)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
