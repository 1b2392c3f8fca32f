"""Bytes of a split, read in any range through WebDataset and checked against the index before they are handed on.

A tar stream may begin at any member's header. A read of ``[start, end)`` therefore opens each shard at the member that
holds its first byte and streams from there: the cost of a resume does not depend on where it is.
"""

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import webdataset as wds
from webdataset.tariterators import group_by_keys, tar_file_expander

from data_pipelines.errors import DataError
from data_pipelines.lanes import shard_order
from data_pipelines.modalities import modality_named
from data_pipelines.shards import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    ShardRecord,
    check_shard_file,
    load_index,
    load_manifest,
    member_bytes,
)

READ_AHEAD_BYTES = 25 * 10_240  # whole records of tarfile's own reads
_KEPT_LAYOUTS = 4  # epochs whose shard order is held: lanes read one epoch and what the one before it left over
_REPAIR = "`longstride data verify` lists all damage; build the folder again or fetch it again"


class ShardWindow:
    """The bytes ``[start, end)`` of a file as a stream that keeps no file open between reads.

    Many lanes read many shards at once: open files would run into the system's limit, buffers do not.
    """

    def __init__(self, path: Path, start: int, end: int) -> None:
        self._path, self._at, self._end = path, start, end
        self._buffer, self._used = b"", 0

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, fewer at the end of the buffer; none only at the end of the window."""
        if self._used == len(self._buffer):
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._at)
                self._buffer = file.read(min(READ_AHEAD_BYTES, self._end - self._at))
            self._at += len(self._buffer)
            self._used = 0
        content = self._buffer[self._used : self._used + size]
        self._used += len(content)
        return content


@dataclass(frozen=True, slots=True)
class Visit:
    """A run of payload bytes within one shard."""

    shard: ShardRecord
    start: int  # payload bytes of the shard before the run
    end: int


class SplitReader:
    """The bytes of one split, in canonical order or permuted by (seed, epoch).

    Raises DataError where the folder is no data folder or lacks the split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = Path(folder)
        self.manifest = load_manifest(self.folder)
        if split not in self.manifest.splits:
            raise DataError(
                f"{self.folder / MANIFEST_NAME}: no split {split!r}; it holds {', '.join(self.manifest.splits)}"
            )
        self.split = split
        self.shards = self.manifest.splits[split].shards
        self.total_bytes = sum(shard.payload_bytes for shard in self.shards)
        self._modality = modality_named(self.manifest.modality)
        self._layouts: dict[tuple[int | None, int], tuple[np.ndarray, np.ndarray]] = {}

    def read(self, start: int, end: int, seed: int | None) -> Iterator[np.ndarray]:
        """Bytes ``[start, end)`` of the endless stream of ``seed`` (None: canonical order) as (n,) uint8 arrays.

        Raises DataError, naming shard and sample, before a damaged sample would be handed on.
        """
        return iter(wds.DataPipeline(partial(self._visits, start, end, seed), self._read_visits))

    def _visits(self, start: int, end: int, seed: int | None) -> Iterator[Visit]:
        while start < end:
            epoch, offset = divmod(start, self.total_bytes)
            order, edges = self._layout(seed, epoch)
            place = int(np.searchsorted(edges, offset, side="right")) - 1
            shard = self.shards[order[place]]
            within = offset - int(edges[place])
            size = min(end - start, shard.payload_bytes - within)
            yield Visit(shard, within, within + size)
            start += size

    def _layout(self, seed: int | None, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards' order in an epoch, and the bytes before each of them and before the end: (n,), (n + 1,) int64."""
        if (seed, epoch) not in self._layouts:
            while len(self._layouts) >= _KEPT_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            count = len(self.shards)
            order = np.arange(count) if seed is None else shard_order(count, seed, epoch)
            sizes = np.array([shard.payload_bytes for shard in self.shards], dtype=np.int64)
            self._layouts[seed, epoch] = order, np.concatenate([[0], np.cumsum(sizes[order])])
        return self._layouts[seed, epoch]

    def _read_visits(self, visits: Iterable[Visit]) -> Iterator[np.ndarray]:
        for visit in visits:
            check_shard_file(self.folder, visit.shard)
            index = load_index(self.folder, visit.shard)
            ends = np.cumsum(index["length"], dtype=np.int64)
            first = int(np.searchsorted(ends, visit.start, side="right"))
            last = int(np.searchsorted(ends, visit.end, side="left"))
            before = int(ends[first]) - int(index["length"][first])
            for payload in _read_payloads(
                self.folder / visit.shard.name, visit.shard, index, range(first, last + 1), self._modality.extension
            ):
                sample = self._modality.decode(payload)
                yield sample[max(visit.start - before, 0) : visit.end - before]
                before += len(sample)


def check_split(folder: Path, split: str) -> None:
    """Raises DataError unless every index of a split is whole and every shard begins with its own first sample.

    It reads the indexes and 512 bytes a shard: enough to tell a file that is no shard before a run begins.
    """
    reader = SplitReader(folder, split)
    extension = modality_named(reader.manifest.modality).extension
    for shard in reader.shards:
        load_index(reader.folder, shard)
        path = reader.folder / shard.name
        try:
            with path.open("rb") as file:
                header = file.read(BLOCK_BYTES)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({_reason(error)}); {_REPAIR}") from error
        name = f"{shard.key(0)}.{extension}"
        if header[257:262] != b"ustar" or header[:100].rstrip(b"\0") != name.encode():
            raise DataError(f"{path}: is not this shard: it does not begin with sample {name}; {_REPAIR}")


def _read_payloads(
    path: Path, shard: ShardRecord, index: np.ndarray, numbers: range, extension: str
) -> Iterator[bytes]:
    """Payloads of the samples ``numbers`` of a shard, each checked before it is handed on.

    WebDataset ends a shard early at a broken header and hands on a payload with a flipped bit, both without an error:
    so each key, length and CRC-32 is held against the index, and the end is not believed.
    """
    rows = index[numbers.start : numbers.stop].tolist()
    end = rows[-1][0] + member_bytes(rows[-1][2])
    source = {"url": str(path), "stream": ShardWindow(path, rows[0][0], end)}
    samples = group_by_keys(tar_file_expander([source]))
    for number, (_, _, length, crc32) in zip(numbers, rows, strict=True):
        key = shard.key(number)
        try:
            sample = next(samples, None)
        except Exception as error:  # whatever it is that tarfile or WebDataset stumbles over, the shard is damaged
            raise DataError(f"{path}: cannot be read at sample {key} ({_reason(error)}); {_REPAIR}") from error
        if sample is None:
            raise DataError(f"{path}: ends or breaks off before sample {key}; {_REPAIR}")
        if sample["__key__"] != key:
            raise DataError(f"{path}: holds sample {sample['__key__']} in place of {key}; {_REPAIR}")
        payload = sample.get(extension)
        if payload is None or len(payload) != length:
            raise DataError(f"{path}: sample {key} does not have its {length} bytes of .{extension}; {_REPAIR}")
        if zlib.crc32(payload) != crc32:
            raise DataError(f"{path}: sample {key} is damaged (CRC-32); {_REPAIR}")
        yield payload


def _reason(error: Exception) -> str:
    """One line on what went wrong; WebDataset adds objects of its own to an error's arguments."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error.args[0]) if error.args else type(error).__name__
