"""Samples for a person to look at, and their sources.

``sources.jsonl`` of a data folder lists the input file of each sample, one line per sample in order:

    {"key": "train-00000-0000012", "source": "books/a.txt"}

The data are the same without it: the manifest does not list it, and training does not read it.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.plain_files import JSONError, open_plain, parse_json
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader
from longstride.data_pipelines.stores import Store

_MOST_LINE_BYTES = 2**16  # a path has 4,096 bytes, each six characters at most


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
    if DataManifest.SOURCES_NAME not in (store.sizes() or ()):
        return {}
    beginnings = {f'{{"key": "{key}"'.encode(): key for key in keys}
    sources = {}
    with suppress(OSError):  # it is no part of the data
        for line in source_lines(Path(store.path_for_messages(DataManifest.SOURCES_NAME))):
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
        yield Sample(key, content, opened.manifest.properties, place, sources.get(key))
