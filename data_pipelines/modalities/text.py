"""Text: the bytes of a file are the content, whatever their encoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from longstride.data_pipelines.modalities.modality import Content, Properties, token_bytes


@dataclass(frozen=True, slots=True)
class _Bytes:
    file: BinaryIO

    def read(self, offset: int, size: int) -> bytes:
        self.file.seek(offset)
        return self.file.read(size)


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

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The file as it is."""
        return _Bytes(file)

    def header(self, size: int, properties: Properties) -> bytes:
        """A text file has none."""
        return b""

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(n,) integers 0..255 -> the bytes of a text file."""
        return token_bytes(tokens)
