"""Text: the bytes of a file are the content, whatever their encoding."""

from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.formats import file_format
from longstride.data_pipelines.modalities.modality import Content, FileContent, Modality, Properties


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
        return {}  # texts have nothing in common

    def check_head(self, where: str, head: bytes) -> None:
        kind = file_format(head)
        if kind is not None:
            mend = f"`{kind.program}` unpacks it" if kind.program else "index it by the modality that it is of"
            raise DataError(f"{where} is {kind.name}, and no text; name another by --extension, or {mend}")

    def measure(self, path: Path, properties: Properties) -> int:
        return path.stat().st_size

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        return FileContent(file)
