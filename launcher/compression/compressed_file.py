"""The format of a compressed file: the code, by which model, and on what machine it can be read again.

    4 bytes   "LSZ" and the format's version
    16 bytes  of the model's fingerprint
    varint    bytes of the content
    4 bytes   CRC-32 of the content
    varint    contexts side by side
    varint    length of the following, and torch's version in ASCII
    4 bytes   CRC-32 of what else decides about the last bits (``Surroundings.rest``)
    …         the code
    4 bytes   CRC-32 of all before it

Integers are little-endian; a varint has seven bits a byte, the lowest first. Some 50 bytes in all.
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
FORMAT = 1
_FINGERPRINT_BYTES = 16
_VARINT_BYTES = 9


class NotReadableError(ValueError):
    """The bytes are no compressed file of this version, or a damaged one; worded to follow the file's name."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the bits of a model's logits depend on, beside the model and how many contexts are computed side by side."""

    torch_version: str
    rest: int  # CRC-32 of Longstride's version, torch's build, the processor or card, and the type computed in

    @classmethod
    def here(cls, model: SparseTransformer) -> Surroundings:
        """Of this process, where it computes a model."""
        try:
            version = importlib.metadata.version("longstride")
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            version = ""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        start = model.embedding.start
        computing = [
            version,
            torch.__config__.show(),
            torch.backends.cpu.get_cpu_capability(),
            # Matrix products choose their loops by architecture and processor.
            f"{platform.machine()} {names[0] if names else platform.processor()}",
            np.__version__,  # its exp makes probabilities of the logits
            torch.cuda.get_device_name(start.device) if start.is_cuda else start.device.type,
            str(start.dtype),
        ]
        return cls(torch.__version__, zlib.crc32("\n".join(computing).encode()))


@dataclass(frozen=True, slots=True)
class Compressed:
    """A compressed file."""

    fingerprint: bytes  # the first 16 of the model's 32
    size: int  # bytes of the content
    crc32: int  # of the content
    rows: int  # contexts side by side
    surroundings: Surroundings
    code: bytes

    def to_bytes(self) -> bytes:
        """The whole file."""
        version = self.surroundings.torch_version.encode("ascii", "replace")
        parts = [
            _MAGIC,
            bytes([FORMAT]),
            self.fingerprint,
            _varint(self.size),
            self.crc32.to_bytes(4, "little"),
            _varint(self.rows),
            _varint(len(version)),
            version,
            self.surroundings.rest.to_bytes(4, "little"),
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
        if whole[3:4] and whole[3] != FORMAT:
            raise NotReadableError(f"is of format {whole[3]}, and this Longstride reads {FORMAT}")
        body, check = whole[:-4], whole[-4:]
        damaged = NotReadableError("is damaged or cut short; fetch it again")
        if len(body) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
            raise damaged
        file = io.BytesIO(body[4:])
        try:
            fingerprint = _take(file, _FINGERPRINT_BYTES)
            size, crc32 = _take_varint(file), int.from_bytes(_take(file, 4), "little")
            rows, version = _take_varint(file), _take(file, _take_varint(file)).decode("ascii")
            rest = int.from_bytes(_take(file, 4), "little")
        except ValueError:
            raise damaged from None
        return cls(fingerprint, size, crc32, rows, Surroundings(version, rest), file.read())


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
