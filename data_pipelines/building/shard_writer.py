"""Documents to shards: which pieces go into which shard, and one shard with its index and checksums.

What a shard will hold follows from the documents' sizes alone, so that any shard can be written without the others.
Where a character would be cut, a piece begins up to three bytes earlier than planned, and the one before it ends there:
whoever writes either of them sees it by the bytes around that place.
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

SAMPLE_BYTES = 2**16  # a longer document becomes several samples: each is checked whole, and lost whole if damaged


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes one sample: a document, or a part of a long one."""

    document: Document
    offset: int  # content bytes of the document before the piece, as planned: see ``Modality.cut``
    size: int  # content bytes, as planned

    @property
    def numbering(self) -> tuple[int, int]:
        """Its number among the pieces of a document that may be divided, from 1 on; and how many they are."""
        return self.offset // SAMPLE_BYTES + 1, -(-self.document.size // SAMPLE_BYTES)

    @property
    def ends(self) -> bool:
        """Whether the document ends with this piece."""
        return self.offset + self.size == self.document.size


def pack(documents: Iterable[Document], shard_bytes: int, modality: Modality) -> Iterator[list[Piece]]:
    """The pieces of each shard: in order, as many as fit into ``shard_bytes`` and an index, and at least one.

    Only a document longer than a shard goes on in the next shard: contexts that end with documents are rarely cut.
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
    """Whether a shard of these pieces may have this record, by its counts."""
    moved = record.content_bytes - sum(piece.size for piece in pieces)
    # Both ends of a shard may lie within a document: one may have been moved to before it, the other out of it.
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
    """Writes the shard ``name`` to ``file``, or nowhere. Returns its manifest record and the content of its index file.

    ``open_input`` stays open from one piece, and one shard, to the next. ``advance`` gets the content bytes of each
    piece. Raises DataError for a document that has changed since it was found.
    """
    with closing(_ShardStream(file, name, modality, properties)) as shard:
        for piece in pieces:
            content = _content_of(piece, modality, properties, open_input)
            shard.add(content, piece.ends)
            advance(len(content))
        return shard.finish()


def _content_of(piece: Piece, modality: Modality, properties: Properties, open_input: OpenInput) -> bytes:
    """The bytes of a piece, cut where the modality has it."""
    end = piece.offset + piece.size
    start = max(0, piece.offset - modality.cut_reach)
    stop = min(piece.document.size, end + bool(modality.cut_reach))
    content = open_input.read_on(piece.document, modality, properties, start, stop)
    first = modality.cut(content, piece.offset - start) if piece.offset else 0
    last = len(content) if piece.ends else modality.cut(content, end - start)
    return content[first:last]


class _ShardStream:
    """A tar stream that computes checksums while it writes, so that nothing is read again."""

    def __init__(self, file: BinaryIO | None, name: str, modality: Modality, properties: Properties) -> None:
        self._file, self._name = file, name
        self._modality, self._properties = modality, properties
        self._rows: list[tuple[int, int, int, int, bool]] = []
        self._members_end = 0  # of the members added so far; bytes after the last one end the archive
        self._file_bytes = 0
        self._digest = hashlib.sha256()
        self._crc32s: list[int] = []  # of the members that were written
        self._crc32 = 0  # of the member that is being written
        # Nothing of the machine or the moment may enter the file.
        self._tar = wds.TarWriter(self, encoder=False, compress=False, mtime=0, user="", group="", mode=0o644)

    def add(self, content: bytes, ends: bool) -> None:
        """Appends one sample. ``ends``: its document ends with it."""
        header = self._modality.header(len(content), self._properties)
        payload = header + self._modality.stored(content, self._properties)
        place = self._members_end + BLOCKSIZE + len(header)
        self._rows.append((self._members_end, place, len(content), 0, ends))
        self._members_end += BLOCKSIZE + -(-len(payload) // BLOCKSIZE) * BLOCKSIZE  # header, and payload in blocks
        key = ShardRecord.key_in(self._name, len(self._rows) - 1)
        self._tar.write({"__key__": key, self._modality.member_extension(content): payload})

    def write(self, content: bytes) -> int:
        """TarWriter writes its file through this, in blocks that do not end where members end."""
        if self._file is not None:
            self._file.write(content)
        self._file_bytes += len(content)
        self._digest.update(content)
        view = memoryview(content)
        while view and len(self._crc32s) < len(self._rows):
            row = len(self._crc32s)
            end = self._rows[row + 1][0] if row + 1 < len(self._rows) else self._members_end
            left = end - (self._file_bytes - len(view))
            self._crc32 = zlib.crc32(view[:left], self._crc32)
            if left <= len(view):
                self._crc32s.append(self._crc32)
                self._crc32 = 0
            view = view[left:]
        return len(content)

    def finish(self) -> tuple[ShardRecord, bytes]:
        """Ends the archive. Returns its manifest record and the content of its index file."""
        self._tar.close()
        rows = [(*row[:3], crc32, row[4]) for row, crc32 in zip(self._rows, self._crc32s, strict=True)]
        return ShardRecord.of(self._name, rows, self._file_bytes, self._digest.hexdigest())

    def close(self) -> None:
        """Closes the tar stream without writing: else it would write to the file when it is garbage collected."""
        self._file = None
        self._tar.close()
