"""Read any range of the content bytes of a split, verified against the index.

WebDataset reads a tar from its beginning. It silently ends at a broken header, and silently returns a payload with a
flipped bit. Here the index has the offset of each member, so any range costs the same. No byte of a member is returned
before the CRC-32 of the member, with header and padding, matches the index.
"""

import os
import posixpath
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.labels import labels_from_bytes
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.plain_files import blocks_of, open_plain
from longstride.data_pipelines.settings import REBUILD, REPAIR, RemoteSettings
from longstride.data_pipelines.shards.manifest import (
    BLOCK_BYTES,
    DataManifest,
    ShardRecord,
    check_places,
    load_palette,
    member_ends,
    read_checked,
)
from longstride.data_pipelines.shards.tar_stream import TarStream, shown
from longstride.data_pipelines.stores import open_store

_HEADERS_BYTES = 2**14  # read at once to find a member's name
_LOST_SECONDS = 600.0  # before another attempt to open a lost shard
_INDEX_BYTES = 64 * 2**20  # size of the index cache, which holds at least one index per lane


@dataclass(frozen=True)
class OpenShard:
    """A shard with its index loaded and checked."""

    record: ShardRecord
    path: Path
    index: np.ndarray  # (samples,) manifest.INDEX_DTYPE
    stored_bytes: int  # bytes of a member per byte of content
    tables: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # see contexts.DocumentContexts

    @property
    def memory_bytes(self) -> int:
        """Memory of the index and of the arrays derived from it."""
        return len(self.index) * (self.index.itemsize + 4 * 8)

    @cached_property
    def ends(self) -> np.ndarray:
        """The offset after each member, (samples,) int64."""
        return member_ends(self.index, self.stored_bytes)

    @cached_property
    def edges(self) -> np.ndarray:
        """Content bytes before each sample and in all, (samples + 1,) int64."""
        return _cumulate(self.index["length"])

    @cached_property
    def edges_with_separators(self) -> np.ndarray:
        """Like ``edges``, with one more byte after each document."""
        return _cumulate(self.index["length"].astype(np.int64) + self.index["ends"])

    @cached_property
    def document_edges(self) -> np.ndarray:
        """Content bytes before each document's part in this shard and in all, (documents + 1,) int64."""
        return _document_edges(self.index)


class DataFolder:
    """An open data folder. The manifest is read once, and everything is verified against it.

    Raises DataError if the location is not a data folder.
    """

    def __init__(
        self, location: str | Path, remote: RemoteSettings | None = None, manifest: DataManifest | None = None
    ) -> None:
        self.store = open_store(location, remote)  # of the manifest and the indexes
        self.manifest = DataManifest.load(self.store) if manifest is None else manifest
        tars = self.manifest.tars
        self.tars = self.store if tars in (None, ".") else open_store(_tars_location(location, str(tars)), remote)
        self.bind()
        self._splits: dict[str, Split] = {}

    @cached_property
    def palette(self) -> Palette | None:
        """The palette; None if content is read byte by byte. Raises DataError for a damaged one."""
        return None if self.manifest.palette is None else load_palette(self.store, self.manifest.palette)

    @cached_property
    def labels(self) -> dict[str, np.ndarray] | None:
        """The class of each document, (documents,) int32 by split; None if there is none. DataError for damage."""
        if (file := self.manifest.labels) is None:
            return None
        content = read_checked(self.store, file, "the list of classes")
        try:
            return labels_from_bytes(content, {name: split.documents for name, split in self.manifest.splits.items()})
        except DataError as error:
            raise DataError(f"{self.store.path_for_messages(file.name)}: {error}; {REBUILD}") from None

    @classmethod
    def at(cls, location: "str | Path | DataFolder", remote: RemoteSettings | None = None) -> "DataFolder":
        """Open the data folder at a location; an open folder is returned unchanged."""
        return location if isinstance(location, DataFolder) else cls(location, remote)

    def bind(self, room_for: int = 0) -> None:
        for store in (self.store, self.tars):
            store.bind(self.manifest.fingerprint, room_for)

    def close(self) -> None:
        self.store.close()
        self.tars.close()

    def split(self, name: str) -> "Split":
        """Return the split of a name. Raises DataError if there is none."""
        if name not in self.manifest.splits:
            rule = f"has no split {name!r}; it has {', '.join(self.manifest.splits)}"
            raise DataError(f"{self.store.path_for_messages(DataManifest.FILE_NAME)}: {rule}")
        if name not in self._splits:
            self._splits[name] = Split(self, name)
        return self._splits[name]


def _tars_location(location: str | Path, tars: str) -> str | Path:
    """Resolve ``tars``, which is relative to the manifest's ``location``, absolute or a URL."""
    text = str(location)
    if "://" in tars or tars.startswith("/"):
        return tars
    if isinstance(location, Path) or "://" not in text:
        return os.path.normpath(os.path.join(os.path.realpath(location), tars))  # noqa: PTH118
    protocol, _, tail = text.partition("://")
    path, mark, query = tail.partition("?")
    return f"{protocol}://{posixpath.normpath(f'{path}/{tars}')}{mark}{query}"


class Split:
    """The shards of one split."""

    def __init__(self, folder: DataFolder, name: str) -> None:
        self._folder, self.manifest, self.name = folder, folder.manifest, name
        self.shards = self.manifest.splits[name].shards
        self.modality = modality_named(self.manifest.modality)
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lost: dict[int, tuple[str, float]] = {}  # the error of opening a shard, and the time of the next attempt
        self._least_open = 1
        self.tables: dict[tuple[int, int], np.ndarray] = {}  # see contexts.DocumentContexts

    @property
    def palette(self) -> Palette | None:
        return self._folder.palette

    def open(self, number: int) -> OpenShard:
        """Open shard ``number`` of the split. Raises DataError if it or its index is missing or damaged."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if number in self._lost and time.monotonic() < self._lost[number][1]:
            raise DataError(self._lost[number][0])
        record, tars = self.shards[number], self._folder.tars
        try:
            index = record.load_index(self._folder.store)
            check_places(self.path(number), record, index, self.manifest)
            for is_last in (False, True):
                opened = OpenShard(record, tars.local(record.file), index, self.manifest.stored_bytes)
                if self._ends_well(opened):
                    break
                if is_last or not tars.discard(record.file):
                    raise DataError(f"{self.path(number)}: is damaged after its last sample; {REPAIR}")
        except DataError as error:
            # Otherwise every context of a lost remote shard would request it again before it is substituted.
            self._lost[number] = str(error), time.monotonic() + _LOST_SECONDS
            raise
        self._open[number] = opened
        memory = sum(shard.memory_bytes for shard in self._open.values())
        while memory > _INDEX_BYTES and len(self._open) > self._least_open:
            memory -= self._open.popitem(last=False)[1].memory_bytes
        return opened

    def _ends_well(self, shard: OpenShard) -> bool:
        """Whether only zeros follow the last member of an own shard. CRC-32 covers everything before."""
        if self.manifest.tars is not None:
            return True
        path = self._folder.tars.path_for_messages(shard.record.name)
        with as_data_error(path, mend=REPAIR), open_plain(shard.path) as file:
            file.seek(int(shard.ends[-1]))
            return not any(file.read(shard.record.file_bytes - int(shard.ends[-1])))

    def renew(self, number: int) -> bool:
        """Forget a shard that is damaged or missing if opening it again may help. Return whether it may."""
        is_gone = number in self._open and not self._open[number].path.exists()
        may_help = self._folder.tars.discard(self.shards[number].file) or is_gone
        if may_help:
            self._open.pop(number, None)
        return may_help

    def expect(self, number: int) -> None:
        """Tell the stores that a shard will be read soon."""
        if number not in self._lost:
            self._folder.store.expect((self.shards[number].index_file,))
            self._folder.tars.expect((self.shards[number].file,))

    def reserve(self, lanes: int) -> None:
        """Tell the store the number of lanes. Raises DataError if it cannot hold a shard for each."""
        self._least_open = lanes
        self._folder.bind(room_for=lanes * max(shard.file.size + shard.index_file.size for shard in self.shards))

    def close(self) -> None:
        self._folder.close()

    def check_files(self) -> bool:
        """Whether the shards are local. Raises DataError if a local file is missing or has a wrong size."""
        store, tars = self._folder.store, self._folder.tars
        for shard in self.shards:
            for place, file in ((tars, shard.file), (store, shard.index_file)):
                if place.folder is not None:
                    place.local(file)
        return tars.folder is not None

    def document_sizes(self) -> Iterator[np.ndarray]:
        """Yield the content bytes of each document, (documents,) int64, per shard. Reads every index."""
        self._folder.store.expect(shard.index_file for shard in self.shards)
        for shard in self.shards:
            yield np.diff(_document_edges(shard.load_index(self._folder.store)))

    @property
    def labels(self) -> np.ndarray:
        """The class of each document, (documents,) int32. Raises DataError if the folder has no classes."""
        if self._folder.labels is None:
            path = self._folder.store.path_for_messages(DataManifest.FILE_NAME)
            raise DataError(f"{path}: has no classes of documents; make a data folder with --labels")
        return self._folder.labels[self.name]

    def labelled_documents(self, most_bytes: int | None = None) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each document's content, (n,) uint8, and its class, in order.

        Args:
            most_bytes: how many bytes of a longer document to read, from its beginning; None: all.

        Raises:
            DataError: the folder has no classes, or a shard is damaged.
        """
        labels, reader = iter(self.labels.tolist()), SampleReader(self)
        document = np.empty(0, dtype=np.uint8)  # one that continues in the next shard
        for number in range(len(self.shards)):
            reader.expect(number + 1 if number + 1 < len(self.shards) else None)
            shard = self.open(number)
            edges = shard.document_edges.tolist()
            for start, stop in pairwise(edges):
                size = stop - start if most_bytes is None else min(stop - start, most_bytes - len(document))
                content = np.empty(size, dtype=np.uint8)
                reader.fill(number, start, content)
                document = np.concatenate([document, content])
                if stop < edges[-1] or shard.index["ends"][-1]:
                    yield document, next(labels)
                    document = document[:0]

    def path(self, number: int) -> str:
        """Return the path of a shard for messages."""
        return self._folder.tars.path_for_messages(self.shards[number].name)

    def member_names(self, shard: ShardRecord, sample: int) -> list[str]:
        """Return the possible names of a sample's member in an own shard."""
        extensions = filter(None, (self.modality.extension, self.modality.odd_extension))
        return [f"{shard.key(sample)}.{extension}" for extension in extensions]

    def sample_name(self, number: int, sample: int) -> str:
        """Return the name of the member of shard ``number`` that holds a sample."""
        names = [] if self.manifest.tars is not None else self.member_names(self.shards[number], sample)
        if len(names) == 1:
            return names[0]
        shard = self.open(number)
        first = sample
        while first and not names and not shard.index["ends"][first - 1]:
            first -= 1
        with suppress(OSError, DataError), open_plain(shard.path) as file:  # its headers may be damaged
            file.seek(int(shard.index["member"][first]))
            member = next(TarStream(str(shard.path), blocks_of(file, _HEADERS_BYTES)).members(), None)
            if member is not None and (not names or member.name in names):
                return shown(member.name)
        return names[0] if names else f"number {sample}"


class SampleReader:
    """Reads content of one split, mostly in sequence. Each lane has its own reader, which buffers its last sample."""

    READ_BYTES = 2**19  # read at once if members are smaller

    def __init__(self, split: Split) -> None:
        self._split = split
        self._expected: int | None = None
        self._partial: tuple[int, int, np.ndarray] | None = None  # shard, sample and content of a partly read sample
        # It is in one of the buffers while the other one is filled.
        self._buffers = [np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)]

    def expect(self, number: int | None) -> None:
        """Tell the store, once, which shard comes next."""
        if number is not None and number != self._expected:
            self._expected = number
            self._split.expect(number)

    def fill(self, number: int, start: int, out: np.ndarray, separator: int | None = None) -> None:
        """Write the content of shard ``number`` from byte ``start`` on into ``out``, (n,) uint8.

        With a ``separator``, one such byte follows each document, and counts. Raises DataError, naming shard and
        sample, if a sample is damaged; the content of ``out`` is undefined then.
        """
        shard = self._split.open(number)
        edges = shard.edges if separator is None else shard.edges_with_separators
        end = start + len(out)
        first = int(np.searchsorted(edges, start, side="right")) - 1
        last = int(np.searchsorted(edges, end, side="left"))
        bounds = edges[first : last + 1].tolist()
        for sample, content in self._contents(number, range(first, last)):
            begin, stop = bounds[sample - first], bounds[sample - first + 1]
            a, b = max(start, begin), min(end, begin + len(content))
            if a < b:
                out[a - start : b - start] = content[a - begin : b - begin]
            if begin + len(content) < stop <= end:
                out[stop - 1 - start] = separator
            if sample == last - 1 and stop > end:
                self._partial = number, sample, content

    def _contents(self, number: int, samples: range) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each sample and its content, which stays valid until the next but one read."""
        partial, first = self._partial, samples.start
        self._partial = None  # its buffer may be overwritten from now on
        if partial is not None and samples and partial[:2] == (number, first):
            yield first, partial[2]
            first += 1
        while first < samples.stop:
            shard = self._split.open(number)
            limit = int(shard.index["member"][first]) + self.READ_BYTES
            stop = min(samples.stop, int(np.searchsorted(shard.ends, limit, side="right")))
            chunk = range(first, max(first + 1, stop))
            try:
                contents = self._read_samples(number, chunk)
            except DataError:
                if not self._split.renew(number):
                    raise
                contents = self._read_samples(number, chunk)
            yield from zip(chunk, contents, strict=True)
            first = chunk.stop

    def _read_samples(self, number: int, samples: range) -> list[np.ndarray]:
        """Read and verify the content of each sample."""
        split, shard = self._split, self._split.open(number)
        rows = shard.index[samples.start : samples.stop].tolist()
        ends = shard.ends[samples.start : samples.stop].tolist()
        base, size, filled = rows[0][0], ends[-1] - rows[0][0], 0
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = np.empty(size, dtype=np.uint8)
        array = self._buffers[0]
        with as_data_error(split.path(number), mend=REPAIR), open_plain(shard.path) as file:
            while filled < size and (count := os.preadv(file.fileno(), [array[filled:size].data], base + filled)):
                filled += count  # some file systems return less than requested
        view = array[:filled].data
        contents = []
        for sample, (member, content, length, crc32, _), end in zip(samples, rows, ends, strict=True):
            if zlib.crc32(view[member - base : end - base]) != crc32:
                raise DataError(f"{split.path(number)}: {_describe(split, number, sample, view[member - base :])}")
            stored = array[content - base : content - base + length * shard.stored_bytes]
            contents.append(split.modality.restored(stored, split.manifest.properties))
        return contents


def _document_edges(index: np.ndarray) -> np.ndarray:
    """Return the content bytes before each document and in all, (documents + 1,) int64, from an index.

    A document that continues in the next shard counts as one document in each.
    """
    last = index["ends"].astype(bool)
    last[-1] = True
    return np.concatenate([[0], np.cumsum(index["length"], dtype=np.int64)[last]])


def _cumulate(lengths: np.ndarray) -> np.ndarray:
    """Sum up (n,) lengths to (n + 1,) int64, from 0 on."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _describe(split: Split, number: int, sample: int, member: memoryview) -> str:
    """Describe in one line the damage of a member with a wrong CRC-32."""
    if split.manifest.tars is not None:
        return f"member {split.sample_name(number, sample)} is damaged, or another than was indexed (CRC-32); {REPAIR}"
    key, header = split.shards[number].key(sample), bytes(member[:BLOCK_BYTES])
    name = header[:100].rstrip(b"\0").decode(errors="replace")
    is_named = name in split.member_names(split.shards[number], sample)
    if header[257:262] == b"ustar" and not is_named:
        return f"holds sample {name!r} in place of {key}; {REPAIR}"
    return f"sample {name if is_named else key} is damaged (CRC-32); {REPAIR}"
