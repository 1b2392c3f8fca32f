"""Documents to shards: which pieces go into which shard, and one shard with its index and checksums.

What a shard will hold follows from the documents' sizes alone, so that any shard can be written without the others.
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
from longstride.data_pipelines.shards import ShardRecord

SAMPLE_BYTES = 2**16  # a longer document becomes several samples: each is checked whole, and lost whole if damaged


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes one sample: a document, or a part of a long one."""

    document: Document
    offset: int  # content bytes of the document before the piece
    size: int  # content bytes

    @property
    def ends(self) -> bool:
        """Whether the document ends with this piece."""
        return self.offset + self.size == self.document.size


def pack(documents: Iterable[Document], shard_bytes: int, modality: Modality) -> Iterator[list[Piece]]:
    """The pieces of each shard: in order, as many as fit into ``shard_bytes``, and at least one.

    Only a document longer than a shard goes on in the next shard: contexts that end with documents are rarely cut.
    """
    pieces: list[Piece] = []
    filled = 0
    for document in documents:
        step = SAMPLE_BYTES if modality.divisible else document.size
        for offset in range(0, document.size, step):
            piece = Piece(document, offset, min(step, document.size - offset))
            together = document.size if offset == 0 and document.size <= shard_bytes else piece.size
            if pieces and filled + together > shard_bytes:
                yield pieces
                pieces, filled = [], 0
            pieces.append(piece)
            filled += piece.size
    if pieces:
        yield pieces


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
            content = piece.document.read(open_input, modality, properties, piece.offset, piece.size)
            shard.add(content, piece.ends)
            advance(piece.size)
        return shard.finish()


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
        self._tar.write(
            {"__key__": ShardRecord.key_in(self._name, len(self._rows) - 1), self._modality.extension: payload}
        )

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
