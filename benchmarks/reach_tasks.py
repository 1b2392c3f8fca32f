"""Tasks of `benchmarks/reach.py`: contexts of bytes, and which of their bytes can be known from those before.

Letters: B contexts, N positions of a context.
"""

from __future__ import annotations

import gzip
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SYMBOLS = 64  # of synthetic tasks
GRID_WIDTH, GRID_NOISE = 256, 0.1  # bytes in a row of the grid; share of its bytes that are drawn anew
KEY_SYMBOLS, PAIR_BYTES, EQUALS, END = 2, 5, 64, 65  # a pair is two symbols, =, a symbol and ;
HELD_OUT_EVERY = 8  # files
OLD_BYTES = (1_200, 2_600)  # of the old version in a context of 4,096
ANCHOR_BYTES = 24  # of a line that begins the same place in both versions
LONGEST_CORPUS = 24_000_000  # bytes
LONG, LESSON_CONTEXT = 4_096, 128


class Example(NamedTuple):
    """A context (N,) uint8, and (N,) bool: whether a byte can be known, so that it is scored."""

    tokens: np.ndarray
    scored: np.ndarray


Maker = Callable[[np.random.Generator, int, bool], Example]  # of a generator, N, and whether it is held out


@dataclass(frozen=True)
class Task:
    """A source of contexts.

    Args:
        make: makes a context. Short contexts of ``versions`` have shorter pieces.
        context: N of the last stage, and of the evaluation.
        floor: least possible bits per scored byte; None: unknown.
        varies: the distance does, so that runs begin with the lesson in copying.
    """

    make: Maker
    context: int = LONG
    floor: float | None = None
    varies: bool = True

    def batch(self, seed: tuple[int, ...], length: int, count: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Return ``count`` contexts (B, N) uint8 and which bytes are scored (B, N) bool; the same for the same seed."""
        random = np.random.default_rng(seed)
        examples = [self.make(random, length, held_out) for _ in range(count)]
        tokens, scored = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*examples, strict=True))
        return tokens, scored


def repeated(shortest: int, longest: int, unknown: int = 0, symbols: int = SYMBOLS) -> Maker:
    """Return the maker of a random string that is repeated to the end of the context.

    Its length is drawn from ``shortest`` to ``longest``. The first ``unknown`` bytes of the repetition do not count:
    only they show where it begins.
    """

    def make(random: np.random.Generator, length: int, held_out: bool) -> Example:
        period = int(random.integers(shortest, longest + 1))
        string = random.integers(symbols, size=period)
        return Example(np.resize(string, length).astype(np.uint8), np.arange(length) >= period + unknown)

    return make


def recall(random: np.random.Generator, length: int, held_out: bool) -> Example:
    """Make pairs key=value; with different keys, and then the same pairs in another order. The later values count."""
    count = length // (2 * PAIR_BYTES)
    keys = random.choice(SYMBOLS**KEY_SYMBOLS, size=count, replace=False)
    pairs = np.full((count, PAIR_BYTES), END)
    pairs[:, 0], pairs[:, 1], pairs[:, 2] = keys // SYMBOLS, keys % SYMBOLS, EQUALS
    pairs[:, 3] = random.integers(SYMBOLS, size=count)
    both = np.concatenate([pairs, random.permutation(pairs)])
    scored = np.zeros(both.shape, dtype=bool)
    scored[count:, 3] = True
    tail = np.full(length - both.size, END)
    tokens = np.concatenate([both.ravel(), tail]).astype(np.uint8)
    return Example(tokens, np.concatenate([scored.ravel(), tail < 0]))


def grid(random: np.random.Generator, length: int, held_out: bool) -> Example:
    """Make rows of symbols in which a byte is the one above, but for a share of bytes that are drawn anew."""
    rows = random.integers(SYMBOLS, size=(-(-length // GRID_WIDTH), GRID_WIDTH))
    same = random.random(rows.shape) >= GRID_NOISE
    for above, row, keep in zip(rows, rows[1:], same[1:], strict=False):
        row[keep] = above[keep]
    return Example(rows.ravel()[:length].astype(np.uint8), np.arange(length) >= GRID_WIDTH)


def grid_floor() -> float:
    """Return the entropy of a byte of the grid, given the byte above."""
    other = GRID_NOISE / SYMBOLS
    same = 1 - GRID_NOISE + other
    return -(same * math.log2(same) + (SYMBOLS - 1) * other * math.log2(other))


def versions(random: np.random.Generator, length: int, held_out: bool) -> Example:
    """Make a piece of a file's old version, a NUL, and the new version from the same place on.

    Pieces of short contexts are shorter. The bytes after the NUL count.
    """
    pairs = version_pairs()[held_out]
    low, high = (size * length // LONG for size in OLD_BYTES)
    while True:
        old, new = pairs[random.integers(len(pairs))]
        size = int(random.integers(low, high + 1))
        first = old.find(b"\n", int(random.integers(len(old)))) + 1
        anchor = old[first : first + ANCHOR_BYTES]
        if b"\n" in anchor.strip() or len(anchor.strip()) < ANCHOR_BYTES // 2:
            continue
        place, rest = nearest(new, anchor, first * len(new) // max(1, len(old))), length - size - 1
        if first + size <= len(old) and 0 <= place <= len(new) - rest:
            content = old[first : first + size] + b"\0" + new[place : place + rest]
            return Example(np.frombuffer(content, np.uint8), np.arange(length) > size)


def nearest(content: bytes, anchor: bytes, place: int) -> int:
    """Return where an anchor begins nearest to a place; -1: nowhere."""
    before, after = content.rfind(anchor, 0, place + len(anchor)), content.find(anchor, place)
    return min((found for found in (before, after) if found >= 0), key=lambda at: abs(at - place), default=-1)


@cache
def version_pairs() -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """Return (old, new) contents of files of two Pythons' libraries, for training and held out, split by files.

    Without a second installation, the new versions are edited copies.
    """
    folders = version_folders()
    new = folders[-1]
    pairs: list[tuple[bytes, bytes]] = []
    for path in sorted(new.rglob("*.py")):
        name = path.relative_to(new)
        if name.parts[0] in ("site-packages", "test", "idlelib", "encodings") or path.stat().st_size < 2 * LONG:
            continue
        if len(folders) == 1:
            content = path.read_bytes()
            pairs.append((content, edited(content, np.random.default_rng(len(pairs)))))
        elif (folders[0] / name).is_file():
            pairs.append(((folders[0] / name).read_bytes(), path.read_bytes()))
    pairs = [(old, new) for old, new in pairs if len(old) >= 2 * LONG]
    return [pair for n, pair in enumerate(pairs) if n % HELD_OUT_EVERY], pairs[::HELD_OUT_EVERY]


def version_folders() -> list[Path]:
    """Return this Python's library, after the oldest one of Python 3.10 or later that is installed next to it."""
    mine = Path(sysconfig.get_paths()["stdlib"]).resolve()
    found = {
        int(path.name.rpartition(".")[2]): path for path in mine.parents[2].glob("*/lib/python3.*") if path.is_dir()
    }
    older = sorted(minor for minor in found if 10 <= minor < sys.version_info.minor)
    return [found[older[0]], mine] if older else [mine]


def edited(content: bytes, random: np.random.Generator) -> bytes:
    """Return a text with names changed and some lines moved, removed or inserted: a stand-in for a new version."""
    lines = content.splitlines(keepends=True)
    words = sorted({word for word in content.split() if word.isalnum() and len(word) > 4})
    for _ in range(len(words) // 50 + 1):
        if words:
            word = words[random.integers(len(words))]
            lines = [line.replace(word, word + b"_new") for line in lines]
    for _ in range(len(lines) // 40 + 1):
        source, target = (int(random.integers(len(lines))) for _ in range(2))
        moved = lines[source : source + 3]
        if random.random() < 0.5:
            del lines[source : source + 3]
        lines[target:target] = moved
    return b"".join(lines)


@cache
def corpus(name: str, held_out: bool) -> np.ndarray:
    """Return the bytes of a corpus, some files of which are held out: (·,) uint8."""
    contents = python_sources() if name == "python" else manuals()
    pieces, size = [], 0
    for number, content in enumerate(contents):
        if (number % HELD_OUT_EVERY == 0) == held_out:
            pieces.append(content)
            size += len(content)
        if size > LONGEST_CORPUS:
            break
    return np.frombuffer(b"".join(pieces), np.uint8)


def python_sources() -> Iterator[bytes]:
    """Yield the files of the standard library by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] != "site-packages":
            yield path.read_bytes()


def manuals() -> Iterator[bytes]:
    """Yield the English manual pages of the system by name."""
    for path in sorted(Path("/usr/share/man").glob("man*/*.gz")):
        if path.is_file() and not path.is_symlink():
            yield gzip.decompress(path.read_bytes())


def text(name: str) -> Maker:
    """Return the maker of contexts that begin anywhere in a corpus."""

    def make(random: np.random.Generator, length: int, held_out: bool) -> Example:
        content = corpus(name, held_out)
        first = int(random.integers(len(content) - length))
        return Example(content[first : first + length], np.ones(length, dtype=bool))

    return make


def lesson_of(task: Task) -> Task:
    """Return the task that runs begin with: repeated strings, of all bytes if the task is a text."""
    symbols = 256 if task.floor is None else SYMBOLS
    return Task(repeated(LESSON_CONTEXT // 8, LESSON_CONTEXT // 2, 4, symbols), LESSON_CONTEXT)


TASKS = {
    "copy at 512": Task(repeated(512, 512), 2_048, 0.0, varies=False),
    "copy at 513": Task(repeated(513, 513), 2_048, 0.0, varies=False),
    "copy at 2,048": Task(repeated(2_048, 2_048), LONG, 0.0, varies=False),
    "induction": Task(repeated(320, 1_000, unknown=4), 2_048, 0.0),
    "recall": Task(recall, 2_048, 0.0),
    "grid": Task(grid, 2_048, grid_floor(), varies=False),
    "versions": Task(versions),
    "python": Task(text("python")),
    "manuals": Task(text("manuals")),
}
