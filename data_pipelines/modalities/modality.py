"""What a modality has to say about itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from longstride.data_pipelines.errors import DataError

Properties = Mapping[str, int]  # what all documents of a set have in common: height, width, rate ...


class Content(Protocol):
    """The content of one open document."""

    def read(self, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``; fewer where the document has fewer.

        Reading on is cheap, going back may not be. Raises DataError for a document that is damaged.
        """


class Modality(Protocol):
    """How files of one kind become the bytes of a model's contexts, and back.

    A *document* is one file of the input; its *content* is a row of bytes 0..255, which the network is to predict.
    """

    name: str
    extension: str  # of a sample's member in a shard: KEY.extension
    suffixes: tuple[str, ...]  # of the files that a build takes from a folder unless told otherwise
    asks: tuple[str, ...]  # properties that a person may ask for when building
    packing: bool  # whether documents are laid end to end unless told otherwise; else each has contexts of its own
    divisible: bool  # whether a long document may become several samples

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The properties of a set by its first document, open as ``file``; ``path`` is for messages.

        Raises DataError for one that cannot be read, and for properties that cannot be had.
        """

    def document_bytes(self, properties: Properties) -> int | None:
        """Content bytes of every document where all have equally many, else None."""

    def measure(self, path: Path, properties: Properties) -> int:
        """Content bytes of a document, by its head alone. Raises DataError for one that does not fit the set."""

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The content of a document, open as ``file`` for as long as it is read; ``path`` is for messages.

        Raises DataError for a document that does not fit the set.
        """

    def header(self, size: int, properties: Properties) -> bytes:
        """What stands before ``size`` content bytes in a member: of the same length for every size."""

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(n,) integers 0..255 -> a file that a person opens. Raises DataError for another shape or range."""


def both_cases(*suffixes: str) -> tuple[str, ...]:
    """Suffixes in small and in capital letters: cameras and recorders write .JPG and .WAV."""
    return (*suffixes, *(suffix.upper() for suffix in suffixes))


def token_bytes(tokens: np.ndarray) -> bytes:
    """(n,) integers 0..255 -> n bytes. Raises DataError for another shape, type or range."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens of shape {tokens.shape} and type {tokens.dtype}: must be one row of integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 255:
        raise DataError(f"tokens from {tokens.min()} to {tokens.max()}: a byte is an integer from 0 to 255")
    return tokens.astype(np.uint8).tobytes()
