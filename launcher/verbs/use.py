"""`longstride export`, `sample`, `lm-eval`, `compress`, `decompress` and `serve`: a trained model."""

from __future__ import annotations

import argparse
from functools import partial

from longstride.launcher.verbs.shared import (
    PRECISIONS,
    Verb,
    add_code_argument,
    add_device_argument,
    add_step_argument,
    add_trust_argument,
    add_weights_argument,
    path,
    register,
)

VERBS: list[Verb] = []
verb = partial(register, VERBS)

DEFAULT_SHARD_SIZE = "5GB"
_EXPORT = "folder that `longstride export` wrote"


@verb(
    "export",
    "a checkpoint as safetensors",
    "exports.export.run",
    "longstride export runs/mine --output model",
    "longstride export model --format onnx --output onnx",
)
def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=path, metavar="RUN", help="run folder; with --format or --refresh, an exported folder")
    add_step_argument(parser, "export")
    add_weights_argument(parser)
    add("--dtype", choices=PRECISIONS, default="fp32", help="round the weights to this type (default: fp32, exact)")
    size = f"cut weights above this size into several files (default: {DEFAULT_SHARD_SIZE})"
    add("--shard-size", default=DEFAULT_SHARD_SIZE, metavar="SIZE", help=size)
    check = "do not compare the loss on the checkpoint's probe, its context of random bytes, with the trainer's"
    add("--no-check", action="store_true", help=check)
    add_device_argument(parser, "compute that check", "cpu")
    add_trust_argument(parser)
    card = "license to name in the model card: an identifier of Hugging Face's hub such as apache-2.0, or other:NAME"
    add("--license", metavar="ID", help=card)
    add("--output", type=path, metavar="DIR", help="make the exported folder here; nothing is written over")
    program = "write the forward pass of an exported folder for other runtimes: a program of torch.export, or ONNX"
    add("--format", choices=("pt2", "onnx"), help=program)
    add("--refresh", action="store_true", help="only rewrite an old export's file for transformers")


@verb(
    "sample",
    "write, or score a file",
    "generation.sample.run",
    'longstride sample model --prompt "def " --bytes 400',
    "longstride sample model --likelihood my/texts/a.txt",
)
def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    from longstride.data_pipelines.modalities import MODALITIES  # which brings numpy

    add = parser.add_argument
    add("model", type=path, metavar="DIR", help=_EXPORT)
    prompted = [modality for modality in MODALITIES.values() if modality.prompt_help is not None]
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default=None, metavar="TEXT", help="text to continue (default: nothing)")
    prompt.add_argument("--prompt-file", type=path, metavar="FILE", help="file to continue, as its bytes stand")
    for modality in prompted:
        option, count = f"--prompt-{modality.name}", modality.prompt_files
        prompt.add_argument(option, type=path, nargs=count, metavar="FILE", help=modality.prompt_help)
    for modality in prompted:
        if (keep := modality.keep_option) is not None:
            add(keep.name, type=keep.type, metavar=keep.metavar, help=keep.help)
    add("--count", type=int, metavar="N", help="write N samples of each prompt, in one batch (default: 1)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--bytes", type=int, metavar="N", help="sample N bytes (default: 256 of text, else what fits)")
    length.add_argument("--seconds", type=float, metavar="S", help="sample S seconds of sound")
    add("--slide", action="store_true", help="continue beyond the model's context, with what fits of it")
    warm = "divide the logits by T: below 1 favours likely bytes, 0 takes the likeliest (default: 1)"
    add("--temperature", type=float, default=1.0, metavar="T", help=warm)
    add("--top-k", type=int, default=None, metavar="K", help="sample among the K likeliest bytes (default: all)")
    nucleus = "sample among the fewest bytes that together have probability P (default: all)"
    add("--top-p", type=float, default=None, metavar="P", help=nucleus)
    seed = "draw by this seed: the same one gives the same samples (default: 0)"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    add("--modality", choices=sorted(MODALITIES), help="write the bytes as this modality (default: the model's)")
    add("--rate", type=int, metavar="HZ", help="give sounds this rate, in samples a second (default: the model's)")
    into = "write samples into this file: .png for pictures, .wav for sounds, any for text (default: text is printed)"
    add("--output", type=path, metavar="FILE", help=into)
    add_device_argument(parser, "compute")
    add_code_argument(parser)
    score = parser.add_argument_group("a file's score, instead of samples")
    score.add_argument("--likelihood", type=path, metavar="FILE", help="print the bits per byte of a file's bytes")
    decoded = "score the file's pixels or its sound, as the model writes them"
    score.add_argument("--decoded", action="store_true", help=decoded)
    least = "let every byte see at least M earlier ones (default: 0)"
    score.add_argument("--min-context", type=int, metavar="M", help=least)
    score.add_argument("--batch", type=int, metavar="B", help="compute B contexts at once (default: a fast number)")


@verb(
    "lm-eval",
    "run lm_eval with a model",
    "generation.likelihood.run_lm_eval",
    "longstride lm-eval --model longstride --model_args path=model --tasks wikitext",
    "longstride lm-eval --model longstride --model_args path=model,dtype=bf16 --tasks wikitext --limit 9",
    passes_words=True,
)
def add_lm_eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "All words are lm_eval's, such as `--model longstride --model_args path=model --tasks wikitext`; "
        "`longstride lm-eval run --help` lists them. model_args: path, batch_size, device, dtype, min_context and "
        "trust_code."
    )


@verb(
    "compress",
    "shrink a file without loss",
    "compression.compress.run_compress",
    "longstride compress a.txt --model model --output a.lsz",
    "longstride compress a.txt --model model --output a.lsz --device cuda",
)
def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path, metavar="FILE", help="file of any kind to compress")
    _add_coding_arguments(parser, "FILE.lsz")


@verb(
    "decompress",
    "get it back",
    "compression.compress.run_decompress",
    "longstride decompress a.lsz --model model --output b.txt",
    "longstride decompress a.lsz --model model --output b.txt --elsewhere",
)
def add_decompress_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path, metavar="FILE.lsz", help="file that `longstride compress` wrote")
    _add_coding_arguments(parser, "FILE")
    elsewhere = "try it even if the model computes different bits here than where the file was compressed"
    parser.add_argument("--elsewhere", action="store_true", help=elsewhere)


def _add_coding_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--model", type=path, required=True, metavar="DIR", help=f"{_EXPORT}, the same both ways")
    text = "write the result here; nothing is written over"
    parser.add_argument("--output", type=path, required=True, metavar=output, help=text)
    add_device_argument(parser, "compute both ways", "cpu")
    add_code_argument(parser)


@verb(
    "serve",
    "a page and an HTTP server",
    "serving.serve.run",
    "longstride serve model",
    "longstride serve model --host 0.0.0.0 --allow-host gpu7.example --port 8080",
)
def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=path, metavar="DIR", help=_EXPORT)
    host = "listen at this address; 0.0.0.0 for other machines too (default: 127.0.0.1, this machine alone)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    names = "also answer requests for this host name; repeatable"
    add("--allow-host", action="append", default=[], metavar="NAME", help=names)
    add("--port", type=int, default=8000, metavar="PORT", help="listen at this port, 0 at any free one (default: 8000)")
    add_device_argument(parser, "compute")
    add_code_argument(parser)
    add("--name", metavar="NAME", help="call the model so for clients of /v1 (default: as the folder)")
    most = "let one request sample at most N bytes, of each choice (default: the model's context)"
    add("--max-bytes", type=int, metavar="N", help=most)
    add("--contexts", type=int, default=8, metavar="N", help="sample up to N contexts side by side (default: 8)")
    shared = "compute contexts of one shape together: faster, but a seed may occasionally give other bytes"
    add("--shared", action="store_true", help=shared)
    add("--queue", type=int, default=8, metavar="N", help="let N further requests wait (default: 8)")
    seconds = "give a request S seconds from its arrival to its last byte (default: 300)"
    add("--timeout", type=float, default=300.0, metavar="S", help=seconds)
