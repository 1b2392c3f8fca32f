"""Batches of contexts for training, in an order that does not depend on how many ranks or workers read them.

Letters: N positions a context, G contexts a global batch, W ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order.contexts import Cut, cut_contexts, settle_cut
from longstride.data_pipelines.order.lanes import Lanes, StreamState
from longstride.data_pipelines.order.loading import StreamSettings, Substitution, load_rows
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's part of one step. What a row has beyond its length is padding, and not to be learned."""

    tokens: Tensor  # (G / W, N) uint8; of a palette of more than 256 colours int16, or int32; 0 outside of a span
    lengths: Tensor  # (G / W,) int64, positions of each context, 1 to N
    sample_ids: Tensor  # (G / W,) int64: the contexts' numbers, see lanes.py
    state: StreamState  # after this batch: a stream that is given it begins with the next one
    substitutions: tuple[Substitution, ...] = ()  # contexts of this rank that stand in for damaged ones
    begins: Tensor | None = None  # (G / W, N) bool, True where a document begins; None: each context is one whole
    separators: Tensor | None = None  # (G / W,) int64, how many of each context's positions are; None: none is

    @property
    def content(self) -> Tensor:
        """(G / W,) int64: positions of each context that hold the data, neither separators nor padding."""
        return self.lengths if self.separators is None else self.lengths - self.separators


class ByteStream(IterableDataset[Batch]):
    """An endless stream of one rank's batches; each ``iter()`` begins again at ``state``.

    ``location`` is a folder, a URL or an opened DataFolder. ``state`` (None: the beginning) may come from a run with
    other world size, workers, prefetch or span. A block of each lane is held in memory. With ``settings.span``, batches
    differ in their tokens alone: those outside of it are 0. Only what it meets is read and held, but under
    ``substitute``, where processes that share a context must all find its damage.

    A loader of torch's takes it with ``batch_size=None`` and at most one worker of its own; torchdata's, which asks for
    ``state_dict``, goes on where it stopped. More workers are asked for by ``settings.workers``.

    Raises DataError for a folder, split, batch, span or state that does not fit, and, while it is iterated, for any
    damage in what is read that ``settings.on_damage`` does not allow: before the damaged sample is delivered.
    """

    def __init__(
        self,
        location: str | Path | DataFolder,
        settings: StreamSettings,
        split: str = "train",
        *,
        remote: RemoteSettings | None = None,
        state: StreamState | None = None,
    ) -> None:
        self.settings = settings
        folder = DataFolder.at(location, remote)
        opened = folder.split(split)
        read = settings.span if settings.on_damage == "abort" else None  # see the head of loading.py
        self.contexts = cut_contexts(opened, settings.context, settings.cut, read)
        self.lanes = Lanes(self.contexts.total_units, self.contexts.context_units, settings.global_batch)
        self._own = self.lanes.of_rank(settings.rank, settings.world_size)
        self.contexts.split.reserve(len(self._own))
        self.fingerprint = stream_fingerprint(folder, split, settings.context, settings.cut, settings.shuffle_bytes)
        self.state = self._taken = self._state_at(0)
        if state is not None:
            self._begin_at(state)

    def _begin_at(self, state: StreamState) -> None:
        """Raises DataError for a state that does not fit."""
        state.check_belongs(self.state)
        steps = self.lanes.steps_in(state.epoch)
        if state.step >= steps:
            raise DataError(f"state.step={state.step}: epoch {state.epoch} has {steps} steps, counted from 0")
        self.state = self._taken = state

    def state_dict(self) -> dict[str, Any]:
        """The state after the batch that was taken last, as ``torchdata.stateful_dataloader`` asks for it."""
        return self._taken.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins at what ``state_dict`` gave. Raises DataError for a state that does not fit."""
        self._begin_at(StreamState.from_json(state))

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            rule = "each worker of the loader would read the same batches; at most 1, or settings.workers in its place"
            raise DataError(f"num_workers={worker.num_workers}: {rule}")
        self._taken = self.state
        first = self.lanes.batch_number(self.state.epoch, self.state.step)
        with closing(load_rows(self.contexts, self.lanes, self._own, self.settings, first)) as steps:
            for number, rows in enumerate(steps, start=first):
                self._taken = self._state_at(number + 1)
                yield Batch(
                    tokens=torch.from_numpy(self._in_place(rows.tokens)),
                    lengths=torch.from_numpy(rows.lengths),
                    sample_ids=torch.from_numpy(rows.sample_ids),
                    state=self._taken,
                    substitutions=rows.substitutions,
                    begins=None if rows.begins is None else torch.from_numpy(rows.begins),
                    separators=None if rows.separators is None else torch.from_numpy(rows.separators),
                )

    @property
    def properties(self) -> Mapping[str, int]:
        """What all documents have in common, such as a picture's height."""
        return self.contexts.split.manifest.properties

    def carried(self, epoch: int) -> str | None:
        """What an epoch reads first that earlier ones left, in words; None where they left nothing."""
        start = self.lanes.contexts_of(epoch).start * self.lanes.context_units
        left = epoch * self.lanes.total_units - start
        if not left:
            return None
        unit = "contexts" if self.lanes.context_units == 1 else "bytes"
        place = self.contexts.place(start, self.settings.seed)
        return f"{left:,} {unit} are carried over into epoch {epoch}, from {place} on"

    def _in_place(self, tokens: np.ndarray) -> np.ndarray:
        """(lanes, P), what was read -> (lanes, N): what was asked for, at its place."""
        if self.settings.span is None:
            return tokens
        span, before = self.settings.span.within(self.settings.context), self.contexts.span.start
        rows = np.zeros((len(tokens), self.settings.context), dtype=tokens.dtype)
        rows[:, span.start : span.stop] = tokens[:, span.start - before : span.stop - before]
        return rows

    def _state_at(self, batch: int) -> StreamState:
        epoch, step = self.lanes.position(batch)
        return StreamState(self.fingerprint, self.settings.seed, epoch, step, self.lanes.global_batch)


def stream_fingerprint(folder: DataFolder, split: str, context: int, cut: Cut, shuffle_bytes: int) -> str:
    """Compute the fingerprint of a training stream: the data set's, bound to what else decides the meaning of a step.

    No index is read. Raises DataError where the cut does not fit the documents.
    """
    manifest = folder.manifest
    settled = settle_cut(cut, context, modality_named(manifest.modality), manifest.properties, folder.palette)
    text = f"{manifest.fingerprint}/{split}/{settled.identity(context)}/{shuffle_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()
