"""`longstride data show DIR|URL`: a few samples as a person would see them: text printed, pictures and sounds drawn."""

from __future__ import annotations

import argparse
import codecs
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import DataFolder, Sample, sample_documents
from longstride.launcher.data import check_location

SHOWN_BYTES = 2000  # of a text
DEFAULT_COUNT = {"image": 16, "audio": 4}
MOST_DRAWN = {"image": 100, "audio": 20}  # more would not be told apart in one picture
# What could do anything to a terminal: control characters but for line ends and tabs, and those that turn the
# direction of writing.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("location", metavar="DIR|URL", help="data folder")
    parser.add_argument("--split", default="train")
    parser.add_argument("--count", type=int, metavar="N", help="samples (default: 3 texts, 16 pictures, 4 sounds)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--output", type=Path, metavar="PNG", help="picture to make, of pictures and sounds")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code.

    Raises:
        DataError: no such folder or split, damage, or options that do not fit the modality.
        ConfigError: a picture cannot be written.
    """
    check_location(arguments.location)
    folder = DataFolder(arguments.location)
    manifest = folder.manifest
    drawn = manifest.modality in MOST_DRAWN
    _check_options(arguments, manifest.modality)
    count = DEFAULT_COUNT.get(manifest.modality, 3) if arguments.count is None else arguments.count
    samples = sample_documents(folder, arguments.split, count, arguments.seed)
    if drawn:
        _draw(arguments, folder, samples)
        return 0
    try:
        print_texts(samples, sys.stdout)
    except BrokenPipeError:
        # The reader has what it wanted; what Python still holds back must not meet the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _check_options(arguments: argparse.Namespace, modality: str) -> None:
    most = MOST_DRAWN.get(modality)
    if most is None and arguments.output is not None:
        raise DataError(f"--output={arguments.output}: {modality} is printed, not drawn; leave it out")
    if most is not None and arguments.output is None:
        raise DataError(f"--output: {modality} is drawn, and needs a file to be made; such as --output samples.png")
    if most is not None and arguments.count is not None and arguments.count > most:
        raise DataError(f"--count={arguments.count}: one picture has room for {most} of {modality}")


def _draw(arguments: argparse.Namespace, folder: DataFolder, samples: Iterable[Sample]) -> None:
    from longstride.launcher.drawing.samples import (  # with matplotlib, which texts do without
        draw_pictures,
        draw_sounds,
    )
    from longstride.launcher.pictures import check_output, write_picture

    check_output(arguments.output)
    shown = list(samples)
    name = folder.store.location.rstrip("/").rpartition("/")[2]
    manifest = folder.manifest
    title = f"{name}, {arguments.split}: {len(shown)} of {manifest.splits[arguments.split].samples:,} samples"
    draw = {"image": draw_pictures, "audio": draw_sounds}[manifest.modality]
    write_picture(draw(shown, title), arguments.output)


def print_texts(samples: Iterable[Sample], stream: TextIO) -> None:
    """A line that names each sample, its text, and an empty line."""
    for _, content, _, place in samples:
        left = len(content) - SHOWN_BYTES
        lines = [f"=== {_UNSAFE.sub('?', place)}: {len(content):,} bytes ==="]
        lines.append(safe_text(content[:SHOWN_BYTES].tobytes(), final=left <= 0).removesuffix("\n"))
        lines += [f"=== {left:,} more bytes ==="] if left > 0 else []
        text = "\n".join(lines) + "\n\n"
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def safe_text(content: bytes, *, final: bool = True) -> str:
    """Bytes as UTF-8; what is none, and characters that command a terminal, as \\x escapes.

    Where more bytes follow (not ``final``), the beginning of a character at the end is left out.
    """
    text = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode(content, final)
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
