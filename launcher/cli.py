"""`longstride VERB …`: one line a verb; the verb's module is imported when the verb is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

from longstride.launcher.output import AgreedError, exit_codes, lasting_output, mute_accelerator_warning, report, say
from longstride.launcher.stops import stopped_at_once


class Verb(NamedTuple):
    """A verb, and the module whose functions declare its options and run it.

    The module is a string, so that `longstride --help` imports no verb. It is a room of ``longstride.launcher``, or a
    module of one where the room's face must stay light.
    """

    words: str
    summary: str
    module: str
    arguments: str = "add_arguments"
    run: str = "run"
    passes_words: bool = False  # ``run`` takes all but --help as it is: the options are another program's


VERBS = (
    Verb("data build", "make shards from files", "data.folders", "add_build_arguments", "run_build"),
    Verb("data index", "train on tars as they are", "data.folders", "add_index_arguments", "run_index"),
    Verb("data verify", "check a data folder", "data.folders", "add_verify_arguments", "run_verify"),
    Verb("data show", "a few samples of a data folder", "drawing", "add_data_show_arguments", "run_data_show"),
    Verb("new", "write a configuration that fits the data and this machine", "planning.new"),
    Verb("train", "train, or go on training", "cluster.start"),
    Verb("slurm", "write a batch script that trains under SLURM", "cluster.slurm"),
    Verb("plan", "what a run will cost", "planning"),
    Verb("evaluate", "bits per byte over a split", "evaluation.evaluate"),
    Verb("export", "a checkpoint as safetensors", "exports.export"),
    Verb("sample", "write with an exported model, or score a file", "generation"),
    Verb(
        "lm-eval",
        "run lm_eval, with exports as `--model longstride`",
        "generation.lm_eval_command",
        passes_words=True,
    ),
    Verb("compress", "shrink a file without loss", "compression", "add_compress_arguments", "run_compress"),
    Verb("decompress", "get it back", "compression", "add_decompress_arguments", "run_decompress"),
    Verb("serve", "an exported model behind HTTP, with a page to try it", "serving"),
    Verb("show", "draw a pattern, a run's attention or its loss", "drawing"),
    Verb("config schema", "the JSON schema of a run", "config.run_config"),
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as any other mistake: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Reports the mistake and exits by code 2."""
        sys.exit(report(AgreedError(f"{' '.join(message.split())}; `{self.prog} --help` tells the options")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code.

    A mistake of the user (2) and Ctrl-C (130) print no traceback, nor does a reader of standard output that goes away,
    as `| head` does: a verb that it cuts off ends as by SIGPIPE (141), one that is done has its own code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in words if not word.startswith("--local_rank=")]  # the deepspeed launcher puts it first
    code = exit_codes.UNREAD
    try:
        try:
            code = _run(words)
        finally:
            print(end="", flush=True)  # and not as Python ends, when a failure could only be told
    except BrokenPipeError as error:
        standing = select.poll()
        standing.register(sys.stdout, 0)
        if not standing.poll(0):  # it was another pipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still buffers
        if isinstance(error.__context__, SystemExit):
            raise error.__context__ from None
    except OSError as error:  # a full disk
        return report(error)
    return code


def _run(words: list[str]) -> int:
    """Runs the verb that the words begin with, or answers what is asked of all of them."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words == ["--version"]:
        print(_versions())
        return exit_codes.DONE
    verb = next((verb for verb in VERBS if words[: len(verb.words.split())] == verb.words.split()), None)
    if verb is None:
        return _help(words)
    try:
        with ExitStack() as around:
            if verb.words == "train":
                around.enter_context(lasting_output())
                # The imports take seconds. A signal meanwhile is a stop of the run, with the exit code of one.
                around.enter_context(stopped_at_once())
            mute_accelerator_warning()
            module = importlib.import_module(f"longstride.launcher.{verb.module}")
            rest = words[len(verb.words.split()) :]
            summary = f"{verb.summary[0].upper()}{verb.summary[1:]}."
            parser = Parser(prog=f"longstride {verb.words}", description=summary)
            getattr(module, verb.arguments)(parser)
            as_they_are = verb.passes_words and rest not in (["--help"], ["-h"])
            options: Any = rest if as_they_are else parser.parse_intermixed_args(rest)
            try:
                return getattr(module, verb.run)(options)
            except (OSError, ValueError) as error:
                return report(error)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            say("; ".join(["stopped", *map(str, stop.args)]))
        return exit_codes.STOPPED


def _versions() -> str:
    """This package and those that decide what a run computes, with their versions, in one line; none is imported."""

    def version(package: str) -> str:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} not installed"

    return f"{version('longstride')} ({', '.join(map(version, ('torch', 'triton', 'deepspeed')))})"


def _help(words: list[str]) -> int:
    """Lists the verbs that begin as the words do, where that is asked; else says that there is no such verb."""
    group = [word for word in words if word not in ("-h", "--help")]
    verbs = [verb for verb in VERBS if verb.words.split()[: len(group)] == group]
    prefix = " ".join(["longstride", *group])
    if verbs and (len(group) < len(words) or not words):
        lines = [f"usage: {prefix} VERB …", "", *(f"  {verb.words:<15}{verb.summary}" for verb in verbs)]
        lines += ["", f"{prefix} VERB --help tells the options of one."]
        print("\n".join(lines))
        return exit_codes.DONE
    names = [verb.words for verb in VERBS]
    close = [each for typed in (" ".join(words[:2]), words[0]) for each in difflib.get_close_matches(typed, names, n=1)]
    meant = [verb.words for verb in verbs] or close[:1]
    hint = f"; there is {', '.join(meant)}" if meant else ""
    return report(AgreedError(f"no verb {' '.join(group[:2]) or words[0]}{hint}; `longstride --help` lists all"))


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # one of several ranks, started by a launcher
        from longstride.launcher.train import leave

        leave(code)
    sys.exit(code)
