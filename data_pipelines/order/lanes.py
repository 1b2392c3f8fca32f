"""The order of samples: pure integer arithmetic, no input or output.

T units of an epoch, P units a context, G contexts a global batch. Where documents are laid end to end a unit is a byte
and P the context's length; where each document has contexts of its own a unit is a context and P is 1 (contexts.py).

In epoch e the shards are permuted by (seed, e) and their units laid end to end, so that unit ``g = e * T + offset`` of
an endless stream is defined for every g. Context k covers the units ``[k * P, (k + 1) * P)``; its number k is the
sample id. Epoch e holds the whole global batches that end within it: ``F(e) = floor(e * T / (P * G))`` batches come
before it, and its contexts ``F(e) * G .. F(e + 1) * G - 1`` are cut into G equal lanes. Slot j of every step reads the
next context of lane j. Neighbours in a lane are often of one file, so each lane is cut into blocks, and the contexts
of a block are read in an order permuted by (seed, epoch, lane, block): as a shuffle buffer would, but known beforehand.

What is left over at the end of an epoch is therefore the beginning of the next epoch's lanes: nothing is dropped, a
packed context may straddle two epochs, and every place is found from the batch's number without walking there. The
number of processes does not occur: rank r of W reads lanes ``r * G / W .. (r + 1) * G / W - 1``.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from longstride.data_pipelines.errors import DataError

# The last word of Philox's counter sets the uses of (seed, epoch) apart.
_SHARD_ORDER, _BLOCK_ORDER, _SUBSTITUTES = 1, 2, 3
_NUM_SUBSTITUTES = 32  # tried before a data set counts as lost


@dataclass(frozen=True, slots=True)
class StreamState:
    """The name of the next global batch: batch ``step`` (counted from 0) of epoch ``epoch``.

    Raises DataError for values that are no state.
    """

    fingerprint: str  # of the data set, split, cutting into contexts and shuffle: see stream.py
    seed: int
    epoch: int
    step: int  # within the epoch
    global_batch: int  # contexts a step, over all ranks

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("epoch", 0), ("step", 0), ("global_batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise DataError(f"state.{name}={value!r}: must be an integer of at least {least}")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise DataError(f"state.fingerprint={self.fingerprint!r}: must be a non-empty string")

    def check_belongs(self, own: "StreamState") -> None:
        """Raises DataError unless this names a batch of the stream that ``own`` is any state of."""
        for name, rule in (
            ("fingerprint", "the state belongs to another data set, split, cutting into contexts or shuffle"),
            ("seed", "the state belongs to another order of the data"),
            ("global_batch", "the state counts steps of another size"),
        ):
            found, wanted = getattr(self, name), getattr(own, name)
            if found != wanted:
                raise DataError(
                    f"state.{name}={found!r}: this stream's is {wanted!r}: {rule}; resume with the run's own"
                )

    def to_json(self) -> dict[str, Any]:
        """A dict that the json module writes."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "StreamState":
        """The state that ``to_json`` gave. Raises DataError for missing or unknown keys and for wrong values."""
        names = [field.name for field in fields(cls)]
        if not isinstance(content, dict) or set(content) != set(names):
            found = sorted(map(str, content)) if isinstance(content, dict) else content
            raise DataError(f"state={found!r}: must hold exactly {', '.join(names)}")
        return cls(**content)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where each context of each step lies. Raises DataError where no context fits the split."""

    total_units: int  # T, of one epoch
    context_units: int  # P
    global_batch: int  # G, contexts

    def __post_init__(self) -> None:
        for name in ("context_units", "global_batch"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.total_units < self.context_units:
            raise DataError(
                f"context={self.context_units}: longer than the whole split of {self.total_units} bytes; "
                "add data or shorten the context"
            )

    @property
    def num_contexts(self) -> int:
        """Whole contexts of one epoch, T // P."""
        return self.total_units // self.context_units

    @property
    def batch_units(self) -> int:
        """Units of one global batch, P * G."""
        return self.context_units * self.global_batch

    def batches_before(self, epoch: int) -> int:
        """F(e): the number of global batches that end before epoch ``epoch`` begins."""
        return epoch * self.total_units // self.batch_units

    def steps_in(self, epoch: int) -> int:
        """Global batches of one epoch; 0 for an epoch in which no whole batch ends."""
        return self.batches_before(epoch + 1) - self.batches_before(epoch)

    def batch_number(self, epoch: int, step: int) -> int:
        """Global batches before step ``step`` of epoch ``epoch``, over all epochs."""
        return self.batches_before(epoch) + step

    def position(self, batch: int) -> tuple[int, int]:
        """(epoch, step) of the global batch ``batch``: the inverse of ``batch_number``, passing over empty epochs."""
        epoch = -(-(batch + 1) * self.batch_units // self.total_units) - 1  # the first with F(epoch + 1) > batch
        return epoch, batch - self.batches_before(epoch)

    def context_id(self, epoch: int, step: int, lane: int) -> int:
        """The number k of the context that slot ``lane`` of that step reads: units [k * P, (k + 1) * P)."""
        return self.batches_before(epoch) * self.global_batch + lane * self.steps_in(epoch) + step

    def contexts_of(self, epoch: int) -> range:
        """The numbers of the contexts that an epoch's steps read."""
        return range(self.batches_before(epoch) * self.global_batch, self.batches_before(epoch + 1) * self.global_batch)

    def of_rank(self, rank: int, world_size: int) -> range:
        """The lanes of one rank. Raises DataError where the ranks cannot have equally many."""
        if world_size < 1 or self.global_batch % world_size:
            nearest = "a world size of at least 1"
            if world_size >= 1:
                below = self.global_batch // world_size * world_size
                nearest = ", ".join(str(multiple) for multiple in (below, below + world_size) if multiple)
            raise DataError(
                f"global_batch={self.global_batch}: must be a multiple of the world size {world_size}; "
                f"nearest {nearest}"
            )
        if not 0 <= rank < world_size:
            raise DataError(f"rank={rank}: must be from 0 to {world_size - 1}, the world size being {world_size}")
        share = self.global_batch // world_size
        return range(rank * share, (rank + 1) * share)


def shard_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of ``count`` shards in an epoch: (count,) int64. Raises DataError for a seed beyond 64 bits."""
    return _permutation(count, seed, epoch, (0, 0, 0, _SHARD_ORDER))


def block_order(count: int, seed: int, epoch: int, lane: int, block: int) -> np.ndarray:
    """The permutation of the ``count`` contexts of a lane's block: (count,) int64."""
    # Philox counts its draws in the first word.
    return _permutation(count, seed, epoch, (0, lane, block, _BLOCK_ORDER))


def substitutes(choices: range, seed: int, epoch: int, context: int) -> list[int]:
    """The contexts of an epoch, best first, that may stand in for a damaged one: the same wherever it is asked."""
    words = _words(_NUM_SUBSTITUTES, seed, epoch, (0, context % 2**64, context // 2**64, _SUBSTITUTES))
    return [choices[int(word) % len(choices)] for word in words]


def _permutation(count: int, seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.ndarray:
    """The stable argsort of as many raw words."""
    return np.argsort(_words(count, seed, epoch, counter), kind="stable").astype(np.int64)


def _words(count: int, seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.ndarray:
    """The first ``count`` raw 64-bit words of Philox-4x64-10 with the key (seed, epoch): (count,) uint64.

    Numpy keeps the raw words of its bit generators for ever, unlike the methods of ``Generator``.
    """
    if not 0 <= seed < 2**64:
        raise DataError(f"seed={seed}: must be from 0 to 2**64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)).random_raw(count)
