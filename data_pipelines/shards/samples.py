"""A few samples from all over a split, for a person to look at."""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards.reading import DataFolder, SampleReader, open_folder


class Sample(NamedTuple):
    """A document, or a piece of a long one."""

    key: str  # names split, shard and place, as its member in the shard does
    content: np.ndarray  # (n,) uint8
    properties: Mapping[str, int]  # of all documents of the set


def sample_documents(location: str | Path | DataFolder, split: str, count: int, seed: int = 0) -> Iterator[Sample]:
    """As many samples of a split, in order, each from its own part of it; equal seeds give equal samples.

    A split with fewer is given whole. Only the shards that hold them are opened. Raises DataError for a folder, split
    or count that does not fit, and for a damaged sample, before it is handed on.
    """
    if count < 1:
        raise DataError(f"count={count}: must be at least 1")
    opened = open_folder(location).split(split)
    reader = SampleReader(opened)
    ends = list(accumulate(shard.samples for shard in opened.shards))
    for number in _spread(ends[-1], count, seed):
        shard = int(np.searchsorted(ends, number, side="right"))
        sample = number - (ends[shard - 1] if shard else 0)
        edges = opened.open(shard).edges
        content = np.empty(int(edges[sample + 1] - edges[sample]), dtype=np.uint8)
        reader.fill(shard, int(edges[sample]), content)
        yield Sample(opened.shards[shard].key(sample), content, opened.manifest.properties)


def _spread(total: int, count: int, seed: int) -> list[int]:
    """``count`` numbers below ``total``, one in each of as many equal parts; all of them where there are fewer."""
    count = min(count, total)
    numbers = []
    for part in range(count):
        first, end = part * total // count, (part + 1) * total // count
        drawn = int.from_bytes(hashlib.sha256(f"{seed}\0{part}".encode()).digest()[:8], "big")
        numbers.append(first + drawn % (end - first))
    return numbers
