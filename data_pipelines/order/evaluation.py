"""A split read once from beginning to end: for scores that count every byte exactly once.

Letters: N positions a context, B contexts a batch, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Cut
from longstride.data_pipelines.order.windows import Windows, cut_windows
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, SampleReader, open_folder

PADDING_ID = -1  # the sample id of a row that only fills up a batch


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """One rank's part of one evaluation step. What a row has beyond its length is 0 and not to be scored.

    What a batch holds follows from the split, the cut and B alone: the number of ranks only says who gets which.
    """

    tokens: Tensor  # (B, N) uint8
    lengths: Tensor  # (B,) int64, bytes of the split in each row; 0 where a row only fills up the batch
    scored_from: Tensor  # (B,) int64: the bytes of the row before it are scored in the row before, and only seen here
    sample_ids: Tensor  # (B,) int64: the context's number within the split, PADDING_ID for a row without bytes

    @property
    def scored(self) -> Tensor:
        """(B, N) bool: True on the bytes to be scored."""
        position = torch.arange(self.tokens.shape[1])
        return (position >= self.scored_from[:, None]) & (position < self.lengths[:, None])


def evaluation_contexts(
    location: str | Path | DataFolder,
    split: str = "validation",
    *,
    context: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    cut: Cut | None = None,
    limit: int | None = None,
    min_context: int = 0,
    remote: RemoteSettings | None = None,
) -> Iterator[EvaluationBatch]:
    """The split in canonical order, cut into contexts of N bytes; each byte scored on one rank, once, whatever the hop.

    Context k of those that are taken is row ``k % B`` of batch ``k // B``; every rank gets a run of the batches, the
    same number of them, filled up with empty ones. ``limit`` takes that many contexts, evenly spread over the split.
    With a ``min_context`` they overlap, so that each scored byte sees at least that many before it, or all that its
    stream has (see windows.py). Raises DataError for arguments out of range and for any damage.
    """
    check_arguments(batch_size, rank, world_size, limit)
    windows = cut_windows(open_folder(location, remote).split(split), context, cut or Cut(), min_context)
    count = windows.count if limit is None else min(limit, windows.count)
    share = -(-count // (batch_size * world_size))  # batches
    own = range(min(rank * share * batch_size, count), min((rank + 1) * share * batch_size, count))
    numbers = (place * windows.count // count for place in own)
    return _batches(windows, context, numbers, batch_size, share)


def read_context(
    location: str | Path | DataFolder,
    split: str,
    number: int,
    *,
    context: int,
    cut: Cut | None = None,
    remote: RemoteSettings | None = None,
) -> Tensor:
    """Context ``number`` of a split, as ``evaluation_contexts`` numbers them: (n,) uint8, n from 1 to N.

    Raises DataError where there is no such context, and for any damage.
    """
    windows = cut_windows(open_folder(location, remote).split(split), context, cut or Cut(), 0)
    if not 0 <= number < windows.count:
        raise no_such_context(number, windows.count)
    row = np.zeros(context, dtype=np.uint8)
    length, _ = windows.read(SampleReader(windows.split), number, row)
    return torch.from_numpy(row[:length])


def no_such_context(number: int, count: int) -> DataError:
    """What is wrong with the number of a context of a split that has ``count``."""
    nearest = min(max(number, 0), count - 1)
    return DataError(
        f"context_number={number}: must be from 0 to {count - 1}, a context of the split; nearest {nearest}"
    )


def check_arguments(batch_size: int, rank: int, world_size: int, limit: int | None) -> None:
    """Raises DataError for arguments of an evaluation that are out of range."""
    least = {"batch_size": 1, "world_size": 1, "rank": 0, "limit": 1}
    values = {"batch_size": batch_size, "world_size": world_size, "rank": rank, "limit": limit}
    for name, value in values.items():
        if value is not None and value < least[name]:
            raise DataError(f"{name}={value}: must be at least {least[name]}")
    if rank >= world_size:
        raise DataError(f"rank={rank}: must be less than the world size {world_size}")


def split_bytes(location: str | Path | DataFolder, split: str) -> Iterator[bytes]:
    """The content of a split in canonical order, a shard at a time. Raises DataError for any damage."""
    opened = open_folder(location).split(split)
    reader = SampleReader(opened)
    for number, shard in enumerate(opened.shards):
        content = np.empty(shard.content_bytes, dtype=np.uint8)
        reader.fill(number, 0, content)
        yield content.tobytes()


def _batches(
    windows: Windows, context: int, numbers: Iterator[int], batch_size: int, num_batches: int
) -> Iterator[EvaluationBatch]:
    reader = SampleReader(windows.split)
    for _ in range(num_batches):
        tokens = np.zeros((batch_size, context), dtype=np.uint8)
        lengths, scored_from = np.zeros((2, batch_size), dtype=np.int64)
        ids = np.full(batch_size, PADDING_ID, dtype=np.int64)
        for row, number in enumerate(islice(numbers, batch_size)):
            lengths[row], scored_from[row] = windows.read(reader, number, tokens[row])
            ids[row] = number
        yield EvaluationBatch(*map(torch.from_numpy, (tokens, lengths, scored_from, ids)))
