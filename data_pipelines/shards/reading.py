"""Content bytes of a split, read in any range and checked against the index before they are handed on.

WebDataset expands a tar stream from its beginning, ends it early at a broken header and hands on a payload with a
flipped bit, both without an error. Here the index says where each member lies: any range costs the same to read, and
no byte of a member is believed, be it header, payload or padding, until its CRC-32 is the index's.
"""

import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards.index import (
    BLOCK_BYTES,
    index_file,
    load_index,
    load_manifest,
    member_ends,
    shard_file,
)
from longstride.data_pipelines.shards.manifest import MANIFEST_NAME, ShardRecord
from longstride.data_pipelines.shards.scatter import read_contents
from longstride.data_pipelines.stores import open_store

SCATTERED_BYTES = 2**14  # content of a sample, on the average, from which on it is worth a place of its own
_MOST_SCATTERED = 500  # samples: systems limit the parts of a read to 1,024
READ_BYTES = 2**19  # read at once where members are smaller
_LOST_SECONDS = 600.0
_KEPT_BYTES = 64 * 2**20  # of indexes held, and one for each lane at least
REPAIR = "`longstride data verify` lists all damage; build the folder again or fetch it again"


@dataclass(frozen=True)
class OpenShard:
    """A shard whose index is loaded and whose frame is checked."""

    record: ShardRecord
    path: Path
    index: np.ndarray  # (samples,) shards.INDEX_DTYPE
    tables: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # see contexts.DocumentContexts

    @property
    def held_bytes(self) -> int:
        """Memory of the index and of all that follows from it."""
        return len(self.index) * (self.index.itemsize + 4 * 8)

    @cached_property
    def ends(self) -> np.ndarray:
        """(samples,) int64: the offset behind each member."""
        return member_ends(self.index)

    @cached_property
    def edges(self) -> np.ndarray:
        """(samples + 1,) int64: content bytes before each sample, and in all."""
        return _edges(self.index["length"])

    @cached_property
    def edges_with_separators(self) -> np.ndarray:
        """(samples + 1,) int64: the same with one byte more behind each document."""
        return _edges(self.index["length"].astype(np.int64) + self.index["ends"])

    @cached_property
    def document_edges(self) -> np.ndarray:
        """(documents + 1,) int64: content bytes before each document's part in this shard, and in all."""
        return document_edges(self.index)


class DataFolder:
    """A data folder that is open: its manifest, read once, is what everything in it is held against.

    Raises DataError where the location holds no data folder.
    """

    def __init__(self, location: str | Path, remote: RemoteSettings | None = None) -> None:
        self.store = open_store(location, remote)
        self.manifest = load_manifest(self.store)
        self.store.bind(self.manifest.fingerprint)
        self._splits: dict[str, Split] = {}

    def split(self, name: str) -> "Split":
        """The shards of a split. Raises DataError where there is none of that name."""
        if name not in self.manifest.splits:
            raise DataError(
                f"{self.store.path_for_messages(MANIFEST_NAME)}: no split {name!r}; "
                f"it holds {', '.join(self.manifest.splits)}"
            )
        if name not in self._splits:
            self._splits[name] = Split(self, name)
        return self._splits[name]


def open_folder(location: "str | Path | DataFolder", remote: RemoteSettings | None = None) -> DataFolder:
    """The data folder at a location; one that is open already is what it is."""
    return location if isinstance(location, DataFolder) else DataFolder(location, remote)


class Split:
    """The shards of one split."""

    def __init__(self, folder: DataFolder, name: str) -> None:
        self.store, self.manifest, self.name = folder.store, folder.manifest, name
        self.shards = self.manifest.splits[name].shards
        self.modality = modality_named(self.manifest.modality)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lost: dict[int, tuple[str, float]] = {}  # why a shard cannot be opened, and until when
        self._least_open = 1
        self.tables: dict[tuple[int, int], np.ndarray] = {}  # see contexts.DocumentContexts

    def open(self, number: int) -> OpenShard:
        """Shard ``number`` of the split. Raises DataError where it or its index is missing or not what was built."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if number in self._lost and time.monotonic() < self._lost[number][1]:
            raise DataError(self._lost[number][0])
        try:
            opened = self._opened(self.shards[number])
        except DataError as error:
            # Else a lost remote shard would be asked for again by every context of it that something stands in for.
            self._lost[number] = str(error), time.monotonic() + _LOST_SECONDS
            raise
        self._open[number] = opened
        held = sum(shard.held_bytes for shard in self._open.values())
        while held > _KEPT_BYTES and len(self._open) > self._least_open:
            held -= self._open.popitem(last=False)[1].held_bytes
        return opened

    def _opened(self, record: ShardRecord) -> OpenShard:
        opened = OpenShard(record, self.store.local(shard_file(record)), load_index(self.store, record))
        if not self._ends_in_zeros(opened) and self.store.discard(shard_file(record)):
            opened = OpenShard(record, self.store.local(shard_file(record)), opened.index)
        if not self._ends_in_zeros(opened):
            path = self.store.path_for_messages(record.name)
            raise DataError(f"{path}: is damaged behind its last sample; {REPAIR}")
        return opened

    def _ends_in_zeros(self, shard: OpenShard) -> bool:
        """Whether nothing else stands behind the last member; all before it is under the samples' CRC-32."""
        try:
            with shard.path.open("rb") as file:
                file.seek(int(shard.ends[-1]))
                return not any(file.read())
        except OSError as error:
            path = self.store.path_for_messages(shard.record.name)
            raise DataError(f"{path}: cannot be read ({error.strerror}); {REPAIR}") from error

    def renew(self, number: int) -> bool:
        """Forget a shard whose file was found damaged or gone; whether opening it again may help."""
        gone = number in self._open and not self._open[number].path.exists()
        self._open.pop(number, None)
        return self.store.discard(shard_file(self.shards[number])) or gone

    def expect(self, number: int) -> None:
        """Tell the store which shard will be read soon."""
        if number not in self._lost:
            self.store.expect((index_file(self.shards[number]), shard_file(self.shards[number])))

    def reserve(self, lanes: int) -> None:
        """Tell how many lanes read at a time. Raises DataError where the store cannot hold a shard for each."""
        self._least_open = lanes
        largest = max(shard_file(shard).size + index_file(shard).size for shard in self.shards)
        self.store.bind(self.manifest.fingerprint, room_for=lanes * largest)

    def path(self, number: int) -> str:
        """What a shard is called in a message."""
        return self.store.path_for_messages(self.shards[number].name)


class SampleReader:
    """Reads content of one split, forwards for the most part: one of these a lane, as it keeps its place."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._expected: int | None = None
        self._kept: tuple[int, int, np.ndarray] | None = None  # shard, sample and content of the last one read in part
        # What is kept lies in one of the buffers while the other one is read into.
        self._buffers = [np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)]

    def expect(self, number: int | None) -> None:
        """Tell the store, once, which shard comes next."""
        if number is not None and number != self._expected:
            self._expected = number
            self._split.expect(number)

    def fill(self, number: int, start: int, out: np.ndarray, separator: int | None = None) -> None:
        """Write the content of shard ``number`` from byte ``start`` on into ``out``, (n,) uint8.

        With a ``separator``, one such byte stands behind each document, and is counted. Raises DataError, naming shard
        and sample, before a byte of a damaged sample is handed on; the content of ``out`` is undefined then.
        """
        shard = self._split.open(number)
        edges = shard.edges if separator is None else shard.edges_with_separators
        end = start + len(out)
        first = int(np.searchsorted(edges, start, side="right")) - 1
        last = int(np.searchsorted(edges, end, side="left"))
        bounds = edges[first : last + 1].tolist()
        head, tail = range(first, first), range(first, last)
        if separator is None and len(out) >= SCATTERED_BYTES * (last - first):
            # Long samples that lie in the range as a whole; what is left is before and behind them.
            whole = range(first + (bounds[0] < start), last - (bounds[-1] > end))
            done = self._scatter(number, whole, [bound - start for bound in bounds[whole.start - first :]], out)
            head, tail = range(first, whole.start), range(whole.start + done, last)
        for samples in filter(len, (head, tail)):
            for sample, content in self._contents(number, samples):
                begin, stop = bounds[sample - first], bounds[sample - first + 1]
                a, b = max(start, begin), min(end, begin + len(content))
                if a < b:
                    out[a - start : b - start] = content[a - begin : b - begin]
                if begin + len(content) < stop <= end:
                    out[stop - 1 - start] = separator
                if sample == last - 1 and stop > end:
                    self._kept = number, sample, content

    def _scatter(self, number: int, samples: range, places: list[int], out: np.ndarray) -> int:
        """Write whole samples to their places in ``out``; how many, up to the first that is not what was built."""
        shard, first = self._split.open(number), samples.start
        while first < samples.stop:
            chunk = _chunk(shard, first, min(samples.stop, first + _MOST_SCATTERED))
            target = out[places[chunk.start - samples.start] : places[chunk.stop - samples.start]]
            if not read_contents(
                shard.path, shard.index[chunk.start : chunk.stop], int(shard.ends[chunk.stop - 1]), target
            ):
                break
            first = chunk.stop
        return first - samples.start

    def _contents(self, number: int, samples: range) -> Iterator[tuple[int, np.ndarray]]:
        """(sample, its content): views that hold until the next but one read."""
        kept, first = self._kept, samples.start
        self._kept = None  # its buffer may be read into from now on
        if kept is not None and samples and kept[:2] == (number, first):
            yield first, kept[2]
            first += 1
        while first < samples.stop:
            chunk = _chunk(self._split.open(number), first, samples.stop)
            try:
                contents = self._checked(number, chunk)
            except DataError:
                if not self._split.renew(number):
                    raise
                contents = self._checked(number, chunk)
            yield from zip(chunk, contents, strict=True)
            first = chunk.stop

    def _checked(self, number: int, samples: range) -> list[np.ndarray]:
        """The content of each sample, each found to be what was built."""
        split, shard = self._split, self._split.open(number)
        rows = shard.index[samples.start : samples.stop].tolist()
        ends = shard.ends[samples.start : samples.stop].tolist()
        base = rows[0][0]
        array = self._read(number, base, ends[-1] - base)
        view = array.data
        contents = []
        for sample, (member, content, length, crc32, _), end in zip(samples, rows, ends, strict=True):
            if zlib.crc32(view[member - base : end - base]) != crc32:
                raise DataError(f"{split.path(number)}: {_what_is_wrong(split, number, sample, view[member - base :])}")
            contents.append(array[content - base : content - base + length])
        return contents

    def _read(self, number: int, start: int, size: int) -> np.ndarray:
        """Bytes ``[start, start + size)`` of a shard's file, or as many as it has: (n,) uint8, a view."""
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = np.empty(size, dtype=np.uint8)
        target = self._buffers[0][:size]
        try:
            with self._split.open(number).path.open("rb", buffering=0) as file:
                file.seek(start)
                filled = 0
                while filled < size and (more := file.readinto(target[filled:].data)):
                    filled += more  # some file systems give less than they were asked for
                return target[:filled]
        except OSError as error:
            raise DataError(f"{self._split.path(number)}: cannot be read ({error.strerror}); {REPAIR}") from error


def document_edges(index: np.ndarray) -> np.ndarray:
    """(samples,) shards.INDEX_DTYPE -> (documents + 1,) int64: content bytes before each document, and in all.

    What goes on in the next shard is a document of its own here and there.
    """
    last = index["ends"].astype(bool)
    last[-1] = True
    return np.concatenate([[0], _edges(index["length"])[1:][last]])


def _edges(lengths: np.ndarray) -> np.ndarray:
    edges = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=edges[1:])
    return edges


def _chunk(shard: OpenShard, first: int, stop: int) -> range:
    """As many samples from ``first`` on as one read takes, at least one."""
    limit = int(shard.index["member"][first]) + READ_BYTES
    return range(first, max(first + 1, min(stop, int(np.searchsorted(shard.ends, limit, side="right")))))


def _what_is_wrong(split: Split, number: int, sample: int, member: memoryview) -> str:
    """For a member whose CRC-32 is not the index's: one line that says where the damage is."""
    key = split.shards[number].key(sample)
    header = bytes(member[:BLOCK_BYTES])
    name = header[:100].rstrip(b"\0")
    if len(header) < BLOCK_BYTES:
        return f"ends before sample {key}; {REPAIR}"
    if header[257:262] != b"ustar":
        return f"sample {key} has a damaged header; {REPAIR}"
    if name != f"{key}.{split.modality.extension}".encode():
        return f"holds sample {name.decode(errors='replace')!r} in place of {key}; {REPAIR}"
    return f"sample {key} is damaged (CRC-32); {REPAIR}"
