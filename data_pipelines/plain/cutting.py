"""Documents that come one after another, cut into contexts: the rules of contexts.py where no index tells the lengths.

N positions a context.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from longstride.data_pipelines.order import Cut, contexts_in, settle_cut
from longstride.data_pipelines.plain.plain_shards import Document, PlainSplit


@dataclass(frozen=True, slots=True, eq=False)
class CutContext:
    """One context."""

    tokens: np.ndarray  # (N,) uint8, 0 beyond the length
    length: int  # bytes, 1 to N
    sample_id: int  # see sample_id
    repeated: int = 0  # bytes at its beginning that the context before it ends with


class Cutter(Protocol):
    """A way of cutting."""

    identity: str  # of the cutting, for fingerprints

    def count(self, content_bytes: int) -> float:
        """How many contexts a document of so many bytes adds."""

    def cut(self, documents: Iterable[Document]) -> Iterator[CutContext]:
        """The contexts of all documents, in sequence; the bytes left over at the end are a shorter one."""


def sample_id(turn: int, sample: int, context: int) -> int:
    """``turn * 2**40 + sample * 2**20 + context``, below 2**63: the ``context``-th that begins in that sample.

    The turn is the place in the endless sequence of shards: turn t reads shard ``shard_order(S, seed, t // S)[t % S]``
    of S. So two runs that read the same samples show the same ids.
    """
    return ((turn << 40) + (sample << 20) + context) % 2**63


def make_cutter(split: PlainSplit, context: int, cut: Cut) -> Cutter:
    """The cutting of a split. Raises DataError where it does not fit the documents, as contexts.cut_contexts does."""
    settled = settle_cut(cut, context, split.modality, split.properties)
    if settled.hop is None:
        return PackedCutter(context, settled.separator)
    return DocumentCutter(context, settled.hop)


class PackedCutter:
    """Documents laid end to end, a separator behind each where there is one, cut every N bytes.

    Where contexts ``overlap``, each begins with that many bytes of the one before it.
    """

    def __init__(self, context: int, separator: int | None, overlap: int = 0) -> None:
        self._context, self._overlap = context, overlap
        self._separator = np.array([] if separator is None else [separator], dtype=np.uint8)
        self.identity = f"packed/{context}/{separator}"

    def count(self, content_bytes: int) -> float:
        """See Cutter."""
        return (content_bytes + len(self._separator)) / self._context

    def cut(self, documents: Iterable[Document]) -> Iterator[CutContext]:
        """See Cutter."""
        row, filled, repeated, name = np.zeros(self._context, dtype=np.uint8), 0, 0, 0
        for document in documents:
            begun = 0
            for part in (document.content, self._separator):
                start = 0
                while start < len(part):
                    if filled == repeated:
                        name = sample_id(document.turn, document.sample, begun)
                        begun += 1
                    size = min(self._context - filled, len(part) - start)
                    row[filled : filled + size] = part[start : start + size]
                    start, filled = start + size, filled + size
                    if filled == self._context:
                        yield CutContext(row, filled, name, repeated)
                        last = row[self._context - self._overlap :]
                        row, filled, repeated = np.zeros(self._context, dtype=np.uint8), len(last), len(last)
                        row[:filled] = last
        if filled > repeated:
            yield CutContext(row, filled, name, repeated)


class DocumentCutter:
    """Contexts that hold bytes of one document alone, one every ``hop`` bytes; the last of a document is shorter."""

    def __init__(self, context: int, hop: int) -> None:
        self._context, self._hop = context, hop
        self.identity = f"documents/{context}/{hop}"

    def count(self, content_bytes: int) -> int:
        """See Cutter."""
        return int(contexts_in(np.array([content_bytes]), self._context, self._hop)[0])

    def cut(self, documents: Iterable[Document]) -> Iterator[CutContext]:
        """See Cutter."""
        for document in documents:
            for number in range(self.count(len(document.content))):
                part = document.content[number * self._hop :][: self._context]
                row = np.zeros(self._context, dtype=np.uint8)
                row[: len(part)] = part
                repeated = self._context - self._hop if number else 0
                yield CutContext(row, len(part), sample_id(document.turn, document.sample, number), repeated)
