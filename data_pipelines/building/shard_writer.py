"""Write documents to shards: the pieces of every shard, and a shard with its index and checksums.

The pieces of a shard only depend on the documents' sizes, so any shard can be written without the others. A piece never
begins within a character: it then begins up to three bytes earlier than planned, and the previous piece ends there.
Both can be seen from the bytes around that place.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from tarfile import BLOCKSIZE, RECORDSIZE, TarInfo
from typing import BinaryIO

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
    rows: list[tuple[int, int, int, int, bool]] = []
    digest, file_bytes = hashlib.sha256(), 0  # of what is written, so that nothing is read again

    def write(block: bytes) -> None:
        nonlocal file_bytes
        if file is not None:
            file.write(block)
        digest.update(block)
        file_bytes += len(block)

    for piece in pieces:
        end = piece.offset + piece.size
        start = max(0, piece.offset - modality.cut_reach)
        stop = min(piece.document.size, end + bool(modality.cut_reach))
        around = open_input.read_on(piece.document, modality, properties, start, stop)
        first = modality.cut(around, piece.offset - start) if piece.offset else 0
        last = len(around) if piece.ends else modality.cut(around, end - start)
        content = around[first:last]
        header = modality.header(len(content), properties)
        payload = header + modality.stored(content, properties)
        # Owner, mode and time are the same everywhere: the file must not depend on the machine or the time.
        info = TarInfo(f"{ShardRecord.key_in(name, len(rows))}.{modality.member_extension(content)}")
        info.size = len(payload)
        member = info.tobuf() + payload + bytes(-len(payload) % BLOCKSIZE)
        place = file_bytes + BLOCKSIZE + len(header)
        rows.append((file_bytes, place, len(content), zlib.crc32(member), piece.ends))
        write(member)
        advance(len(content))
    write(bytes(2 * BLOCKSIZE + -(file_bytes + 2 * BLOCKSIZE) % RECORDSIZE))  # the end of an archive
    return ShardRecord.of(name, rows, file_bytes, digest.hexdigest())
