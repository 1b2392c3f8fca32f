"""A split read once from beginning to end: for scores that count every byte exactly once.

Letters: N bytes a context, B contexts a batch, W ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_pipelines.errors import DataError
from data_pipelines.reading import SplitReader
from data_pipelines.stream import ByteCursor

PADDING_ID = -1  # the sample id of a row that only fills up a batch


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """One rank's part of one evaluation step. Masked positions hold 0 and are not to be scored."""

    tokens: Tensor  # (B, N) int64, bytes 0..255
    mask: Tensor  # (B, N) bool: True for a byte of the split
    sample_ids: Tensor  # (B,) int64: the context's number within the split, PADDING_ID for a row without bytes


def evaluation_contexts(
    folder: Path,
    split: str = "validation",
    *,
    context: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
) -> Iterator[EvaluationBatch]:
    """The split in canonical order, cut into contexts of N bytes, the last one padded; each byte on one rank, once.

    Every rank gets the same number of batches of the same shape (B, N). ``limit`` takes that many contexts, evenly
    spread over the split. Raises DataError for arguments out of range and for any damage.
    """
    least = {"context": 1, "batch_size": 1, "world_size": 1, "rank": 0, "limit": 1}
    values = {"context": context, "batch_size": batch_size, "world_size": world_size, "rank": rank, "limit": limit}
    for name, value in values.items():
        if value is not None and value < least[name]:
            raise DataError(f"{name}={value}: must be at least {least[name]}")
    if rank >= world_size:
        raise DataError(f"rank={rank}: must be less than the world size {world_size}")
    reader = SplitReader(folder, split)
    in_all = -(-reader.total_bytes // context)
    count = in_all if limit is None else min(limit, in_all)
    share = -(-count // world_size)
    own = range(min(rank * share, count), min((rank + 1) * share, count))
    numbers = [place * in_all // count for place in own]
    return _batches(reader, numbers, context, batch_size, num_batches=-(-share // batch_size))


def split_bytes(folder: Path, split: str) -> Iterator[bytes]:
    """The payload bytes of a split in canonical order, a sample at a time. Raises DataError for any damage."""
    reader = SplitReader(folder, split)
    return (piece.tobytes() for piece in reader.read(0, reader.total_bytes, seed=None))


def _batches(
    reader: SplitReader, numbers: list[int], context: int, batch_size: int, num_batches: int
) -> Iterator[EvaluationBatch]:
    rows = _rows(reader, numbers, context)
    for _ in range(num_batches):
        tokens = np.zeros((batch_size, context), dtype=np.int64)
        mask = np.zeros((batch_size, context), dtype=bool)
        ids = np.full(batch_size, PADDING_ID, dtype=np.int64)
        for place, (number, content) in enumerate(islice(rows, batch_size)):
            tokens[place, : len(content)] = content
            mask[place, : len(content)] = True
            ids[place] = number
        yield EvaluationBatch(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(ids))


def _rows(reader: SplitReader, numbers: list[int], context: int) -> Iterator[tuple[int, np.ndarray]]:
    """(number, (n,) uint8) of each context, n being N save for the split's last; neighbours are read in one go."""
    cursor, following = ByteCursor(iter(())), -1
    for place, number in enumerate(numbers):
        if number != following:
            run_end = place
            while run_end + 1 < len(numbers) and numbers[run_end + 1] == numbers[run_end] + 1:
                run_end += 1
            end = min((numbers[run_end] + 1) * context, reader.total_bytes)
            cursor = ByteCursor(reader.read(number * context, end, seed=None))
        row = np.empty(min(context, reader.total_bytes - number * context), dtype=np.uint8)
        cursor.fill(row)
        following = number + 1
        yield number, row
