"""Neighbouring members read in one call, each content straight to its place: a copy less where samples are long."""

import os
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np


def read_contents(path: Path, index: np.ndarray, end: int, out: np.ndarray) -> bool:
    """Write the content of whole members, (n,) shards.INDEX_DTYPE, into ``out``, which has exactly their bytes.

    ``end`` is the offset behind the last one's padding. False where the file is not what the index says: ``out`` is
    undefined then, and it is left to the caller to find out why.
    """
    rows = index.tolist()
    # What lies before, between and behind the contents: headers and padding.
    edges = [rows[0][0], *(edge for row in rows for edge in (row[1], row[1] + row[2])), end]
    frames = [memoryview(bytearray(stop - start)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
    places = np.concatenate([[0], np.cumsum(index["length"], dtype=np.int64)]).tolist()
    contents = [out.data[start:stop] for start, stop in pairwise(places)]
    parts = [part for pair in zip(frames, contents, strict=False) for part in pair]
    if not _read_all(path, rows[0][0], [*parts, frames[-1]]):
        return False
    for number, (member, content, _, crc32, _) in enumerate(rows):
        found = zlib.crc32(frames[number][len(frames[number]) - (content - member) :])
        found = zlib.crc32(contents[number], found)
        padding = (rows[number + 1][0] if number + 1 < len(rows) else end) - (content + len(contents[number]))
        if zlib.crc32(frames[number + 1][:padding], found) != crc32:
            return False
    return True


def _read_all(path: Path, offset: int, parts: list[memoryview]) -> bool:
    """Fill all parts from a file, from ``offset`` on; whether it had as much."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.preadv(file, parts, offset) == sum(map(len, parts))
    except OSError:
        return False
    finally:
        os.close(file)
