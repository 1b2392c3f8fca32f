"""Look at samples of a data folder, and verify that it is, to the last bit, what was built.

``sources.jsonl`` of a data folder lists the input file of each sample, one line per sample in order:

    {"key": "train-00000-0000012", "source": "books/a.txt"}

The data are the same without it: the manifest does not list it, and training does not read it.
"""

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.plain_files import JSONError, blocks_of, open_plain, parse_json
from longstride.data_pipelines.settings import REBUILD, REPAIR, RemoteSettings
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader, Split
from longstride.data_pipelines.shards.tar_stream import TarStream
from longstride.data_pipelines.stores import Store, open_store

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
_CHECKED_AT_START = 1000  # shards
_MOST_LINE_BYTES = 2**16  # a path has 4,096 bytes, each six characters at most


def check_split(location: str | Path | DataFolder, split: str) -> None:
    """Raise DataError unless a split's files have their sizes, and shards begin with their own first sample.

    At most a thousand shards, evenly spread, are opened, to detect files that are not shards before a run begins.
    Remote files are only checked when they are fetched.
    """
    opened = DataFolder.at(location).split(split)
    if not opened.check_files():
        return
    count = len(opened.shards)
    checked = min(count, _CHECKED_AT_START)
    for place in range(checked):
        SampleReader(opened).fill(place * count // checked, 0, np.empty(1, dtype=np.uint8))


def verify(location: str | Path, progress: Progress | None = None) -> list[str]:
    """Read a whole data folder: one line for each damage found, none where all is as it was built.

    Sizes, SHA-256 of shards and indexes, the members of own tars, and the CRC-32 of each sample. ``progress`` is called
    with the bytes of shards, (done, in all), after each. Raises DataError where there is no data folder.
    """
    store = open_store(location)
    content = store.read(DataManifest.FILE_NAME)
    try:
        manifest = DataManifest.parse(store.path_for_messages(DataManifest.FILE_NAME), content)
    except DataError as error:
        return [str(error)]
    with tempfile.TemporaryDirectory(prefix="longstride-verify-") as cache:
        # Remote files are fetched again, without the training's cache, and dropped shard by shard.
        sizes = [shard.file.size + shard.index_file.size for shard in manifest.shards()]
        room = 2 * max([*sizes, *(file.size for file in (manifest.pieces, manifest.labels) if file is not None), 1])
        with closing(DataFolder(location, RemoteSettings(cache=cache, cache_bytes=room), manifest)) as folder:
            done, total = 0, sum(shard.file_bytes for shard in manifest.shards())
            findings: list[str] = []
            for check in (lambda: folder.palette, lambda: folder.labels, partial(_check_lists, folder)):
                with _collect_errors(findings):
                    check()
            for name in manifest.splits:
                split = folder.split(name)
                for number, shard in enumerate(split.shards):
                    findings += _verify_shard(folder, split, number)
                    done += shard.file_bytes
                    if progress is not None:
                        progress(done, total)
            if manifest.tars is None and folder.store.folder is not None:  # one of foreign tars may hold other files
                listed = {file.name for shard in manifest.shards() for file in (shard.file, shard.index_file)}
                listed |= set() if manifest.labels is None else {manifest.labels.name}
                for path in sorted(folder.store.folder.iterdir()):
                    if path.name.endswith((".tar", ".npy")) and path.name not in listed and path.is_file():
                        findings.append(f"{path}: {DataManifest.FILE_NAME} does not list it; remove it")
            return list(dict.fromkeys(findings))  # a damaged member of a foreign tar may have many rows


@contextmanager
def _collect_errors(findings: list[str]) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        findings.append(str(error))


def _check_lists(folder: DataFolder) -> None:
    """Check the list of pieces by its SHA-256, and that of sources, if any, for having every sample in order."""
    if (pieces := folder.manifest.pieces) is not None:
        name = folder.store.path_for_messages(pieces.name)
        with as_data_error(name, mend=REBUILD):
            if _sha256_of(folder.store.local(pieces)) != pieces.sha256:
                raise DataError(f"{name}: the list of pieces is damaged (its SHA-256 is not the manifest's); {REBUILD}")
    if (path := sources_path(folder.store)) is not None:
        keys = (shard.key(number) for shard in folder.manifest.shards() for number in range(shard.samples))
        with as_data_error(path, mend=REBUILD):
            for key, line in zip_longest(keys, source_lines(path)):
                if key is None or line is None or source_in(line, key) is None:
                    place = key or "its end"
                    raise DataError(f"{path}: the list of sources is damaged (at {place}); remove it, or rebuild")


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open_plain(path) as file:
        for block in blocks_of(file, 2**20):
            digest.update(block)
    return digest.hexdigest()


def _verify_shard(folder: DataFolder, split: Split, number: int) -> list[str]:
    shard, name = split.shards[number], split.path(number)
    findings: list[str] = []
    with _collect_errors(findings), as_data_error(name, mend=REBUILD):
        opened, reader = split.open(number), SampleReader(split)  # raises before a shard of any size is read
        if _sha256_of(opened.path) != shard.sha256:
            findings.append(f"{name}: its SHA-256 is not the manifest's; {REBUILD}")
        if folder.manifest.tars is None:  # other programs, which have no index, must find the same samples
            with _collect_errors(findings), open_plain(opened.path) as file:
                members = TarStream(name, blocks_of(file)).members()
                places = zip_longest(members, opened.index["member"].tolist())
                for sample, (member, place) in enumerate(places):
                    if not member or member.offset != place or member.name not in split.member_names(shard, sample):
                        raise DataError(f"{name}: sample {shard.key(sample)} is not where the index says; {REBUILD}")
        for start, stop in pairwise(opened.edges.tolist()):
            with _collect_errors(findings):
                reader.fill(number, start, np.empty(stop - start, dtype=np.uint8))
    return [finding.replace(REPAIR, REBUILD) for finding in findings]


def sources_path(store: Store) -> Path | None:
    """Return the path of the list of sources; None if a local folder has none, or the store is remote."""
    path = None if store.folder is None else store.folder / DataManifest.SOURCES_NAME
    return path if path is not None and path.is_file() else None


def source_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the file, cut at the longest possible line."""
    with open_plain(path) as file:
        yield from iter(lambda: file.readline(_MOST_LINE_BYTES), b"")


def source_in(line: bytes, key: str) -> str | None:
    """Return the source in a line; None if it is not the line of that sample."""
    try:
        content = parse_json(line)
    except JSONError:
        return None
    source = content.get("source") if isinstance(content, dict) and content.get("key") == key else None
    return source if isinstance(source, str) else None


def sources_of(store: Store, keys: Collection[str]) -> dict[str, str]:
    """Return the sources of samples by their keys, as far as a local folder has them."""
    path = sources_path(store)
    if path is None:
        return {}
    beginnings = {f'{{"key": "{key}"'.encode(): key for key in keys}
    sources = {}
    with suppress(OSError):  # it is no part of the data
        for line in source_lines(path):
            key = beginnings.get(line.partition(b",")[0])
            if key is not None and (source := source_in(line, key)) is not None:
                sources[key] = source
    return sources


class Sample(NamedTuple):
    """A document, or a piece of a long one, for a person to look at."""

    key: str  # split, shard and number, as in the member's name
    content: np.ndarray  # (n,) uint8
    properties: Mapping[str, int]  # of all documents of the set
    place: str  # member and shard, in words
    source: str | None = None  # the file's path under the input of the build, if the folder records it
    label: int | None = None  # the document's class, if the folder has classes


def sample_documents(location: str | Path | DataFolder, split: str, count: int, seed: int = 0) -> Iterator[Sample]:
    """Draw ``count`` samples of a split in order, one from each equal part of it. Equal seeds give equal samples.

    A split with fewer is returned completely. Only the shards of these samples are opened. Raises DataError for a
    folder, split or count that does not fit, and for a damaged sample.
    """
    if count < 1:
        raise DataError(f"count={count}: must be at least 1")
    folder = DataFolder.at(location)
    opened = folder.split(split)
    reader = SampleReader(opened)
    ends = list(accumulate(shard.samples for shard in opened.shards))
    count = min(count, ends[-1])
    places = []
    for part in range(count):
        first, end = part * ends[-1] // count, (part + 1) * ends[-1] // count
        word = int.from_bytes(hashlib.sha256(f"{seed}\0{part}".encode()).digest()[:8], "big")
        number = first + word % (end - first)
        shard = int(np.searchsorted(ends, number, side="right"))
        places.append((shard, number - (ends[shard - 1] if shard else 0)))
    sources = {}
    if folder.manifest.tars is None:
        sources = sources_of(folder.store, {opened.shards[shard].key(sample) for shard, sample in places})
    for shard, sample in places:
        edges = opened.open(shard).edges
        content = np.empty(int(edges[sample + 1] - edges[sample]), dtype=np.uint8)
        reader.fill(shard, int(edges[sample]), content)
        name = opened.sample_name(shard, sample)
        key = opened.shards[shard].key(sample) if opened.manifest.tars is None else name
        place = f"{name} of {opened.shards[shard].name}"
        label = None
        if folder.labels is not None:
            before = sum(record.documents for record in opened.shards[:shard])  # documents that end before the sample
            before += int(opened.open(shard).index["ends"][:sample].sum(dtype=np.int64))
            label = int(opened.labels[before])
        yield Sample(key, content, opened.manifest.properties, place, sources.get(key), label)
