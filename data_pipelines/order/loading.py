"""The rows of one rank's steps, read here or ahead by worker processes.

Workers share out the lanes, not the steps: each lane is read once, in sequence, by one process, and every worker's
share of a step is asked for in turn. So the rows are the same with any number of workers.
"""

import signal
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order.damage import Substitution
from longstride.data_pipelines.order.lanes import Lanes


@dataclass(frozen=True, slots=True)
class Rows:
    """Some lanes' contexts of one step."""

    tokens: np.ndarray  # (lanes, N) uint8
    lengths: np.ndarray  # (lanes,) int64
    sample_ids: np.ndarray  # (lanes,) int64
    substitutions: tuple[Substitution, ...]


class RowsReader(Protocol):
    """Reads some rows of every step."""

    def take(self, epoch: int, step: int) -> Rows:
        """The rows of a step, steps ascending."""


def shared_out(rows: Sequence[int], workers: int) -> list[Sequence[int]]:
    """The rows of each worker: as many shares as there are workers, and rows for; one share without workers."""
    count = max(1, min(workers, len(rows)))
    return [rows[each * len(rows) // count : (each + 1) * len(rows) // count] for each in range(count)]


def load_rows(
    readers: Sequence[RowsReader], lanes: Lanes, first_batch: int, workers: int, prefetch: int
) -> Generator[Rows, None, None]:
    """The rows of each step from global batch ``first_batch`` on, without end, of all readers in their order.

    With ``workers``, each reader has a process of its own. Raises DataError as the readers do.
    """
    if workers == 0:
        for rows in zip(*(_read(reader, lanes, first_batch) for reader in readers), strict=True):
            yield _joined(rows)
        return
    parts = _start(_Shares(readers, lanes, first_batch), len(readers), prefetch)
    try:
        while True:
            yield _joined([next(parts) for _ in readers])
    finally:
        # Workers end at once when the last reference goes, but only after seconds where a traceback still holds one.
        del parts


def _joined(step: Sequence[Rows | DataError]) -> Rows:
    """The rows of all readers. Raises the first error."""
    parts = []
    for part in step:
        if isinstance(part, DataError):
            raise DataError(str(part))
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return Rows(
        tokens=np.concatenate([part.tokens for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        sample_ids=np.concatenate([part.sample_ids for part in parts]),
        substitutions=tuple(each for part in parts for each in part.substitutions),
    )


def _read(reader: RowsReader, lanes: Lanes, first_batch: int) -> Iterator[Rows]:
    for batch in count(first_batch):
        yield reader.take(*lanes.position(batch))


class _Shares(IterableDataset):
    """What each worker reads: its share of every step. An error travels as a value, without a traceback."""

    def __init__(self, readers: Sequence[RowsReader], lanes: Lanes, first_batch: int) -> None:
        self._readers, self._lanes, self._first = readers, lanes, first_batch

    def __iter__(self) -> Iterator[Rows | DataError]:
        worker = get_worker_info()
        assert worker is not None
        try:
            yield from _read(self._readers[worker.id], self._lanes, self._first)
        except DataError as error:
            yield error


def _start(shares: _Shares, workers: int, prefetch: int) -> Iterator[Rows | DataError]:
    with warnings.catch_warnings():
        # It counts the cores of this machine; readers wait for the disk or the network for the most part.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return iter(
            DataLoader(
                shares,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=prefetch,
                collate_fn=_as_it_is,
                worker_init_fn=_ignore_stops,
                generator=torch.Generator(),  # else its seed would be drawn from the one that dropout draws from
            )
        )


def _ignore_stops(_: int) -> None:
    """What asks a run to stop reaches its whole group of processes; a worker is needed until its rank has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(rows: Any) -> Any:
    """Arrays are pickled: tensors would each hold a file of shared memory open."""
    return rows
