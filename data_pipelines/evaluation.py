"""A split read once from beginning to end: for scores that count every byte exactly once.

Letters: N positions a context, B contexts a batch, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_pipelines.contexts import Contexts, Cut, cut_contexts
from data_pipelines.errors import DataError
from data_pipelines.reading import DataFolder, SampleReader, open_folder
from data_pipelines.stores import RemoteSettings

PADDING_ID = -1  # the sample id of a row that only fills up a batch


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """One rank's part of one evaluation step. What a row has beyond its length is 0 and not to be scored."""

    tokens: Tensor  # (B, N) uint8
    lengths: Tensor  # (B,) int64, bytes of the split in each row; 0 where a row only fills up the batch
    sample_ids: Tensor  # (B,) int64: the context's number within the split, PADDING_ID for a row without bytes


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
    remote: RemoteSettings | None = None,
) -> Iterator[EvaluationBatch]:
    """The split in canonical order, cut into contexts of N bytes; each byte on one rank, once, whatever the hop.

    Every rank gets the same number of batches of the same shape (B, N). ``limit`` takes that many contexts, evenly
    spread over the split. Raises DataError for arguments out of range and for any damage.
    """
    check_arguments(batch_size, rank, world_size, limit)
    contexts = cut_contexts(open_folder(location, remote).split(split), context, replace(cut or Cut(), hop=None))
    in_all = -(-contexts.total_units // contexts.context_units)
    count = in_all if limit is None else min(limit, in_all)
    share = -(-count // world_size)
    own = range(min(rank * share, count), min((rank + 1) * share, count))
    numbers = (place * in_all // count for place in own)
    return _batches(contexts, numbers, batch_size, num_batches=-(-share // batch_size))


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
    contexts: Contexts, numbers: Iterator[int], batch_size: int, num_batches: int
) -> Iterator[EvaluationBatch]:
    reader = SampleReader(contexts.split)
    for _ in range(num_batches):
        tokens = np.zeros((batch_size, contexts.context), dtype=np.uint8)
        lengths = np.zeros(batch_size, dtype=np.int64)
        ids = np.full(batch_size, PADDING_ID, dtype=np.int64)
        for place, number in enumerate(islice(numbers, batch_size)):
            row = slice(place, place + 1)
            contexts.read(reader, number, tokens[row], lengths[row], None)
            ids[place] = number
        yield EvaluationBatch(torch.from_numpy(tokens), torch.from_numpy(lengths), torch.from_numpy(ids))
