"""The verbs of `longstride`: what each is for, where its options and its work are, and examples of it."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb, and the modules whose functions declare its options and run it.

    Modules are strings, so that `longstride --help` imports none. Each is a room of ``longstride.launcher``, or a
    module of one. Options are declared without torch, which takes seconds: ``run`` is imported for words that have been
    understood.
    """

    words: str
    summary: str
    module: str  # has ``run``
    arguments: str = "add_arguments"
    run: str = "run"
    passes_words: bool = False  # ``run`` takes all but --help as it is: the options are another program's
    options: str = ""  # the module that has ``arguments``, where that is not ``module``
    group: str = ""  # one of GROUPS
    examples: tuple[str, ...] = ()  # of its help, and the first of `longstride --help` too


GROUPS = {
    "data": "data: from files to shards",
    "train": "train: a run, and what it will cost",
    "look": "look: what a run has learned",
    "use": "use: a trained model",
    "configure": "configure",
}
VERBS = (
    Verb(
        "data build",
        "make shards from files",
        "data.folders",
        "add_build_arguments",
        "run_build",
        options="options.data",
        group="data",
        examples=(
            "longstride data build my/texts --output data/mine",
            "longstride data build my/photos --modality image --image-size 32x32 --output data/photos",
        ),
    ),
    Verb(
        "data index",
        "train on tars as they are",
        "data.folders",
        "add_index_arguments",
        "run_index",
        options="options.data",
        group="data",
        examples=(
            "longstride data index my/tars --output data/tars",
            "longstride data index my/tars --output data/tars --split validation=val-*.tar",
        ),
    ),
    Verb(
        "data verify",
        "check a data folder",
        "data.folders",
        "add_verify_arguments",
        "run_verify",
        options="options.data",
        group="data",
        examples=("longstride data verify data/mine", "longstride data verify s3://bucket/mine"),
    ),
    Verb(
        "data show",
        "a few samples of a data folder",
        "drawing",
        "add_show_arguments",
        "run_data_show",
        options="options.data",
        group="data",
        examples=(
            "longstride data show data/mine",
            "longstride data show data/photos --split validation --count 25 --output photos.png",
        ),
    ),
    Verb(
        "new",
        "a configuration that fits",
        "planning.new",
        "add_new_arguments",
        options="options.configuring",
        group="train",
        examples=("longstride new mine", "longstride new photos --data data/photos --size small --processes 8"),
    ),
    Verb(
        "plan",
        "what a run will cost",
        "planning.plan",
        "add_plan_arguments",
        options="options.training",
        group="train",
        examples=(
            "longstride plan mine.json --processes 2",
            "longstride plan enwik8_fixed --processes 1 8 train.micro_batch=1",
        ),
    ),
    Verb(
        "doctor",
        "what is missing here for a run",
        "doctor",
        "add_doctor_arguments",
        options="options.training",
        group="train",
        examples=("longstride doctor mine.json", "longstride doctor mine.json --hostfile hosts --json"),
    ),
    Verb(
        "train",
        "train, or go on training",
        "cluster.start",
        "add_train_arguments",
        options="options.training",
        group="train",
        examples=(
            "longstride train --config mine.json --processes 2",
            "longstride train --config mine.json --resume auto --max-restarts 5 train.steps=20000",
        ),
    ),
    Verb(
        "slurm",
        "a batch script for SLURM",
        "cluster.slurm",
        "add_slurm_arguments",
        options="options.training",
        group="train",
        examples=(
            "longstride slurm --config mine.json --nodes 2 --processes-per-node 8 --time 1-0",
            "longstride slurm --config mine.json --nodes 2 --processes-per-node 8 --time 12:00:00 --gpus --submit",
        ),
    ),
    Verb(
        "evaluate",
        "bits per byte over a split",
        "evaluation.evaluate",
        "add_evaluate_arguments",
        options="options.looking",
        group="look",
        examples=(
            "longstride evaluate runs/mine",
            "longstride evaluate runs/mine --step best --min-context 128 --positions by-position.png",
        ),
    ),
    Verb(
        "show pattern",
        "draw which positions read which",
        "drawing",
        "add_pattern_arguments",
        "run_pattern",
        options="options.looking",
        group="look",
        examples=(
            "longstride show pattern mine.json --output pattern.png",
            "longstride show pattern enwik8_fixed --query 5000 --html pattern.html",
        ),
    ),
    Verb(
        "show attention",
        "draw what a model reads",
        "drawing",
        "add_attention_arguments",
        "run_attention",
        options="options.looking",
        group="look",
        examples=(
            "longstride show attention runs/mine --output a.png",
            "longstride show attention model --text my.txt --query 100 200 --output attention.png",
        ),
    ),
    Verb(
        "show loss",
        "draw a run's loss over its steps",
        "drawing",
        "add_loss_arguments",
        "run_loss",
        options="options.looking",
        group="look",
        examples=(
            "longstride show loss runs/mine --output loss.png",
            "longstride show loss runs/mine --output ~/pictures/mine.png",
        ),
    ),
    Verb(
        "report",
        "a page of curves and samples",
        "reporting",
        "add_report_arguments",
        options="options.looking",
        group="look",
        examples=(
            "longstride report runs/mine --output report.html",
            "longstride report runs/mine runs/other --by-position --output both.html",
        ),
    ),
    Verb(
        "export",
        "a checkpoint as safetensors",
        "exports.export",
        "add_export_arguments",
        options="options.using",
        group="use",
        examples=(
            "longstride export runs/mine --output model",
            "longstride export model --format onnx --output onnx",
        ),
    ),
    Verb(
        "sample",
        "write, or score a file",
        "generation.sample",
        "add_sample_arguments",
        options="options.using",
        group="use",
        examples=(
            'longstride sample model --prompt "def " --bytes 400',
            "longstride sample model --likelihood my/texts/a.txt",
        ),
    ),
    Verb(
        "lm-eval",
        "run lm_eval with a model",
        "generation.lm_eval_command",
        "add_lm_eval_arguments",
        options="options.using",
        passes_words=True,
        group="use",
        examples=(
            "longstride lm-eval --model longstride --model_args path=model --tasks wikitext",
            "longstride lm-eval --model longstride --model_args path=model,dtype=bf16 --tasks wikitext --limit 9",
        ),
    ),
    Verb(
        "compress",
        "shrink a file without loss",
        "compression.compress",
        "add_compress_arguments",
        "run_compress",
        options="options.using",
        group="use",
        examples=(
            "longstride compress a.txt --model model --output a.lsz",
            "longstride compress a.txt --model model --output a.lsz --device cuda",
        ),
    ),
    Verb(
        "decompress",
        "get it back",
        "compression.compress",
        "add_decompress_arguments",
        "run_decompress",
        options="options.using",
        group="use",
        examples=(
            "longstride decompress a.lsz --model model --output b.txt",
            "longstride decompress a.lsz --model model --output b.txt --elsewhere",
        ),
    ),
    Verb(
        "serve",
        "a page and an HTTP server",
        "serving.serve",
        "add_serve_arguments",
        options="options.using",
        group="use",
        examples=(
            "longstride serve model",
            "longstride serve model --host 0.0.0.0 --allow-host gpu7.example --port 8080",
        ),
    ),
    Verb(
        "config schema",
        "the JSON schema of a run",
        "config.schema",
        "add_schema_arguments",
        options="options.configuring",
        group="configure",
        examples=("longstride config schema", "longstride config schema --output longstride.schema.json"),
    ),
    Verb(
        "completion",
        "TAB completes verbs and options",
        "completion",
        "add_completion_arguments",
        options="options.configuring",
        group="configure",
        examples=(
            "longstride completion bash",
            "longstride completion bash > ~/.local/share/bash-completion/completions/longstride",
        ),
    ),
)


def declare_options(verb: Verb, parser: argparse.ArgumentParser) -> None:
    """Adds a verb's options to a parser."""
    getattr(importlib.import_module(f"longstride.launcher.{verb.options or verb.module}"), verb.arguments)(parser)
