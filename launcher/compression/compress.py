"""`longstride compress FILE` and `decompress`: lossless, by an exported model's probabilities. Need no deepspeed."""

from __future__ import annotations

import argparse
import sys
import time
import zlib

import torch

from longstride.kernels import ConfigError
from longstride.launcher.compression.coding import DamagedError, computed_crc32, decode, encode, rows_for
from longstride.launcher.compression.compressed_file import (
    Compressed,
    NotReadableError,
    machine_name,
    settings_crc32,
    shortened,
)
from longstride.launcher.files import check_new, naming, read_file, write_new
from longstride.launcher.generation import check_bytes
from longstride.launcher.models import Exported, computing_numbers, load_model, usable_device
from longstride.launcher.output import counting
from longstride.sparse_model import SparseTransformer


def run_compress(arguments: argparse.Namespace) -> int:
    """Runs `compress`; returns its exit code."""
    usable_device(arguments.device)
    check_new(arguments.output)
    content = read_file(arguments.file, "FILE")
    if Exported(arguments.model, trust_code=arguments.trust_code).has_palette:
        rule = "writes pixels of a palette, and compress codes the bytes of files; name a model of bytes"
        raise ConfigError(f"--model={arguments.model}: {rule}")
    model = load_model(arguments.model, arguments.device, trust_code=arguments.trust_code)
    with naming(f"FILE={arguments.file}"):
        check_bytes(content, model)
    start = time.perf_counter()
    rows = rows_for(model.config, len(content), model.embedding.start.dtype)
    counter = counting.WorkCounter("compressing", len(content), "bytes")
    with computing_numbers(arguments.model):
        computed = computed_crc32(model, len(content), rows)
        code, bits = encode(model, content, rows, counter.at)
    counter.close()
    fingerprint = shortened(Exported(arguments.model, trust_code=arguments.trust_code).fingerprint())
    made_by = machine_name(model.embedding.start.device)
    whole = Compressed(fingerprint, len(content), zlib.crc32(content), rows, made_by, computed, code).to_bytes()
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
    models = Exported(arguments.model, trust_code=arguments.trust_code).fingerprint()
    if compressed.fingerprint != shortened(models):
        needed = compressed.fingerprint.hex()
        rule = f"another model's file: its fingerprint begins with {needed}, and that of {arguments.model} with"
        raise ConfigError(f"FILE={arguments.file}: is {rule} {models[: len(needed)]}; name the model with --model")
    model = load_model(arguments.model, arguments.device, trust_code=arguments.trust_code)
    if not arguments.elsewhere and (difference := _difference(compressed, model)) is not None:
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
        rule = "the model computes other bits here than where it was compressed; decompress it there"
        raise ConfigError(f"FILE={arguments.file}: {rule}")
    write_new(arguments.output, content)
    print(f"{arguments.output}: {len(content):,} bytes", file=sys.stderr)
    return 0


def _difference(compressed: Compressed, model: SparseTransformer) -> str | None:
    """How a file's machine differs from this one, worded to follow "was compressed"; None where the bits agree."""
    made_by = compressed.made_by
    if compressed.format == 1:  # which knows only what bits depend on, not the bits
        if made_by == torch.__version__ and compressed.bits_crc32 == settings_crc32(model):
            return None
        differs = "on another processor, device or build of torch"
        if made_by != torch.__version__:
            differs = f"with torch {made_by}, and this is {torch.__version__}"
        return f"{differs}, where the model's last bits may differ"
    try:
        if computed_crc32(model, compressed.size, compressed.rows) == compressed.bits_crc32:
            return None
    except (DamagedError, FloatingPointError):
        pass  # no model computes that where a file is made
    here = machine_name(model.embedding.start.device)
    if here == made_by:
        return f"by {made_by} as here, and yet the model computes other bits: a setting such as MKL_CBWR differs"
    return f"by {made_by}, and the model computes other bits here, by {here}"
