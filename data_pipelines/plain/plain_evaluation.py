"""A split of plain WebDataset shards read once, for scores that count every byte exactly once.

Letters: N positions a context, B contexts a batch, W ranks.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import (
    PADDING_ID,
    Cut,
    EvaluationBatch,
    no_such_context,
    settle_windows,
)
from longstride.data_pipelines.order.evaluation import check_arguments
from longstride.data_pipelines.plain.cutting import CutContext, DocumentCutter, PackedCutter
from longstride.data_pipelines.plain.plain_shards import PlainSplit, Turn


def plain_contexts(
    location: str | Path,
    split: str = "validation",
    *,
    context: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    cut: Cut | None = None,
    limit: int | None = None,
    min_context: int = 0,
    modality: str = "text",
    extension: str | None = None,
) -> Iterator[EvaluationBatch]:
    """The shards by name, their samples in sequence, cut into contexts of N bytes; each byte on one rank, once.

    Nothing tells how much a split holds before it is read, so every rank reads all of it and keeps its own rows:
    context k is row ``k % B`` of batch ``k // (B * W)`` of rank ``k // B % W``. Every rank gets the same number of
    batches of the same shape (B, N), which hold the same rows for any number of ranks. ``limit`` takes the first that
    many contexts; with a ``min_context`` they overlap as windows.py has it. Raises DataError for arguments out
    of range and, while it is iterated, for a shard or sample that cannot be read and for a split without bytes.
    """
    check_arguments(batch_size, rank, world_size, limit)
    opened = PlainSplit(location, split, modality, extension)
    settled = settle_windows(cut or Cut(), context, min_context, opened.modality, opened.properties)
    cutter = (
        PackedCutter(context, settled.separator, min_context)
        if settled.hop is None
        else DocumentCutter(context, settled.hop)
    )
    once = (Turn(number, shard) for number, shard in enumerate(opened.shards))
    contexts = islice(cutter.cut(opened.documents(once)), limit)
    return _batches(contexts, opened, context, batch_size, rank, world_size)


def plain_context(
    location: str | Path,
    split: str,
    number: int,
    *,
    context: int,
    cut: Cut | None = None,
    modality: str = "text",
    extension: str | None = None,
) -> torch.Tensor:
    """Context ``number`` of a split, as ``plain_contexts`` numbers them: (n,) uint8, n from 1 to N.

    All before it is read. Raises DataError where there is no such context, and for what cannot be read.
    """
    if number < 0:  # how many there are is known only at the end
        raise DataError(f"context_number={number}: must be at least 0")
    limit = number + 1
    count = 0
    for batch in plain_contexts(
        location, split, context=context, batch_size=1, cut=cut, limit=limit, modality=modality, extension=extension
    ):
        if count == number:
            return batch.tokens[0, : int(batch.lengths[0])]
        count += 1
    raise no_such_context(number, count)


def _batches(
    contexts: Iterator[CutContext], split: PlainSplit, context: int, batch_size: int, rank: int, world_size: int
) -> Iterator[EvaluationBatch]:
    step = batch_size * world_size
    own: list[tuple[int, CutContext]] = []
    number = -1
    for number, each in enumerate(contexts):
        if number % step // batch_size == rank:
            own.append((number, each))
        if number % step == step - 1:
            yield _batch(own, context, batch_size)
            own = []
    if number < 0:
        raise DataError(f"{split.location}: the samples of split {split.name!r} hold no bytes; add data")
    if (number + 1) % step:
        yield _batch(own, context, batch_size)


def _batch(own: list[tuple[int, CutContext]], context: int, batch_size: int) -> EvaluationBatch:
    tokens = np.zeros((batch_size, context), dtype=np.uint8)
    lengths = np.zeros(batch_size, dtype=np.int64)
    scored_from = np.zeros(batch_size, dtype=np.int64)
    ids = np.full(batch_size, PADDING_ID, dtype=np.int64)
    for row, (number, each) in enumerate(own):
        tokens[row], lengths[row], scored_from[row], ids[row] = each.tokens, each.length, each.repeated, number
    return EvaluationBatch(*map(torch.from_numpy, (tokens, lengths, scored_from, ids)))
