"""Text: the bytes of a file are the content, whatever their encoding."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.modalities.modality import Content, Modality, Properties


@dataclass(frozen=True, slots=True)
class _TextContent:
    file: BinaryIO

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.file.seek(0, 2))  # a file cannot be asked for any number of bytes
        self.file.seek(offset)
        return self.file.read(max(0, end - offset))


class Text(Modality):
    """Bytes as they are."""

    name = "text"
    extension = "txt"
    suffixes = (".md", ".py", ".rst", ".txt")
    sample_bytes = 256
    words = "text"
    description = "text, byte by byte"
    examples = ('longstride sample . --prompt "…"', "longstride sample . --temperature 0.8 --seed 1 > sample.txt")
    hub_task = "text-generation"

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """Texts have nothing in common."""
        return {}

    def measure(self, path: Path, properties: Properties) -> int:
        """The file's size."""
        return path.stat().st_size

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The file as it is."""
        return _TextContent(file)
