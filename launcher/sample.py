"""`longstride sample DIR`: bytes from an exported model, written as they come. Needs no deepspeed."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kernels.errors import ConfigError
from launcher.folders import CONFIG, WEIGHTS
from sparse_model import ModelConfig, SparseTransformer
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
    """Runs the verb; returns its exit code."""
    try:
        torch.empty(0, device=arguments.device)
    except RuntimeError as error:
        raise ConfigError(f"--device={arguments.device}: cannot be used: {str(error).splitlines()[0]}") from None
    model = load_model(arguments.model, arguments.device)
    prompt = read_prompt(arguments.prompt, arguments.prompt_file)
    tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=arguments.device)
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed)
    fitting = max(1, min(DEFAULT_BYTES, model.config.context - len(prompt)))
    try:
        sampled = generate(
            model,
            tokens,
            fitting if arguments.bytes is None else arguments.bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            generator=generator,
        )
    except ValueError as error:
        raise ConfigError(f"sample: {error}") from None
    # A character of several bytes is written once it is whole; what is no UTF-8 shows as the replacement character.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sys.stdout.write(decoder.decode(prompt))
    for token in sampled:
        sys.stdout.write(decoder.decode(bytes([int(token)])))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return 0


def load_model(folder: Path, device: str = "cpu") -> SparseTransformer:
    """An exported model in evaluation mode.

    Raises:
        ConfigError: the folder holds no export, or weights and configuration do not belong together.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: has no {name}; name a folder written by `longstride export RUN --output DIR`")
    try:
        config = json.loads((folder / CONFIG).read_text())["model"]
        weights = load_file(folder / WEIGHTS, device=device)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be read as an export: {error}") from None
    with torch.device(device):
        model = SparseTransformer(ModelConfig.model_validate(config))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"{folder}: {WEIGHTS} is not the model of {CONFIG}: {' '.join(str(error).split())}") from None
    return model.eval()


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
