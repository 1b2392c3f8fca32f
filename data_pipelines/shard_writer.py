"""Documents to shards: which pieces go into which shard, and writing one with its index and checksums.

What a shard will hold follows from the documents' sizes alone, so that any shard may be written apart from the others.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import webdataset as wds

from data_pipelines.errors import DataError
from data_pipelines.shards import (
    BLOCK_BYTES,
    INDEX_DTYPE,
    ShardRecord,
    index_name,
    index_to_bytes,
    member_bytes,
    sample_key,
)
from data_pipelines.walk import Document

SAMPLE_BYTES = 2**20  # a longer file becomes several samples, each checked whole before a byte of it is used


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes one sample: a document, or a part of a long one."""

    document: Document
    offset: int  # bytes of the document before the piece
    size: int  # bytes

    def read(self) -> bytes:
        """The piece's bytes. Raises DataError where the document is no longer as the walk found it."""
        with self.document.path.open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
            if os.fstat(file.fileno()).st_size != self.document.size or len(content) != self.size:
                raise DataError(f"{self.document.path}: changed size while it was read; build again when it is at rest")
        return content


def pack(documents: Sequence[Document], shard_bytes: int) -> Iterator[list[Piece]]:
    """The pieces of each shard: in order, as many as fit into ``shard_bytes`` and at least one."""
    pieces: list[Piece] = []
    filled = 0
    for document in documents:
        for offset in range(0, document.size, SAMPLE_BYTES):
            piece = Piece(document, offset, min(SAMPLE_BYTES, document.size - offset))
            if pieces and filled + piece.size > shard_bytes:
                yield pieces
                pieces, filled = [], 0
            pieces.append(piece)
            filled += piece.size
    if pieces:
        yield pieces


class ShardFile:
    """A shard being written, with its index and checksum."""

    def __init__(self, folder: Path, name: str, extension: str) -> None:
        self.folder, self.name, self.extension = folder, name, extension
        self.rows: list[tuple[int, int, int, int]] = []
        self.payload_bytes = self.file_bytes = self._offset = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> "ShardFile":
        self._file = (self.folder / self.name).open("wb")
        # Nothing of the machine or the moment may enter the file.
        self._tar = wds.TarWriter(self, encoder=False, compress=False, mtime=0, user="", group="", mode=0o644)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._tar.close()
        finally:
            self._file.close()

    def write(self, content: bytes) -> int:
        """The file that TarWriter writes to."""
        self._digest.update(content)
        self.file_bytes += len(content)
        return self._file.write(content)

    def add(self, payload: bytes) -> None:
        """Append one sample."""
        key = sample_key(self.name, len(self.rows))
        self._tar.write({"__key__": key, self.extension: payload})
        self.rows.append((self._offset, self._offset + BLOCK_BYTES, len(payload), zlib.crc32(payload)))
        self._offset += member_bytes(len(payload))
        self.payload_bytes += len(payload)

    def record(self) -> ShardRecord:
        """Write the index of the closed shard; what the manifest says about it."""
        index = index_to_bytes(np.array(self.rows, dtype=INDEX_DTYPE))
        (self.folder / index_name(self.name)).write_bytes(index)
        return ShardRecord(
            name=self.name,
            samples=len(self.rows),
            payload_bytes=self.payload_bytes,
            file_bytes=self.file_bytes,
            sha256=self._digest.hexdigest(),
            index_sha256=hashlib.sha256(index).hexdigest(),
        )
