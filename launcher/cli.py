"""`longstride VERB …`: one line a verb; a verb's module is imported when it is called for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple, NoReturn

from longstride.launcher.output import exit_codes, is_wrong_input, report
from longstride.launcher.stops import stopped_at_once


class Verb(NamedTuple):
    """A verb, and the module that holds it."""

    words: str
    summary: str
    module: str
    arguments: str = "add_arguments"
    run: str = "run"


VERBS = (
    Verb(
        "data build", "make shards from files", "longstride.launcher.data.folders", "add_build_arguments", "run_build"
    ),
    Verb(
        "data verify", "check a data folder", "longstride.launcher.data.folders", "add_verify_arguments", "run_verify"
    ),
    Verb(
        "data show",
        "a few samples of a data folder",
        "longstride.launcher.drawing",
        "add_data_show_arguments",
        "run_data_show",
    ),
    Verb("train", "train, or go on training", "longstride.launcher.cluster.start"),
    Verb("slurm", "write a batch script that trains under SLURM", "longstride.launcher.cluster.slurm"),
    Verb("plan", "what a run will cost", "longstride.launcher.planning"),
    Verb("evaluate", "bits per byte over a split", "longstride.launcher.evaluation.evaluate"),
    Verb("export", "a checkpoint as safetensors", "longstride.launcher.exports.export"),
    Verb("sample", "write with an exported model, or score a file", "longstride.launcher.generation"),
    Verb(
        "compress",
        "shrink a file without loss",
        "longstride.launcher.compression",
        "add_compress_arguments",
        "run_compress",
    ),
    Verb(
        "decompress",
        "get it back",
        "longstride.launcher.compression",
        "add_decompress_arguments",
        "run_decompress",
    ),
    Verb("serve", "an exported model behind HTTP, with a page to try it", "longstride.launcher.serving"),
    Verb("show", "draw a pattern, a run's attention or its loss", "longstride.launcher.drawing"),
    Verb("config schema", "the JSON schema of a run", "longstride.launcher.config.schema"),
)


class Parser(argparse.ArgumentParser):
    """Tells what is wrong with a command line as every other mistake is told: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        sys.exit(report(ValueError(f"{' '.join(message.split())}; `{self.prog} --help` tells the options")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code: no traceback, and 2 for what a person got wrong, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in words if not word.startswith("--local_rank=")]  # the deepspeed launcher puts it first
    verb = next((verb for verb in VERBS if words[: len(verb.words.split())] == verb.words.split()), None)
    if verb is None:
        return _help(words)
    try:
        # A stop of a run that has not begun is one of the run all the same; importing what it needs takes seconds.
        with stopped_at_once() if verb.words == "train" else nullcontext():
            return _run(verb, words[len(verb.words.split()) :])
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            print("; ".join(["longstride: stopped", *map(str, stop.args)]), file=sys.stderr)
        return exit_codes.STOPPED


def _run(verb: Verb, words: list[str]) -> int:
    module = importlib.import_module(verb.module)
    parser = Parser(prog=f"longstride {verb.words}", description=f"{verb.summary[0].upper()}{verb.summary[1:]}.")
    getattr(module, verb.arguments)(parser)
    options = parser.parse_intermixed_args(words)
    try:
        return getattr(module, verb.run)(options)
    except (OSError, ValueError) as error:
        if not is_wrong_input(error):
            raise
        return report(error)


def _help(words: list[str]) -> int:
    """All verbs, to where they were asked for: standard output for --help, standard error for a mistake."""
    asked = not words or words[0] in ("-h", "--help", "help")
    stream = sys.stdout if asked else sys.stderr
    if not asked:
        print(f"longstride: error: no verb {' '.join(words[:2])}", file=stream)
    print("usage: longstride VERB …\n", file=stream)
    for verb in VERBS:
        print(f"  {verb.words:<15}{verb.summary}", file=stream)
    print("\nlongstride VERB --help tells the options of one.", file=stream)
    return 0 if asked else exit_codes.WRONG_INPUT


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # one of several, which a launcher started
        from longstride.launcher.train import leave

        leave(code)
    sys.exit(code)
