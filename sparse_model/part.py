"""What each part of the network has beside its forward pass: its first values, and the count of its operations.

A part is a module with ``part``, the name under which its parameters are counted. Where it has parameters to set,
``initialize()`` does so. Where it computes products, ``work(positions, batch)`` counts them. One that remembers earlier
positions has ``new_state(batch, length, device, dtype, back)``: what generation keeps of it, a ``State``. Whoever needs
one of these asks the part, and knows no names of modules or tensors.

One that looks beyond its own rows has ``division``, which a model sets (``SparseTransformer.divide``), and asks it for
what other processes have of the same contexts.

A mixer (letter s of an order) brings rows of several positions together; a feed-forward (letter f) computes each row by
itself. Both take normalised rows (B, N, C), and what they return is added to the residual stream: rows (B, N, C), or
``Mixed`` where there is more to tell. Where contexts are filled up, both take ``real``: bool, False where a row is
padding; a mixer that of whole contexts (B, N), a feed-forward that of its own rows. What a part averages, counts or
keeps must leave padding out.

What a part learns otherwise than by gradients it keeps in buffers, in fp32. They are saved, resumed in any layout and
exported like weights, and every rank has the same. In training such a part gives statistics with its rows. Once a step
is taken, ``observe(total)`` gets their sum over all contexts of the step, of all ranks; so it does not matter what is
computed twice.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from longstride.kernels.patterns import Pattern
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel


class Mixed(NamedTuple):
    """What a part gives that has more than rows to give."""

    rows: Tensor  # (B, N, C)
    auxiliary: Tensor | None = None  # () fp32: a mean over positions, added to the training loss and never to the nats
    statistics: tuple[Tensor, ...] = ()  # in training, one of each part that observes; summed over contexts


def joined(stream: Mixed, given: Tensor | Mixed) -> Mixed:
    """What one more part or block gives, with the auxiliary losses and statistics of those before it."""
    if not isinstance(given, Mixed):
        return stream._replace(rows=given)
    auxiliary = given.auxiliary
    if stream.auxiliary is not None:
        auxiliary = stream.auxiliary if auxiliary is None else stream.auxiliary + auxiliary
    return Mixed(given.rows, auxiliary, stream.statistics + given.statistics)


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


class HeadWidths(NamedTuple):
    """Channels of one head of a mixer, of which generation keeps those of each position."""

    query_key: int  # D, of a query and of a key; 0 where its scores are no products
    value: int  # Dv
    in_kernels: bool = True  # whether the attention kernels read them, and not operations of the mixer's own
    kept_heads: int | None = None  # of keys and values; None: as many as of queries


class MixerConfig(Protocol):
    """One mixer as the configuration asks for it. A frozen, hashable value: equal ones make equal modules.

    One with a true ``within_documents`` makes a module that has ``patterns``, one a head, and takes a fourth argument,
    ``Documents``: so none of several documents in a context sees another. One with a true ``divides_contexts`` makes a
    module that heeds its ``division``; without it, no run lets processes share a context. One with a true
    ``exchanges_keys`` can leave queries where they are; others need heads that the processes divide.
    """

    @property
    def has_queries(self) -> bool:
        """Whether rows are projected to queries and keys, which options of the network normalise, turn and narrow."""
        ...

    def check(self, network: NetworkConfig, context: int) -> None:
        """Raise ConfigError, its paths relative to the mixer's object, where a context of this length does not fit."""
        ...

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        """Which positions each head may read, of the first heads; those after them choose by content."""
        ...

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """What each head multiplies, and whether it asks the attention kernels to."""
        ...

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> nn.Module:
        """The module; ``rotary`` is shared by all of a model."""
        ...


class FeedForwardConfig(StrictModel):
    """One feed-forward as the configuration asks for it; likewise."""

    @abstractmethod
    def make(self, network: NetworkConfig) -> nn.Module:
        """The module."""


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
