"""The windows of a score: contexts that overlap by as many bytes as every scored byte is to see before it.

N positions a window, M bytes that it has in common with the one before it. Windows begin every N - M bytes of a stream:
of all documents end to end where they are packed, of each document where they are not. A document that is longer than a
shard starts anew in each shard: what a shard holds of it is a stream of its own. The first window of a stream is
scored whole, with all there is before each byte; of every other one the first M bytes are only seen.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties
from longstride.data_pipelines.order.contexts import Cut, DocumentContexts, PackedContexts, settle_cut
from longstride.data_pipelines.shards import SampleReader, Split


class Windows(Protocol):
    """The windows of a split in canonical order."""

    split: Split
    count: int

    def read(self, reader: SampleReader, number: int, row: np.ndarray) -> tuple[int, int]:
        """Write window ``number`` into ``row``, (N,) uint8, 0 beyond its length.

        Returns its length and the first byte of it to be scored. Raises DataError for any damage.
        """


def settle_windows(cut: Cut, context: int, min_context: int, modality: Modality, properties: Properties) -> Cut:
    """The cut of a score, whatever the hop of training: packing said, and the hop where documents are not packed.

    Raises DataError where it does not fit the documents, or no byte could see so many before it.
    """
    plain = settle_cut(replace(cut, hop=None), context, modality, properties)
    if not 0 <= min_context < context:
        nearest = min(max(min_context, 0), context - 1)
        raise DataError(
            f"min_context={min_context}: must be from 0 to {context - 1}, less than the model's context; "
            f"nearest {nearest}"
        )
    if min_context and modality.document_bytes(properties) is not None:
        rule = f"every {modality.name} of this set is a context of its own, with nothing before it; must be 0"
        raise DataError(f"min_context={min_context}: {rule}")
    return plain if plain.hop is None else replace(plain, hop=context - min_context)


def cut_windows(split: Split, context: int, cut: Cut, min_context: int) -> Windows:
    """The windows of a split. Raises DataError as ``settle_windows`` does."""
    settled = settle_windows(cut, context, min_context, split.modality, split.manifest.properties)
    if settled.hop is None:
        return PackedWindows(split, context, settled.separator, min_context)
    return DocumentWindows(split, context, settled.hop)


class PackedWindows:
    """Of documents laid end to end."""

    def __init__(self, split: Split, context: int, separator: int | None, min_context: int) -> None:
        self.split = split
        self._contexts = PackedContexts(split, context, separator)
        self._context, self._seen, self._hop = context, min_context, context - min_context
        self._total = self._contexts.total_units
        self.count = 1 + max(0, -(-(self._total - context) // self._hop))

    def read(self, reader: SampleReader, number: int, row: np.ndarray) -> tuple[int, int]:
        """See Windows."""
        start = number * self._hop
        length = min(self._context, self._total - start)
        self._contexts.fill(reader, start, row[:length], None)
        row[length:] = 0
        return length, self._seen if number else 0


class DocumentWindows:
    """Of documents apart; the last window of each is shorter."""

    def __init__(self, split: Split, context: int, hop: int) -> None:
        self.split = split
        self._contexts = DocumentContexts(split, context, hop)
        self._seen = context - hop
        self.count = self._contexts.total_units

    def read(self, reader: SampleReader, number: int, row: np.ndarray) -> tuple[int, int]:
        """See Windows."""
        lengths = np.zeros(1, dtype=np.int64)
        self._contexts.read(reader, number, row[None], lengths, None)
        return int(lengths[0]), self._seen if self._seen and self._contexts.goes_on(number) else 0
