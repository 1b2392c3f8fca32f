"""`longstride compress FILE` and `decompress`: lossless, by an exported model's probabilities. Need no deepspeed."""

from __future__ import annotations

import argparse
import sys
import time
import zlib

from longstride.kernels import ConfigError
from longstride.launcher.compression.coding import DamagedError, decode, encode, rows_for
from longstride.launcher.compression.compressed_file import Compressed, NotReadableError, Surroundings, shortened
from longstride.launcher.generation import check_bytes, check_new, naming, read_file, write_new
from longstride.launcher.models import Exported, computing_numbers, load_model, usable_device
from longstride.launcher.output import ByteCounter


def run_compress(arguments: argparse.Namespace) -> int:
    """Runs `compress`; returns its exit code."""
    usable_device(arguments.device)
    check_new(arguments.output)
    content = read_file(arguments.file, "FILE")
    if Exported(arguments.model).has_palette:
        rule = "writes pixels of a palette, and compress codes the bytes of files; name a model of bytes"
        raise ConfigError(f"--model={arguments.model}: {rule}")
    model = load_model(arguments.model, arguments.device)
    with naming(f"FILE={arguments.file}"):
        check_bytes(content, model)
    start = time.perf_counter()
    rows = rows_for(model.config, len(content), model.embedding.start.dtype)
    counter = ByteCounter(len(content))
    with computing_numbers(arguments.model):
        code, bits = encode(model, content, rows, counter.at)
    counter.end()
    fingerprint = shortened(Exported(arguments.model).fingerprint())
    made = Surroundings.here(model)
    whole = Compressed(fingerprint, len(content), zlib.crc32(content), rows, made, code).to_bytes()
    write_new(arguments.output, whole)
    line = f"{arguments.output}: {len(whole):,} bytes of {len(content):,}"
    if content:
        rate = f"{8 * len(whole) / len(content):.4f} bits per byte (the model's {bits / len(content):.4f})"
        line += f", {rate}, in {time.perf_counter() - start:.1f} s"
    print(line, file=sys.stderr)
    return 0


def run_decompress(arguments: argparse.Namespace) -> int:
    """Runs `decompress`; returns its exit code. Writes nothing unless the content has its CRC-32."""
    usable_device(arguments.device)
    check_new(arguments.output)
    try:
        compressed = Compressed.from_bytes(read_file(arguments.file, "FILE"))
    except NotReadableError as error:
        raise ConfigError(f"FILE={arguments.file}: {error}") from None
    models = Exported(arguments.model).fingerprint()
    if compressed.fingerprint != shortened(models):
        needed = compressed.fingerprint.hex()
        rule = f"another model's file: its fingerprint begins with {needed}, and that of {arguments.model} with"
        raise ConfigError(f"FILE={arguments.file}: is {rule} {models[: len(needed)]}; name the model with --model")
    model = load_model(arguments.model, arguments.device)
    made, here = compressed.surroundings, Surroundings.here(model)
    if made != here and not arguments.elsewhere:
        differs = "on another processor, device or build of torch"
        if made.torch_version != here.torch_version:
            differs = f"with torch {made.torch_version}, and this is {here.torch_version}"
        rule = "where the model's last bits may differ; decompress it there, or try it with --elsewhere"
        raise ConfigError(f"FILE={arguments.file}: was compressed {differs}, {rule}")
    counter = ByteCounter(compressed.size)
    try:
        content = decode(model, compressed.code, compressed.size, compressed.rows, counter.at)
    except (DamagedError, FloatingPointError):
        content = None
    counter.end()
    if content is None or zlib.crc32(content) != compressed.crc32:
        rule = "the model computes other bits here than where it was compressed; decompress it there"
        raise ConfigError(f"FILE={arguments.file}: {rule}")
    write_new(arguments.output, content)
    print(f"{arguments.output}: {len(content):,} bytes", file=sys.stderr)
    return 0
