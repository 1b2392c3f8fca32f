"""`longstride sample DIR`: bytes from an exported model, as text, pictures or sounds, and a file's likelihood under it.

Needs no deepspeed. Letters: P prompts, S samples (each prompt's, one after another).
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np
import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.config import load_json_object
from longstride.launcher.generation import files as sample_files
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.generation.plain_files import named, read_file
from longstride.launcher.generation.prompts import frames_in, kept_rows, read_picture, read_prompt, read_sound
from longstride.launcher.models import ModelData, computing_numbers, load_model, usable_device
from longstride.launcher.output import ByteCounter, file_names
from longstride.sparse_model import SparseTransformer, generate

DEFAULT_BYTES = 256  # of text
_OF_SAMPLES = (
    *("prompt", "prompt_file", "prompt_image", "keep_rows", "prompt_audio", "keep_seconds", "count", "bytes"),
    *("seconds", "slide", "top_k", "top_p", "output"),
)
_OF_SCORES = ("decoded", "min_context", "batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("model", type=Path, metavar="DIR", help="folder written by `longstride export`")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=None, metavar="TEXT", help="what to continue (default: nothing)")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same from a file, as its bytes stand")
    prompt.add_argument("--prompt-image", type=Path, nargs="+", metavar="FILE", help="pictures to complete")
    prompt.add_argument("--prompt-audio", type=Path, metavar="FILE", help="a sound to continue")
    parser.add_argument("--keep-rows", type=int, metavar="R", help="of each --prompt-image (default: half)")
    parser.add_argument("--keep-seconds", type=float, metavar="S", help="of --prompt-audio (default: half a context)")
    parser.add_argument("--count", type=int, metavar="N", help="samples of each prompt, in one batch (default: 1)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--bytes", type=int, metavar="N", help="to sample (default: of text 256, or what fits)")
    length.add_argument("--seconds", type=float, metavar="S", help="the same of sound")
    parser.add_argument("--slide", action="store_true", help="go on beyond the model's context, with what fits of it")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely byte (default: 1)")
    parser.add_argument("--top-k", type=int, default=None, metavar="K", help="sample among the K most likely bytes")
    parser.add_argument("--top-p", type=float, default=None, metavar="P", help="among the fewest that hold P")
    parser.add_argument("--seed", type=int, default=0, help="the same command gives the same samples (default: 0)")
    parser.add_argument("--modality", choices=ModelData.MODALITIES, help="of the output (default: the model's)")
    parser.add_argument("--rate", type=int, metavar="HZ", help="of sounds (default: the model's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help=".png of pictures, .wav of sounds, any of text")
    score = parser.add_argument_group("a file's score, instead of samples")
    score.add_argument("--likelihood", type=Path, metavar="FILE", help="bits per byte of a file's bytes")
    score.add_argument("--decoded", action="store_true", help="its pixels or its sound, as the model writes them")
    score.add_argument("--min-context", type=int, metavar="M", help="earlier bytes that every byte sees (default: 0)")
    score.add_argument("--batch", type=int, metavar="B", help="contexts at once (default: what is quick)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be sampled, and where it goes."""

    data: ModelData
    prompts: list[bytes]  # P, of one length
    count: int  # samples of each
    num_bytes: int  # to sample
    pictures: list[np.ndarray] = field(default_factory=list)  # those to complete, (height, width, 3) each
    rows: int = 0  # of each that are given
    files: list[Path] = field(default_factory=list)  # none: standard output


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; returns its exit code. Everything is checked before the first byte is written."""
    usable_device(arguments.device)
    scored = arguments.likelihood is not None
    for name in _OF_SAMPLES if scored else _OF_SCORES:
        if getattr(arguments, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            if scored:
                raise ConfigError(f"--likelihood: scores a file, and samples nothing; leave out {option}")
            raise ConfigError(f"{option}: is of --likelihood FILE; leave it out")
    if scored:
        return run_likelihood(arguments)
    model = load_model(arguments.model, arguments.device)
    request = settle(arguments, model)
    sampled = _sampled(arguments, model, request)
    with computing_numbers(arguments.model):
        if request.files:
            _write_files(request, _collected(request, sampled))
            return 0
        try:
            _write_output(request, sampled)
        except BrokenPipeError:
            # The reader has what it wanted; what Python still holds back must not meet the closed pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def run_likelihood(arguments: argparse.Namespace) -> int:
    """Prints a file's score: a JSON line, and on standard error one for people."""
    model = load_model(arguments.model, arguments.device)
    if arguments.decoded:
        content = _decoded(arguments.likelihood, _data(arguments, model))
    else:
        content = read_file(arguments.likelihood, "--likelihood")
    with computing_numbers(arguments.model), named(f"--likelihood={arguments.likelihood}"):
        line = likelihood(model, content, min_context=arguments.min_context or 0, batch_size=arguments.batch)
    print(json.dumps({"file": str(arguments.likelihood), **line}))
    print(f"{line['bits_per_byte']:.4f} bits per byte on {arguments.likelihood}", file=sys.stderr)
    return 0


def settle(arguments: argparse.Namespace, model: SparseTransformer) -> Request:
    """What the options ask for, of this model.

    Raises:
        ConfigError, DataError: they do not fit the model or each other, or a prompt cannot be read.
    """
    data = _data(arguments, model)
    count = 1 if arguments.count is None else arguments.count
    if count < 1:
        raise ConfigError(f"--count={count}: must be at least 1")
    for name, needed in (("keep_rows", "prompt_image"), ("keep_seconds", "prompt_audio")):
        if getattr(arguments, name) is not None and getattr(arguments, needed) is None:
            raise ConfigError(f"--{name.replace('_', '-')}: is of --{needed.replace('_', '-')} FILE; leave it out")
    pictures, rows = [], 0
    if arguments.prompt_image is not None:
        pictures = [read_picture(path, data) for path in arguments.prompt_image]
        rows = kept_rows(arguments.keep_rows, data)
        prompts = [picture[:rows].tobytes() for picture in pictures]
    elif arguments.prompt_audio is not None:
        prompts = [read_sound(arguments.prompt_audio, data, arguments.keep_seconds, model.config.context // 2)]
    else:
        prompts = [read_prompt(arguments.prompt or "", arguments.prompt_file)]
    num_bytes = _length(arguments, data, len(prompts[0]), model.config.context)
    request = Request(data, prompts, count, num_bytes, pictures, rows, _files(arguments, data, count, len(pictures)))
    if data.modality == "audio" and request.files:
        _ = data.rate  # told now, if nothing tells it
    return request


def _data(arguments: argparse.Namespace, model: SparseTransformer) -> ModelData:
    content = load_json_object(arguments.model / file_names.CONFIG)
    return ModelData.of(content, model.config, arguments.modality, arguments.rate)


def _decoded(path: Path, data: ModelData) -> bytes:
    """A file's content as the model writes it."""
    if data.modality == "image":
        return read_picture(path, data, "--likelihood").tobytes()
    if data.modality == "audio":
        return read_sound(path, data, name="--likelihood")
    return read_file(path, "--likelihood")


def _length(arguments: argparse.Namespace, data: ModelData, given: int, context: int) -> int:
    """Bytes to sample after so many that are given; ConfigError where they do not fit."""
    if data.modality == "image":
        for option in ("bytes", "seconds", "slide"):
            if getattr(arguments, option) not in (None, False):
                rule = f"a picture has {context} bytes, no more and no less; leave it out, or take --modality text"
                raise ConfigError(f"--{option}: {rule}")
        if given >= context:
            raise ConfigError(f"--prompt-file: has {given} bytes, and a picture {context}; give less of it")
        return context - given
    if arguments.seconds is not None:
        if data.modality != "audio":
            raise ConfigError(f"--seconds: the model writes {data.words}; take --bytes")
        asked = frames_in(arguments.seconds, data.rate, "--seconds")
    elif arguments.bytes is not None:
        asked = arguments.bytes
    else:
        asked = max(1, min(DEFAULT_BYTES if data.modality == "text" else context, context - given))
    if asked < 1:
        raise ConfigError(f"--bytes={asked}: must be at least 1")
    if given + asked > context and not arguments.slide:
        fits = f"take at most --bytes {context - given}, or " if given < context else ""
        rule = f"they must fit in the model's context of {context}; {fits}add --slide to go on beyond it"
        raise ConfigError(f"sample: prompt and sample are {given + asked} tokens: {rule}")
    return asked


def _files(arguments: argparse.Namespace, data: ModelData, count: int, num_pictures: int) -> list[Path]:
    """Where samples go, none for standard output; ConfigError where they cannot go there."""
    if arguments.output is None:
        if data.modality != "text" and sys.stdout.isatty():
            example = {"image": "samples.png", "audio": "sample.wav"}[data.modality]
            rule = f"the model writes {data.words}, which need a file, such as --output {example}, or a pipe"
            raise ConfigError(f"--output: {rule}")
        return []
    if data.modality == "image":
        columns = count + 2 if num_pictures else sample_files.square_columns(count)
        sample_files.grid_size(num_pictures or -(-count // columns), columns, *data.shape[:2])
    return sample_files.output_files(arguments.output, data, count)


def _sampled(arguments: argparse.Namespace, model: SparseTransformer, request: Request) -> Iterator[Tensor]:
    """The tokens of all samples, (S,) each; ConfigError where a setting is out of range."""
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed={arguments.seed}: must be from 0 to 2**63 - 1")
    rows = [list(prompt) for prompt in request.prompts for _ in range(request.count)]
    try:
        return generate(
            model,
            torch.tensor(rows, dtype=torch.int64, device=arguments.device),
            request.num_bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=torch.Generator(arguments.device).manual_seed(arguments.seed),
            slide=arguments.slide,
        )
    except ValueError as error:
        raise ConfigError(f"sample: {error}") from None


def _collected(request: Request, sampled: Iterator[Tensor]) -> np.ndarray:
    """All samples, each behind its prompt, (S, bytes) uint8; on a terminal a line tells how far they are."""
    given = [np.frombuffer(prompt, dtype=np.uint8) for prompt in request.prompts for _ in range(request.count)]
    columns, counter = [], ByteCounter(request.num_bytes)
    for number, tokens in enumerate(sampled, start=1):
        columns.append(tokens.to("cpu", torch.uint8).numpy())
        counter.at(number)
    counter.end()
    return np.concatenate([np.stack(given), np.stack(columns, axis=1)], axis=1)


def _write_files(request: Request, samples: np.ndarray) -> None:
    if request.data.modality == "image":
        pictures = list(samples.reshape(-1, *request.data.shape))
        tiles = sample_files.in_square(pictures)
        if request.pictures:
            count, rows = request.count, request.rows
            tiles = [
                [picture, sample_files.masked(picture, rows), *pictures[number * count : (number + 1) * count]]
                for number, picture in enumerate(request.pictures)
            ]
        sample_files.write_pictures(request.files[0], tiles)
    elif request.data.modality == "audio":
        sample_files.write_sounds(request.files, samples, request.data.rate)
    else:
        sample_files.write_plain(request.files, samples)
    for file in request.files:
        print(file, file=sys.stderr)


def _write_output(request: Request, sampled: Iterator[Tensor]) -> None:
    """Standard output: one sample as it comes, several one after another once all are there."""
    text = sys.stdout.isatty()
    if len(request.prompts) * request.count == 1:
        pieces = itertools.chain([request.prompts[0]], (bytes([int(token)]) for token in sampled))
        if text:
            write_text(pieces, sys.stdout)
        else:
            write_bytes(pieces, sys.stdout.buffer)
        return
    for number, sample in enumerate(_collected(request, sampled), start=1):
        if text:
            print(f"=== sample {number} ===")
            write_text([sample.tobytes()], sys.stdout)
        else:
            write_bytes([sample.tobytes()], sys.stdout.buffer)


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
