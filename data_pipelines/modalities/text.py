"""Text: the bytes of a file are the content, whatever their encoding. Compressed files are decompressed."""

from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.formats import (
    HEAD_BYTES,
    PARQUET,
    FileFormat,
    decompress,
    decompressed_content,
    file_format,
)
from longstride.data_pipelines.modalities.modality import Content, FileContent, Modality, Properties
from longstride.data_pipelines.plain_files import blocks_of, open_plain


class Text(Modality):
    """Plain bytes. The property ``raw`` is 1 if files of any format are read as bytes; else it is absent."""

    name = "text"
    extension = "txt"
    odd_extension = "bin"
    suffixes = (".md", ".py", ".rst", ".txt")
    may_ask = ("raw",)
    cut_reach = 3  # a UTF-8 character has up to three bytes after the first
    sample_bytes = 256
    words = "text"
    description = "text, byte by byte"
    examples = ('longstride sample . --prompt "…"', "longstride sample . --temperature 0.8 --seed 1 > sample.txt")
    hub_task = "text-generation"

    def settle(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        return {"raw": 1} if requested.get("raw") else {}

    def check_head(self, where: str, head: bytes, properties: Properties) -> None:
        kind = None if properties.get("raw") else file_format(head)
        if kind is not None:
            rule = "name the member that holds the text with --extension"
            if kind.begin is not None:
                rule = "unpack the tars, and make a data folder with `longstride data build`"
            raise DataError(f"{where} is {kind.name}, not text; {rule}, {_AS_IT_IS}")

    def measure(self, path: Path, properties: Properties) -> int:
        """Count the file's bytes; a compressed file is decompressed once, as its end does not state the size."""
        if properties.get("raw"):
            return path.stat().st_size
        with open_plain(path) as file:
            kind = _compression(path, file)
            if kind is None:
                return path.stat().st_size
            size, head = 0, b""
            for block in decompress(path, blocks_of(file), kind):
                if len(head) < HEAD_BYTES:
                    head += block[:HEAD_BYTES]
                size += len(block)
        inside = file_format(head)
        if inside is not None:
            what = f"is {kind.name} that holds {inside.name}"
            raise DataError(f"{path}: {what}; unpack it first, such as with `{kind.program} FILE`, {_AS_IT_IS}")
        return size

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        kind = None if properties.get("raw") else _compression(path, file)
        return FileContent(file) if kind is None else decompressed_content(path, file, kind)

    def cut(self, content: bytes, place: int) -> int:
        """Return the first byte of the UTF-8 character that continues at ``place``."""
        first = place
        while first > max(0, place - self.cut_reach) and content[first] & 0xC0 == 0x80:  # a continuation byte
            first -= 1
        lead = content[first]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        return first if first + size > place else place

    def member_extension(self, content: bytes) -> str:
        """Return ``extension`` for UTF-8, else ``odd_extension``."""
        try:
            content.decode()
        except UnicodeDecodeError:
            return self.odd_extension
        return self.extension


_AS_IT_IS = "or take its bytes as they are with --raw"


def _compression(path: Path, file: BinaryIO) -> FileFormat | None:
    """Identify the compression of an open file; None for a text. Raises DataError for a file of another format."""
    file.seek(0)
    kind = file_format(file.read(HEAD_BYTES))
    file.seek(0)
    if kind is None or kind.begin is not None:
        return kind
    rule = "leave it out, such as with --exclude"
    if kind.name == PARQUET:
        rule = "name the text's field with --field, such as --field text"
    elif kind.modality:
        rule = f"take it with --modality {kind.modality}, {rule}"
    elif kind.program:
        rule = f"unpack it first, such as with `{kind.program} FILE`"
    raise DataError(f"{path}: is {kind.name}, not text; {rule}, {_AS_IT_IS}")
