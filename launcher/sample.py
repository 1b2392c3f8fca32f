"""`longstride sample DIR`: bytes from an exported model, written as they come. Needs no deepspeed."""

from __future__ import annotations

import argparse
import codecs
import itertools
import os
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TextIO

import torch

from kernels.errors import ConfigError
from launcher.exported import load_model
from sparse_model.generation import generate

DEFAULT_BYTES = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("model", type=Path, metavar="DIR", help="folder written by `longstride export`")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="what to continue (default: nothing)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same from a file, as its bytes stand")
    parser.add_argument("--bytes", type=int, default=None, metavar="N", help="to sample (default: 256, or what fits)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely byte (default: 1)")
    parser.add_argument("--top-k", type=int, default=None, metavar="K", help="sample among the K most likely bytes")
    parser.add_argument("--top-p", type=float, default=None, metavar="P", help="among the fewest that hold P")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal samples (default: 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code. Everything is checked before the first byte is written."""
    check_device(arguments.device)
    model = load_model(arguments.model, arguments.device)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed={arguments.seed}: must be from 0 to 2**63 - 1")
    fitting = max(1, min(DEFAULT_BYTES, model.config.context - len(prompt)))
    try:
        sampled = generate(
            model,
            torch.tensor([list(prompt)], dtype=torch.int64, device=arguments.device),
            fitting if arguments.bytes is None else arguments.bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=torch.Generator(arguments.device).manual_seed(arguments.seed),
        )
    except ValueError as error:
        raise ConfigError(f"sample: {error}") from None
    pieces = itertools.chain([prompt], (bytes([int(token)]) for token in sampled))
    try:
        if sys.stdout.isatty():
            write_text(pieces, sys.stdout)
        else:
            write_bytes(pieces, sys.stdout.buffer)
    except BrokenPipeError:
        # The reader has what it wanted; what Python still holds back must not meet the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def write_bytes(pieces: Iterable[bytes], stream: BinaryIO) -> None:
    """Every byte as it is, as soon as it is there: for files and pipes."""
    for piece in pieces:
        stream.write(piece)
        stream.flush()


def write_text(pieces: Iterable[bytes], stream: TextIO) -> None:
    """Text as it comes, for a terminal: a character once it is whole, what is no UTF-8 as the replacement character.

    Control characters but for line ends and tabs are left out: they could do anything to a terminal.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = stream.encoding or "utf-8"
    for piece in itertools.chain(pieces, [b""]):
        text = decoder.decode(piece, final=not piece)
        shown = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        stream.write(shown.encode(encoding, "replace").decode(encoding))
        stream.flush()
    stream.write("\n")


def check_device(name: str) -> None:
    """Raise ConfigError where torch cannot use a device of this name."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device={name}: cannot be used: {str(error).splitlines()[0]}") from None


def read_prompt(text: str, path: Path | None) -> bytes:
    """The prompt's bytes.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return text.encode(errors="surrogateescape")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompt-file={path}: {error.strerror}") from None
