"""`longstride compress FILE` and `decompress`: lossless compression by an exported model's probabilities.

A compressed file has the code, the model and the machine on which it can be read again:

    4 bytes   "LSZ" and the format's version, 2
    16 bytes  of the model's fingerprint
    varint    bytes of the content
    4 bytes   CRC-32 of the content
    varint    contexts in a batch
    varint    length of the next field
    text      the machine that made the file, in ASCII: ``machine_name``
    4 bytes   CRC-32 of numbers that the model computed there: ``coding.computed_crc32``
    …         the code
    4 bytes   CRC-32 of all bytes before

Integers are little-endian. A varint has seven bits a byte, the lowest first. All fields but the code take about 60
bytes. Format 1 had only torch's version as the text, a CRC-32 of settings instead of computed numbers, and no checks in
its code. Needs no deepspeed.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
import zlib
from dataclasses import dataclass

import torch

from longstride.kernels import ConfigError
from longstride.launcher.compression.coding import DamagedError, computed_crc32, decode, encode, rows_for
from longstride.launcher.files import check_new, naming, read_file, write_new
from longstride.launcher.generation import check_bytes
from longstride.launcher.models import Exported, load_model, require_finite_logits, usable_device
from longstride.launcher.output import counting
from longstride.launcher.ranks import processor_name
from longstride.sparse_model import SparseTransformer

_MAGIC = b"LSZ"
FORMAT = 2
_FINGERPRINT_BYTES = 16
_VARINT_BYTES = 9
_MOST_NAME = 80  # characters


def run_compress(arguments: argparse.Namespace) -> int:
    """Run `compress`; return its exit code."""
    usable_device(arguments.device)
    check_new(arguments.output)
    content = read_file(arguments.file, "FILE")
    exported = Exported(arguments.model, trust_code=arguments.trust_code)
    if exported.has_palette:
        rule = "writes pixels of a palette, but compress needs a model of bytes; name one"
        raise ConfigError(f"--model={arguments.model}: {rule}")
    model = load_model(arguments.model, arguments.device, trust_code=arguments.trust_code)
    model.config.require_next_token()
    with naming(f"FILE={arguments.file}"):
        check_bytes(content, model)
    start = time.perf_counter()
    rows = rows_for(model.config, len(content), model.embedding.start.dtype)
    counter = counting.WorkCounter("compressing", len(content), "bytes")
    with require_finite_logits(arguments.model):
        computed = computed_crc32(model, len(content), rows)
        code, bits = encode(model, content, rows, counter.at)
    counter.close()
    fingerprint = bytes.fromhex(exported.fingerprint())[:_FINGERPRINT_BYTES]
    made_by = machine_name(model.embedding.start.device)
    compressed = Compressed(fingerprint, len(content), zlib.crc32(content), rows, made_by, computed, code).to_bytes()
    write_new(arguments.output, compressed)
    line = f"{arguments.output}: {len(compressed):,} bytes of {len(content):,}"
    if content:
        rate = f"{8 * len(compressed) / len(content):.4f} bits per byte (the model's {bits / len(content):.4f})"
        line += f", {rate}, in {time.perf_counter() - start:.1f} s"
    print(line, file=sys.stderr)
    return 0


def run_decompress(arguments: argparse.Namespace) -> int:
    """Run `decompress`; return its exit code. Nothing is written unless the content has its CRC-32."""
    usable_device(arguments.device)
    check_new(arguments.output)
    packed = read_file(arguments.file, "FILE")
    with naming(f"FILE={arguments.file}"):
        compressed = Compressed.from_bytes(packed)
    fingerprint = Exported(arguments.model, trust_code=arguments.trust_code).fingerprint()
    needed = compressed.fingerprint.hex()
    if not fingerprint.startswith(needed):
        rule = f"another model's file: its fingerprint begins with {needed}, and that of {arguments.model} with"
        raise ConfigError(f"FILE={arguments.file}: is {rule} {fingerprint[: len(needed)]}; name the model with --model")
    model = load_model(arguments.model, arguments.device, trust_code=arguments.trust_code)
    is_checked = compressed.format > 1 and not arguments.elsewhere  # format 1 only has the content's checksum
    if is_checked and (difference := _difference(compressed, model)) is not None:
        advice = "decompress it there, or try it with --elsewhere"
        raise ConfigError(f"FILE={arguments.file}: was compressed {difference}; {advice}")
    counter = counting.WorkCounter("decompressing", compressed.size, "bytes")
    try:
        size, rows, has_checks = compressed.size, compressed.rows, compressed.format > 1
        content = decode(model, compressed.code, size, rows, counter.at, has_checks=has_checks)
    except (DamagedError, FloatingPointError):
        content = None
    counter.close()
    if content is None or zlib.crc32(content) != compressed.crc32:
        rule = "the model computes different bits here than where it was compressed; decompress it there"
        raise ConfigError(f"FILE={arguments.file}: {rule}")
    write_new(arguments.output, content)
    print(f"{arguments.output}: {len(content):,} bytes", file=sys.stderr)
    return 0


def _difference(compressed: Compressed, model: SparseTransformer) -> str | None:
    """Describe how a file's machine differs from this one, to follow "was compressed"; None if the bits agree."""
    made_by = compressed.made_by
    try:
        if computed_crc32(model, compressed.size, compressed.rows) == compressed.bits_crc32:
            return None
    except (DamagedError, FloatingPointError):
        pass  # an encoder would have failed
    this_machine = machine_name(model.embedding.start.device)
    if this_machine == made_by:
        return f"by {made_by} as here, but the model computes different bits: a setting such as MKL_CBWR differs"
    return f"by {made_by}, and the model computes different bits here, by {this_machine}"


def machine_name(device: torch.device) -> str:
    """Return torch's version and the processor or GPU, for people to compare."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return f"torch {torch.__version__} on {name}"[:_MOST_NAME]


@dataclass(frozen=True, slots=True)
class Compressed:
    """The content of a compressed file."""

    fingerprint: bytes  # the first 16 of the model's 32
    size: int  # bytes of the content
    crc32: int  # of the content
    rows: int  # contexts in a batch
    made_by: str  # machine_name; in format 1 torch's version
    bits_crc32: int  # coding.computed_crc32; in format 1 of settings
    code: bytes
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Return the bytes of the file."""
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
        content = b"".join(parts)
        return content + zlib.crc32(content).to_bytes(4, "little")

    @classmethod
    def from_bytes(cls, content: bytes) -> Compressed:
        """Read a file; ConfigError if it is another file, of a newer format, damaged or truncated."""
        if content[:3] != _MAGIC:
            raise ConfigError("is not a file that `longstride compress` wrote")
        if content[3:4] and not 1 <= content[3] <= FORMAT:
            raise ConfigError(f"has format {content[3]}, but this Longstride reads 1 to {FORMAT}")
        body, check = content[:-4], content[-4:]
        damaged = ConfigError("is damaged or cut short; fetch it again")
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
        return cls(fingerprint, size, crc32, rows, made_by, bits_crc32, file.read(), content[3])


def _take(file: io.BytesIO, size: int) -> bytes:
    """Read the next bytes; ValueError if the file ends early."""
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
