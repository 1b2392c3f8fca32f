"""Text: the bytes of a file are the content, whatever their encoding."""

from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_pipelines.modalities.modality import Properties, token_bytes


class Text:
    """Bytes as they are."""

    name = "text"
    extension = "txt"
    suffixes: tuple[str, ...] = (".md", ".py", ".rst", ".txt")
    asks: tuple[str, ...] = ()
    packing = True
    divisible = True

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """Texts have nothing in common."""
        return {}

    def document_bytes(self, properties: Properties) -> int | None:
        """Texts are of any length."""
        return None

    def measure(self, path: Path, properties: Properties) -> int:
        """The file's size."""
        return path.stat().st_size

    def load(self, path: Path, file: BinaryIO, properties: Properties, offset: int, size: int) -> bytes:
        """A part of the file."""
        file.seek(offset)
        return file.read(size)

    def header(self, size: int, properties: Properties) -> bytes:
        """A text file has none."""
        return b""

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(n,) integers 0..255 -> the bytes of a text file."""
        return token_bytes(tokens)
