"""`longstride sample DIR`: generate bytes by an exported model, as text, pictures or sounds, or score a file.

Needs no deepspeed. Letters: P prompts, S samples (all of one prompt, then those of the next).
"""

from __future__ import annotations

import argparse
import codecs
import itertools
import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, Content, Modality
from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError
from longstride.launcher.config import TrainConfig, load_json_object
from longstride.launcher.files import check_new, naming, read_file, write_new
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models import ModelData, load_model, require_finite_logits, usable_device
from longstride.launcher.output import counting, file_names, metrics_file
from longstride.sparse_model import SparseTransformer, generate

_OF_SAMPLES = ("prompt", "prompt_file", "count", "bytes", "seconds", "slide", "top_k", "top_p", "output")
_OF_SCORES = ("decoded", "min_context", "batch")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code. All options are checked before the first byte is written."""
    arguments.device = str(usable_device(arguments.device))
    is_score = arguments.likelihood is not None
    prompts = [f"prompt_{modality.name}" for modality in _prompt_modalities()]
    keep_options = [modality.keep_option.attribute for modality in _prompt_modalities() if modality.keep_option]
    for name in (*_OF_SAMPLES, *prompts, *keep_options) if is_score else _OF_SCORES:
        if getattr(arguments, name) not in (None, False):
            option = f"--{name.replace('_', '-')}"
            if is_score:
                raise ConfigError(f"--likelihood: scores a file and does not sample; leave out {option}")
            raise ConfigError(f"{option}: only works together with --likelihood FILE; leave it out")
    model = load_model(arguments.model, arguments.device, trust_code=arguments.trust_code)
    model.config.require_next_token()
    config = load_json_object(arguments.model / file_names.CONFIG)
    data = ModelData.of(config, model.config, arguments.modality, arguments.rate)
    if data.palette is None and model.config.vocabulary > 256:
        rule = f"has {model.config.vocabulary} tokens and no palette, so they cannot be written as bytes"
        raise ConfigError(f"{arguments.model}: {rule}; export it again on the host of its data folder")
    if is_score:
        _print_likelihood(arguments, model, data)
        return 0
    request = settle(arguments, data, model.config.context)
    tokens = _generate(arguments, model, request)
    with require_finite_logits(arguments.model):
        if request.files:
            contents = data.modality.sample_files(_collect(request, tokens), data.file_properties, request.prompted)
            for file, content in zip(request.files, contents, strict=True):
                write_new(file, content)
                print(file, file=sys.stderr)
            return 0
        if len(request.prompts) * request.count == 1:  # byte by byte
            steps = itertools.chain([data.tokens(*request.prompts)], (step.cpu().numpy() for step in tokens))
            samples: list[Iterable[bytes]] = [(data.content(step).tobytes() for step in steps)]
        else:
            samples = [[sample.tobytes()] for sample in _collect(request, tokens)]
        for number, pieces in enumerate(samples, start=1):
            if sys.stdout.isatty():
                if len(samples) > 1:
                    print(f"=== sample {number} ===")
                write_text(pieces, sys.stdout)
            else:
                for piece in pieces:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
    return 0


def _prompt_modalities() -> list[Modality]:
    """Return the modalities with files that a model can continue."""
    return [modality for modality in MODALITIES.values() if modality.prompt_help is not None]


def _print_likelihood(arguments: argparse.Namespace, model: SparseTransformer, data: ModelData) -> None:
    """Print a file's score as a JSON line, and a line for people to standard error."""
    path = arguments.likelihood
    if data.palette is not None and not arguments.decoded:
        rule = "the model scores pixels of pictures, not bytes of files; add --decoded"
        raise ConfigError(f"--likelihood={path}: {rule}")
    if arguments.decoded and data.modality in _prompt_modalities():
        with _open_sample(path, "--likelihood", data) as sample:
            content = sample.read(0, sys.maxsize)
    else:
        content = read_file(path, "--likelihood")
    with require_finite_logits(arguments.model), naming(f"--likelihood={path}"):
        line = likelihood(
            model,
            content if data.palette is None else data.tokens(content),
            min_context=arguments.min_context or 0,
            batch_size=arguments.batch,
            unit=None if data.palette is None else data.unit,
        )
    print(json.dumps({"file": str(path), **line}))
    unit, bits = metrics_file.bits_of(line)
    print(f"{bits:.4f} {unit} on {path}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for samples, and where to write them."""

    data: ModelData
    prompts: list[bytes]  # P, of one length
    count: int  # samples for each prompt
    num_bytes: int  # of content to sample
    prompted: list[tuple[bytes, bytes]]  # for ``Modality.sample_files``
    files: list[Path]  # empty: standard output


def settle(arguments: argparse.Namespace, data: ModelData, context: int) -> Request:
    """Turn the options into a request, for a model of such data and context.

    Raises:
        ConfigError, DataError: they do not fit the model or each other, or a prompt cannot be read.
    """
    count = 1 if arguments.count is None else arguments.count
    if not 1 <= count <= TrainConfig.MOST_CONTEXTS:
        raise ConfigError(f"--count={count}: must be from 1 to {TrainConfig.MOST_CONTEXTS:,}; such as 4")
    chosen, length = None, None
    for modality in _prompt_modalities():
        keep = modality.keep_option
        value = None if keep is None else getattr(arguments, keep.attribute)
        if getattr(arguments, f"prompt_{modality.name}") is not None:
            chosen, length = modality, value
        elif keep is not None and value is not None:
            raise ConfigError(f"{keep.name}: only works together with --prompt-{modality.name} FILE; leave it out")
    if chosen is not None:
        option, paths = f"--prompt-{chosen.name}", getattr(arguments, f"prompt_{chosen.name}")
        paths = paths if isinstance(paths, list) else [paths]
        if data.modality is not chosen:
            rule = f"the model writes {data.modality.words}; take --prompt-file for bytes as they are"
            raise ConfigError(f"{option}={paths[0]}: {rule}")
        prompts, prompted = read_prompts(paths, option, data, length, context)
    elif arguments.prompt_file is not None:
        prompts, prompted = [read_file(arguments.prompt_file, "--prompt-file")], []
    else:
        prompts, prompted = [(arguments.prompt or "").encode(errors="surrogateescape")], []
    if len(prompts[0]) % data.token_bytes:
        rule = f"must be whole {data.unit}s of {data.token_bytes} bytes; take --prompt-image"
        raise ConfigError(f"--prompt: has {len(prompts[0])} bytes: {rule}")
    num_bytes = _num_bytes(arguments, data, len(prompts[0]), context)
    files = output_files(arguments.output, data, count, len(prompted))
    return Request(data, prompts, count, num_bytes, prompted, files)


def read_prompts(
    paths: Sequence[Path], option: str, data: ModelData, keep: int | float | None, context: int
) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Return the beginnings of files of the model's modality; for files of one size, also (content, beginning) pairs.

    Raises:
        ConfigError, DataError: a file cannot be read, or does not fit the model.
    """
    prompts, prompted = [], []
    for path in paths:
        with _open_sample(path, option, data) as content:
            prompts.append(data.modality.read_prompt(content, keep, data.properties, context))
            size = data.modality.document_bytes(data.properties)
            if size is not None:
                prompted.append((content.read(0, size), prompts[-1]))
    return prompts, prompted


@contextmanager
def _open_sample(path: Path, option: str, data: ModelData) -> Iterator[Content]:
    """Open a file's content in the model's format; errors name the option."""
    properties = data.file_properties
    try:
        with open_plain(path) as file:
            yield data.modality.open_sample(path, file, properties)
    except DataError as error:
        raise DataError(f"{option}={error}" if str(error).startswith(str(path)) else str(error)) from None
    except OSError as error:
        raise ConfigError(f"{option}={path}: {error.strerror}") from None


def _num_bytes(arguments: argparse.Namespace, data: ModelData, prompt_bytes: int, context: int) -> int:
    """Return how many bytes to sample after a prompt of ``prompt_bytes`` bytes; ConfigError if they do not fit."""
    modality, size = data.modality, data.modality.document_bytes(data.properties)
    if size is not None:
        for option in ("bytes", "seconds", "slide"):
            if getattr(arguments, option) not in (None, False):
                rule = f"{modality.words} have exactly {size} bytes; leave it out, or take --modality text"
                raise ConfigError(f"--{option}: {rule}")
        if prompt_bytes >= size:
            raise ConfigError(f"--prompt-file: has {prompt_bytes} bytes, but {modality.words} have {size}; give fewer")
        return size - prompt_bytes
    if arguments.seconds is not None:
        count = modality.bytes_in(arguments.seconds, "--seconds", data.file_properties)
    elif arguments.bytes is not None:
        count = arguments.bytes
    else:
        count = max(1, min(modality.sample_bytes or context, context - prompt_bytes))
    if count < 1:
        raise ConfigError(f"--bytes={count}: must be at least 1")
    if prompt_bytes + count > context and not arguments.slide:
        fits = f"--bytes {context - prompt_bytes}"
        if arguments.seconds is not None:
            fits = f"--seconds {(context - prompt_bytes) / modality.bytes_in(1, '--seconds', data.file_properties):.9g}"
        fits = f"take at most {fits}, or " if prompt_bytes < context else ""
        rule = f"they must fit in the model's context of {context}; {fits}add --slide to continue beyond it"
        raise ConfigError(f"sample: prompt and sample are {prompt_bytes + count} tokens: {rule}")
    return count


def output_files(output: Path | None, data: ModelData, count: int, num_prompts: int) -> list[Path]:
    """Return the new files for samples: none for standard output, one for all samples, or one each.

    Raises:
        ConfigError, DataError: the suffix does not fit the modality, a file exists, or files cannot be created.
    """
    modality = data.modality
    if output is None:
        if modality.output_suffix is not None and sys.stdout.isatty():
            example = f"{'samples' if modality.one_output else 'sample'}{modality.output_suffix}"
            rule = f"the model writes {modality.words}, which need a file, such as --output {example}, or a pipe"
            raise ConfigError(f"--output: {rule}")
        return []
    modality.check_samples(count, num_prompts, data.file_properties)
    suffix = modality.output_suffix
    other_suffixes = {kind.output_suffix for kind in MODALITIES.values()} - {suffix, None}
    if output.suffix in other_suffixes if suffix is None else output.suffix != suffix:
        rule = f"must not be a {output.suffix} file" if suffix is None else f"must be a {suffix} file"
        raise ConfigError(f"--output={output}: {rule}, as the model writes {modality.words}")
    files = [output]
    if not modality.one_output and count > 1:
        files = [output.with_name(f"{output.stem}-{number}{output.suffix}") for number in range(1, count + 1)]
    for file in files:
        check_new(file)
    return files


def _generate(arguments: argparse.Namespace, model: SparseTransformer, request: Request) -> Iterator[Tensor]:
    """Yield the tokens of all samples, (S,) each; ConfigError if a setting is out of range."""
    if not 0 <= arguments.seed < 2**63:
        raise ConfigError(f"--seed={arguments.seed}: must be from 0 to 2**63 - 1")
    rows = [request.data.tokens(prompt).tolist() for prompt in request.prompts for _ in range(request.count)]
    try:
        return generate(
            model,
            torch.tensor(rows, dtype=torch.int64, device=arguments.device),
            request.num_bytes // request.data.token_bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=torch.Generator(arguments.device).manual_seed(arguments.seed),
            slide=arguments.slide,
        )
    except ValueError as error:
        raise ConfigError(f"sample: {error}") from None


def _collect(request: Request, generated: Iterator[Tensor]) -> np.ndarray:
    """Return all samples, each after its prompt, (S, bytes) uint8, and show the progress."""
    data = request.data
    prompts = [data.content(data.tokens(prompt)) for prompt in request.prompts for _ in range(request.count)]
    columns, counter = [], counting.WorkCounter("sampling", request.num_bytes, "bytes")
    for number, tokens in enumerate(generated, start=1):
        columns.append(tokens.cpu().numpy())
        counter.at(number * data.token_bytes)
    counter.close()
    return np.concatenate([np.stack(prompts), data.content(np.stack(columns, axis=1))], axis=1)


def write_text(pieces: Iterable[bytes], stream: TextIO) -> None:
    """Write text as it comes, for a terminal: complete characters, and the replacement character for invalid UTF-8.

    Control characters except line ends and tabs are omitted, because they can control a terminal.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = stream.encoding or "utf-8"
    for piece in itertools.chain(pieces, [b""]):
        text = decoder.decode(piece, final=not piece)
        shown = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
        stream.write(shown.encode(encoding, "replace").decode(encoding))
        stream.flush()
    stream.write("\n")
