"""Files by their first bytes, and compressed ones unpacked: whole, or an error."""

import bz2
import gzip
import io
import lzma
import sys
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest
import zstandard

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.formats import HEAD_BYTES, decompress, file_format
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.plain_files import blocks_of
from tests.harness.data.published_files import zipped
from tests.harness.data.tars import write_tar

TEXT = "a text, and what it holds: Grüße, 日本\n".encode() * 20_000
COMPRESS = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def drawn(kind: str) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (640, 480), "red").save(file, kind.partition(" ")[0])
    return file.getvalue()


def unpack(content: bytes) -> bytes:
    kind = file_format(content[:HEAD_BYTES])
    assert kind is not None and kind.begin is not None
    return b"".join(decompress("here", blocks_of(io.BytesIO(content)), kind))


@pytest.mark.parametrize("program", COMPRESS)
def test_compressed_files_give_what_they_hold_or_an_error(program):
    """Concatenated parts are read as one, as by the programs. Damage never ends a file silently."""
    whole = COMPRESS[program](TEXT)
    assert unpack(whole) == TEXT and unpack(whole + whole) == TEXT + TEXT and unpack(COMPRESS[program](b"")) == b""
    later = bytearray(whole + whole)  # damaged at the beginning of its second part
    later[len(whole) + 1] ^= 0xFF
    cut = whole[:-1], whole[: len(whole) // 2], whole + whole[:-9]
    for broken in (*cut, whole[:-40] + b"\xff" * 20 + whole[-20:], bytes(later), whole + b"another file"):
        with pytest.raises(
            DataError, match=rf"^here: is compressed by {program}, and damaged or cut short \(.+\); fet"
        ):
            unpack(broken)


@pytest.mark.parametrize("program", ["gzip", "bzip2", "xz"])
def test_zeros_behind_a_compressed_file_are_none_of_it(program):
    assert unpack(COMPRESS[program](TEXT) + bytes(512)) == TEXT


def test_zstd_skips_what_frames_ask_to_skip():
    assert unpack(b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + COMPRESS["zstd"](TEXT)) == TEXT


def test_zstd_without_its_library_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    rule = r"^here: is compressed by zstd, and zstandard, .* pip install zstandard, or unpack .* `zstd -d FILE`$"
    with pytest.raises(DataError, match=rule):
        unpack(COMPRESS["zstd"](TEXT))


def test_formats_are_told_by_what_programs_write(tmp_path):
    tar, array = write_tar(tmp_path / "a.tar", [("0.txt", b"text")]), io.BytesIO()
    np.save(array, np.zeros(3))
    table = pyarrow.table({"text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    found = {
        "a zip archive": zipped(tmp_path / "a.zip", {"a.txt": b"a"}).read_bytes(),
        "a tar archive": tar.read_bytes(),
        "a numpy array": array.getvalue(),
        "a Parquet file": (tmp_path / "a.parquet").read_bytes(),
        "a PDF file": b"%PDF-1.4\n%\xd0\xd4\xc5\xd8\n1 0 obj",
        **{f"a {name}": drawn(name) for name in ("GIF picture", "PNG picture", "WebP picture")},
        "a WAV sound": modality_named("audio").encode(np.zeros(3, dtype=np.uint8), {"rate": 8000}),
        "a program (ELF)": Path(sys.executable).read_bytes(),
    }
    for name, content in found.items():
        kind = file_format(content[:HEAD_BYTES])
        assert kind is not None and kind.name == name
    assert file_format((tmp_path / "empty.parquet").read_bytes()).name == "a Parquet file"
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    assert file_format((tmp_path / "empty.zip").read_bytes()).name == "a zip archive"


@pytest.mark.parametrize(
    "text",
    ["", "a", "PAR1 is a format", "BZh9 compresses", "PK stands for", "%PDF is", "GIF89a is", "RIFF", "ID3 tags", "MZ",
     "%PDF-1.5\n\\documentclass", "GIF89aの画像", "RIFF or WAVE", "“NUMPY”", "Obj 1",
     "\ufeffwith a mark", "fLaC begins", "Rar!", "7z", "ORC", "GGUF files", "x" * 257 + "ustar in a text"],
)  # fmt: skip
def test_texts_are_texts(text):
    for encoding in ("utf-8", "utf-16", "cp1252"):
        assert file_format(text.encode(encoding, "ignore")[:HEAD_BYTES]) is None
