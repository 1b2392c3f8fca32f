"""Write documents to shards: the pieces of every shard, and a shard with its index and checksums.

The pieces of a shard only depend on the documents' sizes, so any shard can be written without the others. A piece never
begins within a character: it then begins up to three bytes earlier than planned, and the previous piece ends there.
Both can be seen from the bytes around that place.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from tarfile import BLOCKSIZE
from typing import BinaryIO

import webdataset as wds

from longstride.data_pipelines.documents import Document, OpenInput
from longstride.data_pipelines.modalities import Modality, Properties
from longstride.data_pipelines.shards import MOST_SAMPLES, ShardRecord

SAMPLE_BYTES = 2**16  # a longer document becomes several samples, each verified, and lost, as a unit


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of a sample: a document, or a part of a long one."""

    document: Document
    offset: int  # planned content bytes before the piece, see ``Modality.cut``
    size: int  # planned content bytes

    @property
    def numbering(self) -> tuple[int, int]:
        """The number of the piece in its document, from 1 on, and the number of pieces."""
        return self.offset // SAMPLE_BYTES + 1, -(-self.document.size // SAMPLE_BYTES)

    @property
    def ends(self) -> bool:
        return self.offset + self.size == self.document.size


def pack(documents: Iterable[Document], shard_bytes: int, modality: Modality) -> Iterator[list[Piece]]:
    """Yield the pieces of each shard in order: as many as fit into ``shard_bytes`` and an index, at least one.

    Only a document longer than a shard continues in the next one.
    """
    pieces: list[Piece] = []
    filled = 0
    for document in documents:
        step = SAMPLE_BYTES if modality.divisible else document.size
        for offset in range(0, document.size, step):
            piece = Piece(document, offset, min(step, document.size - offset))
            together = document.size if offset == 0 and document.size <= shard_bytes else piece.size
            if pieces and (filled + together > shard_bytes or len(pieces) == MOST_SAMPLES):
                yield pieces
                pieces, filled = [], 0
            pieces.append(piece)
            filled += piece.size
    if pieces:
        yield pieces


def is_planned(record: ShardRecord, pieces: Sequence[Piece], modality: Modality) -> bool:
    """Whether the counts of a record are possible for a shard of these pieces."""
    moved = record.content_bytes - sum(piece.size for piece in pieces)
    # Both ends of a shard may be within a document, and may have been moved to an earlier place.
    earlier, later = modality.cut_reach * bool(pieces[0].offset), modality.cut_reach * (not pieces[-1].ends)
    counts = record.samples, record.documents
    return counts == (len(pieces), sum(piece.ends for piece in pieces)) and -later <= moved <= earlier


def write_shard(
    file: BinaryIO | None,
    name: str,
    pieces: Sequence[Piece],
    modality: Modality,
    properties: Properties,
    open_input: OpenInput,
    advance: Callable[[int], None],
) -> tuple[ShardRecord, bytes]:
    """Write the shard ``name`` to ``file``, or nowhere. Returns its manifest record and the content of its index file.

    ``open_input`` stays open between pieces and shards. ``advance`` gets the content bytes of each piece. Raises
    DataError for a document that has changed since the search.
    """
    with closing(_ShardStream(file, name, modality, properties)) as shard:
        for piece in pieces:
            end = piece.offset + piece.size
            start = max(0, piece.offset - modality.cut_reach)
            stop = min(piece.document.size, end + bool(modality.cut_reach))
            content = open_input.read_on(piece.document, modality, properties, start, stop)
            first = modality.cut(content, piece.offset - start) if piece.offset else 0
            last = len(content) if piece.ends else modality.cut(content, end - start)
            shard.add(content[first:last], piece.ends)
            advance(last - first)
        return shard.finish()


class _ShardStream:
    """A tar stream that computes checksums while it writes, so nothing is read again."""

    def __init__(self, file: BinaryIO | None, name: str, modality: Modality, properties: Properties) -> None:
        self._file, self._name = file, name
        self._modality, self._properties = modality, properties
        self._rows: list[tuple[int, int, int, int, bool]] = []
        self._members_end = 0  # offset after the last member
        self._file_bytes = 0
        self._digest = hashlib.sha256()
        self._crc32s: list[int] = []  # of complete members
        self._crc32 = 0  # of the current member
        # The file must not depend on the machine or the time.
        self._tar = wds.TarWriter(self, encoder=False, compress=False, mtime=0, user="", group="", mode=0o644)

    def add(self, content: bytes, ends: bool) -> None:
        """Append a sample. ``ends``: its document ends with it."""
        header = self._modality.header(len(content), self._properties)
        payload = header + self._modality.stored(content, self._properties)
        place = self._members_end + BLOCKSIZE + len(header)
        self._rows.append((self._members_end, place, len(content), 0, ends))
        self._members_end += BLOCKSIZE + -(-len(payload) // BLOCKSIZE) * BLOCKSIZE  # header, and payload in blocks
        key = ShardRecord.key_in(self._name, len(self._rows) - 1)
        self._tar.write({"__key__": key, self._modality.member_extension(content): payload})

    def write(self, content: bytes) -> int:
        """Write a block for TarWriter. Blocks do not end at members."""
        if self._file is not None:
            self._file.write(content)
        self._file_bytes += len(content)
        self._digest.update(content)
        view = memoryview(content)
        while view and len(self._crc32s) < len(self._rows):
            row = len(self._crc32s)
            end = self._rows[row + 1][0] if row + 1 < len(self._rows) else self._members_end
            remaining = end - (self._file_bytes - len(view))
            self._crc32 = zlib.crc32(view[:remaining], self._crc32)
            if remaining <= len(view):
                self._crc32s.append(self._crc32)
                self._crc32 = 0
            view = view[remaining:]
        return len(content)

    def finish(self) -> tuple[ShardRecord, bytes]:
        """End the archive. Returns its manifest record and the content of its index file."""
        self._tar.close()
        rows = [(*row[:3], crc32, row[4]) for row, crc32 in zip(self._rows, self._crc32s, strict=True)]
        return ShardRecord.of(self._name, rows, self._file_bytes, self._digest.hexdigest())

    def close(self) -> None:
        """Close the tar stream without writing; otherwise it would write when it is garbage collected."""
        self._file = None
        self._tar.close()
