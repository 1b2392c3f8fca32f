"""The format of a compressed file: the code, by which model, and on what machine it can be read again.

    4 bytes   "LSZ" and the format's version, 2
    16 bytes  of the model's fingerprint
    varint    bytes of the content
    4 bytes   CRC-32 of the content
    varint    contexts side by side
    varint    length of the following, and by what the file was made in ASCII: ``machine_name``
    4 bytes   CRC-32 of what the model computes where the file was made: ``coding.computed_crc32``
    …         the code
    4 bytes   CRC-32 of all before it

Integers are little-endian; a varint has seven bits a byte, the lowest first. Some 60 bytes in all. Format 1 had torch's
version alone as the text, the CRC-32 of ``settings_crc32`` in place of what is computed, and no checks in its code.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import platform
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from longstride.sparse_model import SparseTransformer

_MAGIC = b"LSZ"
FORMAT = 2
_FINGERPRINT_BYTES = 16
_VARINT_BYTES = 9
_MOST_NAME = 80  # characters


class NotReadableError(ValueError):
    """The bytes are no compressed file of this version, or a damaged one; worded to follow the file's name."""


def machine_name(device: torch.device) -> str:
    """Return torch's version and the processor or card, for a person to compare."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor() or platform.machine()
    return f"torch {torch.__version__} on {name}"[:_MOST_NAME]


def settings_crc32(model: SparseTransformer) -> int:
    """Return format 1's CRC-32 of what else decides about last bits: packages, processor or card, type."""
    try:
        version = importlib.metadata.version("longstride")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        version = ""
    start = model.embedding.start
    computing = [
        version,
        torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),
        # Matrix products choose their loops by architecture and processor.
        f"{platform.machine()} {_processor()}",
        np.__version__,  # its exp makes probabilities of the logits
        torch.cuda.get_device_name(start.device) if start.is_cuda else start.device.type,
        str(start.dtype),
    ]
    return zlib.crc32("\n".join(computing).encode())


def _processor() -> str:
    """The processor's name, empty where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed file."""

    fingerprint: bytes  # the first 16 of the model's 32
    size: int  # bytes of the content
    crc32: int  # of the content
    rows: int  # contexts side by side
    made_by: str  # machine_name; in format 1 torch's version
    bits_crc32: int  # coding.computed_crc32; in format 1 settings_crc32
    code: bytes
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The whole file."""
        made_by = self.made_by.encode("ascii", "replace")
        parts = [
            _MAGIC,
            bytes([self.format]),
            self.fingerprint,
            _varint(self.size),
            self.crc32.to_bytes(4, "little"),
            _varint(self.rows),
            _varint(len(made_by)),
            made_by,
            self.bits_crc32.to_bytes(4, "little"),
            self.code,
        ]
        whole = b"".join(parts)
        return whole + zlib.crc32(whole).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, whole: bytes) -> Compressed:
        """The file whose bytes these are.

        Raises:
            NotReadableError: it is another file, of a newer format, damaged or cut short.
        """
        if whole[:3] != _MAGIC:
            raise NotReadableError("is no file that `longstride compress` wrote")
        if whole[3:4] and not 1 <= whole[3] <= FORMAT:
            raise NotReadableError(f"is of format {whole[3]}, and this Longstride reads 1 to {FORMAT}")
        body, check = whole[:-4], whole[-4:]
        damaged = NotReadableError("is damaged or cut short; fetch it again")
        if len(body) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
            raise damaged
        file = io.BytesIO(body[4:])
        try:
            fingerprint = _take(file, _FINGERPRINT_BYTES)
            size, crc32 = _take_varint(file), int.from_bytes(_take(file, 4), "little")
            rows, made_by = _take_varint(file), _take(file, _take_varint(file)).decode("ascii")
            bits_crc32 = int.from_bytes(_take(file, 4), "little")
        except ValueError:
            raise damaged from None
        if len(made_by) > _MOST_NAME:
            raise damaged
        return cls(fingerprint, size, crc32, rows, made_by, bits_crc32, file.read(), whole[3])


def shortened(fingerprint: str) -> bytes:
    """What a file keeps of a model's fingerprint, from its hexadecimal form."""
    return bytes.fromhex(fingerprint)[:_FINGERPRINT_BYTES]


def _take(file: io.BytesIO, size: int) -> bytes:
    """The next bytes; ValueError where the file ends early."""
    field = file.read(size)
    if len(field) < size:
        raise ValueError
    return field


def _take_varint(file: io.BytesIO) -> int:
    value = 0
    for number in range(_VARINT_BYTES):
        (byte,) = _take(file, 1)
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value
    raise ValueError


def _varint(number: int) -> bytes:
    parts = []
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])
