"""Read a split once from beginning to end, for scores that count every byte exactly once.

Letters: N positions of a window, B windows of a batch, W ranks, M bytes that neighbouring windows share, L lanes.

Windows are contexts that overlap by M bytes, so every scored byte has at least M bytes before it. They begin every
N - M bytes of a stream. Packed documents are a single stream; otherwise each document is a stream. A document that is
longer than a shard is a separate stream in each shard. All of the first window of a stream is scored. Every other
window is scored from byte M on, because the previous window has scored the first M bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.contexts import Contexts, Cut, cut_contexts
from longstride.data_pipelines.shards import DataFolder, SampleReader, Split

PADDING_ID = -1  # the sample id of a padding row


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """One rank's part of one evaluation step. Positions of a row beyond its length are 0 and not scored.

    A batch only depends on the split, the cut and B. The number of ranks only decides which rank gets it.
    """

    tokens: Tensor  # (B, N), with the types of ``Batch``
    lengths: Tensor  # (B,) int64, bytes of the split in each row; 0 for a padding row
    scored_from: Tensor  # (B,) int64: first scored position of a row; earlier ones are only its context
    sample_ids: Tensor  # (B,) int64: the context's number in the split, PADDING_ID for a padding row
    begins: Tensor | None = None  # (B, N) bool, as in ``Batch``; each padding position begins a document
    separators: Tensor | None = None  # (B, N) bool, True on separators; None: there are none
    inputs: Tensor | None = None  # (B, N), as in ``Batch``
    predicted: Tensor | None = None  # (B, N), as in ``Batch``: no other tokens are scored
    labels: Tensor | None = None  # (B, 1), as in ``Batch``, -1 for a padding row; they are scored instead of tokens
    goes_on: Tensor | None = None  # (B,) bool, as in ``Batch``; None: there are no lanes

    @property
    def scored(self) -> Tensor:
        """True on scored bytes, (B, N) bool, or on scored labels, (B, 1)."""
        if self.labels is not None:
            return self.labels >= 0
        position = torch.arange(self.tokens.shape[1])
        scored = (position >= self.scored_from[:, None]) & (position < self.lengths[:, None])
        return scored if self.predicted is None else scored & (self.predicted > 0)

    @property
    def content(self) -> Tensor:
        """True on scored bytes that are data, not separators, as ``scored``. Predicted separators count too."""
        return self.scored if self.separators is None or self.predicted is not None else self.scored & ~self.separators


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
    lanes: int | None = None,
) -> Iterator[EvaluationBatch]:
    """Yield a split in canonical order, in contexts of N bytes. Each byte is scored once, on one rank, for any hop.

    Context k is row ``k % B`` of batch ``k // B``. Every rank gets consecutive batches, the same number on each, padded
    with empty ones. ``limit`` selects so many contexts, evenly spread over the split. With ``min_context`` they
    overlap: each scored byte sees at least so many bytes before it, or all of its stream (see the top of this file).

    With ``lanes``, for models that carry state, the contexts are cut into L equal lanes, of which ``limit`` selects the
    beginnings. B lanes are read side by side from their beginning to their end, then the next B.

    Raises DataError for arguments out of range and for damage.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("world_size", world_size, 1),
        ("rank", rank, 0),
        ("limit", limit, 1),
        ("lanes", lanes, 1),
    ):
        if value is not None and value < least:
            raise DataError(f"{name}={value}: must be at least {least}")
    if rank >= world_size:
        raise DataError(f"rank={rank}: must be less than the world size {world_size}")
    windows = _windows(DataFolder.at(location).split(split), context, cut or Cut(), min_context)
    count = windows.count if limit is None else min(limit, windows.count)
    if lanes is None:
        share = -(-count // (batch_size * world_size))  # batches
        within = range(min(rank * share * batch_size, count), min((rank + 1) * share * batch_size, count))
        places: Iterator[_Place] = (_Place(place * windows.count // count) for place in within)
        return _batches(windows, places, batch_size, share, min_context)
    lanes = min(lanes, count)
    share = -(-lanes // (batch_size * world_size))  # groups of B lanes
    starts = [lane * windows.count // lanes for lane in range(lanes)]
    ends = [*starts[1:], windows.count]
    sizes = [
        min(ends[lane] - starts[lane], (lane + 1) * count // lanes - lane * count // lanes) for lane in range(lanes)
    ]
    places = (
        _Place(starts[lane] + step, step > 0) if lane < lanes and step < sizes[lane] else _Place(None)
        for group in range(rank * share, (rank + 1) * share)
        for step in range(max(sizes))
        for lane in range(group * batch_size, (group + 1) * batch_size)
    )
    return _batches(windows, places, batch_size, share * max(sizes), min_context, has_lanes=True)


class _Place(NamedTuple):
    """A row of a batch: the number of its window, None for padding, and whether the row before it is of its lane."""

    number: int | None
    in_lane: bool = False


def read_context(
    location: str | Path | DataFolder, split: str, number: int, *, context: int, cut: Cut | None = None
) -> Tensor:
    """Read context ``number`` of a split in canonical order: (n,) tokens as in ``Batch``, n from 1 to N.

    If documents are kept apart, only the first document of the context is returned.

    Raises DataError if there is no such context, and for damage.
    """
    windows = _windows(DataFolder.at(location).split(split), context, cut or Cut(), 0)
    if not 0 <= number < windows.count:
        nearest = min(max(number, 0), windows.count - 1)
        rule = f"must be from 0 to {windows.count - 1}, a context of the split; nearest {nearest}"
        raise DataError(f"context_number={number}: {rule}")
    rows, lengths = np.zeros((1, context), dtype=windows.dtype), np.zeros(1, dtype=np.int64)
    windows.read(SampleReader(windows.split), number, rows, lengths, None)
    length = int(lengths[0])
    if windows.is_apart:
        further = windows.begins(number, 1, None)[0, 1:].nonzero()[0]
        length = 1 + int(further[0]) if len(further) else length
    return torch.from_numpy(rows[0, :length])


def split_bytes(location: str | Path | DataFolder, split: str) -> Iterator[bytes]:
    """Yield the content of a split in canonical order, one shard at a time. Raises DataError for damage."""
    opened = DataFolder.at(location).split(split)
    reader = SampleReader(opened)
    for number, shard in enumerate(opened.shards):
        content = np.empty(shard.content_bytes, dtype=np.uint8)
        reader.fill(number, 0, content)
        yield content.tobytes()


def _windows(split: Split, context: int, cut: Cut, min_context: int) -> Contexts:
    """Divide a split into windows in canonical order. The cut is that of training except for its hop.

    Raises DataError if they do not fit the documents.
    """
    if not 0 <= min_context < max(context, 1):
        nearest = min(max(min_context, 0), context - 1)
        rule = f"must be from 0 to {context - 1}, less than the model's context; nearest {nearest}"
        raise DataError(f"min_context={min_context}: {rule}")
    if min_context and split.modality.document_bytes(split.manifest.properties) is not None:
        rule = f"must be 0, because every {split.modality.name} of this set fills one context, with nothing before it"
        raise DataError(f"min_context={min_context}: {rule}")
    return cut_contexts(split, context, replace(cut, hop=None), hop=context - min_context)


def _batches(
    windows: Contexts,
    places: Iterator[_Place],
    batch_size: int,
    num_batches: int,
    min_context: int,
    has_lanes: bool = False,
) -> Iterator[EvaluationBatch]:
    reader, shape = SampleReader(windows.split), (batch_size, windows.context)
    for _ in range(num_batches):
        tokens = np.zeros(shape, dtype=windows.dtype)
        lengths, scored_from = np.zeros((2, batch_size), dtype=np.int64)
        ids = np.full(batch_size, PADDING_ID, dtype=np.int64)
        labels = np.full((batch_size, 1), -1, dtype=np.int64) if windows.is_labelled else None
        begins = np.ones(shape, dtype=bool) if windows.is_apart else None
        separators = np.zeros(shape, dtype=bool) if windows.has_separators else None
        goes_on = torch.zeros(batch_size, dtype=torch.bool) if has_lanes else None
        for row, (number, in_lane) in enumerate(islice(places, batch_size)):
            if number is None:
                continue
            within = slice(row, row + 1)
            windows.read(reader, number, tokens[within], lengths[within], None)
            scored_from[row] = min_context if windows.goes_on(number, None) else 0
            ids[row] = number
            if labels is not None:
                labels[within] = windows.labels([number], None)
            if begins is not None:
                begins[within] = windows.begins(number, 1, None)
            if separators is not None:
                separators[within] = windows.separators(number, 1, None)
            if goes_on is not None:
                begun = begins is not None and bool(begins[row, 0])
                goes_on[row] = in_lane and windows.goes_on(number, None) and not begun
        yield EvaluationBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(lengths),
            torch.from_numpy(scored_from),
            torch.from_numpy(ids),
            begins=None if begins is None else torch.from_numpy(begins),
            separators=None if separators is None else torch.from_numpy(separators),
            labels=None if labels is None else torch.from_numpy(labels),
            goes_on=goes_on,
        )
