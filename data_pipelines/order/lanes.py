"""The order of samples: integer arithmetic only, no input or output.

Letters: T units of an epoch, P units of a context, G contexts of a global batch. If documents are packed, a unit is a
byte and P is the length of a context. If each document has its own contexts, a unit is a context and P is 1
(contexts.py).

In epoch e the shards are permuted by (seed, e) and their units are concatenated. This defines unit ``g = e * T +
offset`` of an endless stream for every g. Context k covers the units ``[k * P, (k + 1) * P)``; its number k is the
sample id. Epoch e consists of the global batches that end within it: ``F(e) = floor(e * T / (P * G))`` batches come
before it. Its contexts ``F(e) * G .. F(e + 1) * G - 1`` are divided into G equal lanes, and slot j of every step reads
the next context of lane j. Neighbours in a lane are often from the same file. Each lane is therefore divided into
blocks, and the contexts of a block are permuted by (seed, epoch, lane, block). This works like a shuffle buffer, but
the order is known in advance.

The units that remain at the end of an epoch are the beginning of the next epoch's lanes. So no data are dropped, a
packed context may cross two epochs, and the position of a batch is computed from its number alone. The order does not
depend on the number of processes: rank r of W reads the lanes ``r * G / W .. (r + 1) * G / W - 1``.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from longstride.data_pipelines.errors import DataError

# The last word of Philox's counter separates the uses of (seed, epoch).
_SHARD_ORDER, _BLOCK_ORDER, _SUBSTITUTES = 1, 2, 3
_NUM_SUBSTITUTES = 32  # attempts before a data set counts as lost


@dataclass(frozen=True, slots=True)
class StreamState:
    """The position of the next global batch: batch ``step`` (counted from 0) of epoch ``epoch``.

    Raises DataError for invalid values.
    """

    fingerprint: str  # of the data set, split, division into contexts, and shuffle: see stream.py
    seed: int
    epoch: int
    step: int  # within the epoch
    global_batch: int  # contexts per step, over all ranks

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("epoch", 0), ("step", 0), ("global_batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise DataError(f"state.{name}={value!r}: must be an integer of at least {least}")
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise DataError(f"state.fingerprint={self.fingerprint!r}: must be a non-empty string")

    def check_belongs(self, stream: "StreamState") -> None:
        """Raise DataError unless this is a state of the same stream as ``stream``."""
        for name, rule in (
            ("fingerprint", "the state belongs to another data set, split, cutting into contexts or shuffle"),
            ("seed", "the state belongs to another order of the data"),
            ("global_batch", "the state counts steps of another size"),
        ):
            value, expected = getattr(self, name), getattr(stream, name)
            if value != expected:
                raise DataError(
                    f"state.{name}={value!r}: this stream has {expected!r}: {rule}; resume with the run's value"
                )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "StreamState":
        """Restore a state from ``to_json``. Raises DataError for missing or unknown keys and invalid values."""
        names = [field.name for field in fields(cls)]
        if not isinstance(content, dict) or set(content) != set(names):
            keys = sorted(map(str, content)) if isinstance(content, dict) else content
            raise DataError(f"state={keys!r}: must hold exactly {', '.join(names)}")
        return cls(**content)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The position of each context of each step. Raises DataError if the split is shorter than a context."""

    total_units: int  # T, of one epoch
    context_units: int  # P
    global_batch: int  # G

    def __post_init__(self) -> None:
        for name in ("context_units", "global_batch"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.total_units < self.context_units:
            rule = f"is longer than the split of {self.total_units} bytes; add data or shorten the context"
            raise DataError(f"context={self.context_units}: {rule}")

    @property
    def num_contexts(self) -> int:
        """Complete contexts of one epoch, T // P."""
        return self.total_units // self.context_units

    @property
    def batch_units(self) -> int:
        """Units of one global batch, P * G."""
        return self.context_units * self.global_batch

    def batches_before(self, epoch: int) -> int:
        """Return F(e), the number of global batches that end before epoch ``epoch`` begins."""
        return epoch * self.total_units // self.batch_units

    def steps_in(self, epoch: int) -> int:
        """Return the number of global batches of an epoch; 0 if none ends in it."""
        return self.batches_before(epoch + 1) - self.batches_before(epoch)

    def batch_number(self, epoch: int, step: int) -> int:
        """Return the number of global batches before a step, over all epochs."""
        return self.batches_before(epoch) + step

    def position(self, batch: int) -> tuple[int, int]:
        """Return (epoch, step) of a global batch, the inverse of ``batch_number``; empty epochs are skipped."""
        epoch = -(-(batch + 1) * self.batch_units // self.total_units) - 1  # the first with F(epoch + 1) > batch
        return epoch, batch - self.batches_before(epoch)

    def context_id(self, epoch: int, step: int, lane: int) -> int:
        """Return the number k of the context that slot ``lane`` of a step reads: units [k * P, (k + 1) * P)."""
        return self.batches_before(epoch) * self.global_batch + lane * self.steps_in(epoch) + step

    def contexts_of(self, epoch: int) -> range:
        """Return the numbers of the contexts that an epoch reads."""
        return range(self.batches_before(epoch) * self.global_batch, self.batches_before(epoch + 1) * self.global_batch)

    def of_rank(self, rank: int, world_size: int) -> range:
        """Return the lanes of a rank. Raises DataError if the lanes cannot be divided equally."""
        if world_size < 1 or self.global_batch % world_size:
            nearest = "a world size of at least 1"
            if world_size >= 1:
                below = self.global_batch // world_size * world_size
                nearest = ", ".join(str(multiple) for multiple in (below, below + world_size) if multiple)
            rule = f"must be a multiple of the world size {world_size}; nearest {nearest}"
            raise DataError(f"global_batch={self.global_batch}: {rule}")
        if not 0 <= rank < world_size:
            raise DataError(f"rank={rank}: must be from 0 to {world_size - 1}, less than the world size {world_size}")
        share = self.global_batch // world_size
        return range(rank * share, (rank + 1) * share)


def shard_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Permute ``count`` shards in an epoch, (count,) int64. Raises DataError for a seed beyond 64 bits."""
    return _permutation(count, seed, epoch, (0, 0, 0, _SHARD_ORDER))


def block_order(count: int, seed: int, epoch: int, lane: int, block: int) -> np.ndarray:
    """Permute the ``count`` contexts of a lane's block, (count,) int64."""
    # Philox counts its draws in the first word.
    return _permutation(count, seed, epoch, (0, lane, block, _BLOCK_ORDER))


def substitutes(choices: range, seed: int, epoch: int, context: int) -> list[int]:
    """List the contexts of an epoch that may substitute a damaged one, best first, the same on every rank."""
    words = _words(_NUM_SUBSTITUTES, seed, epoch, (0, context % 2**64, context // 2**64, _SUBSTITUTES))
    return [choices[int(word) % len(choices)] for word in words]


def _permutation(count: int, seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.ndarray:
    """Return the stable argsort of ``count`` raw words."""
    return np.argsort(_words(count, seed, epoch, counter), kind="stable").astype(np.int64)


def _words(count: int, seed: int, epoch: int, counter: tuple[int, int, int, int]) -> np.ndarray:
    """Return the first ``count`` raw 64-bit words of Philox-4x64-10 with the key (seed, epoch), (count,) uint64.

    NumPy guarantees the raw words of its bit generators for ever, unlike the methods of ``Generator``.
    """
    if not 0 <= seed < 2**64:
        raise DataError(f"seed={seed}: must be from 0 to 2**64 - 1")
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array(counter, dtype=np.uint64)).random_raw(count)
