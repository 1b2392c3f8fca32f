"""`longstride VERB …`: help, options and mistakes. A verb's module is imported once its words are parsed."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import json
import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from longstride.launcher.output import (
    AgreedError,
    exit_codes,
    nonblocking_output,
    report,
    say,
    settle_libraries,
    version_of,
)
from longstride.launcher.stops import stopped_at_once
from longstride.launcher.verbs import CONFIGURE, Verb, data, look, misspelt_keys, train, use

GROUPS = {
    "data: from files to shards": data.VERBS,
    "train: a run, and what it will cost": train.VERBS,
    "look: what a run has learned": look.VERBS,
    "use: a trained model": use.VERBS,
    "configure": CONFIGURE,
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
_FILES = ("DIR", "FILE", "PATH", "RUN", "CONFIG", "PNG", ".json", ".png")  # metavars with one of these name files
_EXAMPLE_COLUMNS = 45  # in `longstride --help`, where the summary follows


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with examples, and which reports a wrong command line in one line."""

    def __init__(self, *, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.examples = examples

    def format_help(self) -> str:
        """Format the summary, the examples and the options of the verb."""
        about, self.description = self.description, None
        try:
            first = [f"{about}\n"] if about else []
            return "\n".join([*first, *(f"  {example}" for example in self.examples), "", super().format_help()])
        finally:
            self.description = about

    def error(self, message: str) -> NoReturn:
        """Report a mistake and exit with code 2."""
        sys.exit(report(AgreedError(f"{' '.join(message.split())}; `{self.prog} --help` lists the options")))


def parser_of(verb: Verb) -> Parser:
    """Return the parser of a verb's options."""
    summary = f"{verb.summary[0].upper()}{verb.summary[1:]}."
    parser = Parser(prog=f"longstride {verb.words}", description=summary, examples=verb.examples)
    verb.add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    A mistake of the user (2) and Ctrl-C (130) print no traceback. Neither does a closed standard output, as by
    `| head`: a verb that it interrupts exits like SIGPIPE (141), a finished one with its own code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in words if not word.startswith("--local_rank=")]  # the deepspeed launcher puts it first
    if isinstance(sys.stdout, io.TextIOWrapper):  # any encoding will do, even ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    code = exit_codes.UNREAD
    try:
        try:
            code = _run(words)
        finally:
            print(end="", flush=True)  # a failure while Python exits could not be handled
    except BrokenPipeError as error:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not poll.poll(0):  # another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what Python still buffers
        if isinstance(error.__context__, SystemExit):
            raise error.__context__ from None
    except OSError as error:
        # A full disk: the verb may have reported it already, but its output is still in the buffer.
        return code if code == exit_codes.WRONG_INPUT else report(error)
    return code


def _run(words: list[str]) -> int:
    """Run the verb that the words begin with, or print help or the version."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words == ["--version"]:
        dependencies = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "triton", "deepspeed"))
        print(f"longstride {version_of('longstride')} ({dependencies})")  # none of them is imported
        return exit_codes.DONE
    verb = next((verb for verb in VERBS if words[: len(verb.words.split())] == verb.words.split()), None)
    if verb is None:
        return _help(words)
    try:
        Path.cwd()
    except FileNotFoundError:  # importing torch there would abort the process
        return report(AgreedError("the working directory has been removed; change to one that exists"))
    try:
        with ExitStack() as contexts:
            if verb.words == "train":
                contexts.enter_context(nonblocking_output())
                # The imports take seconds. A signal meanwhile is a stop of the run, with its exit code.
                contexts.enter_context(stopped_at_once())
            settle_libraries(os.environ)
            try:
                parser, option_words = parser_of(verb), words[len(verb.words.split()) :]
            except ValueError as error:  # a modality of another package cannot be imported
                return report(error)
            options: Any = option_words
            if not verb.passes_words or option_words in (["--help"], ["-h"]):
                options = parser.parse_intermixed_args(option_words)
                # `doctor` needs no configuration.
                config = options.config if "overrides" in options else None
                if config is not None and (lines := misspelt_keys(config, options.overrides)):
                    return report(AgreedError("\n".join(lines)))
            module, _, function = verb.run.rpartition(".")
            run = getattr(importlib.import_module(f"longstride.launcher.{module}"), function)
            try:
                return run(options)
            except (OSError, ValueError) as error:
                return report(error)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            say("; ".join(["stopped", *map(str, stop.args)]))
        return exit_codes.STOPPED


def _help(words: list[str]) -> int:
    """List the verbs that begin with the words, if these ask for help; else report that there is no such verb."""
    first = [word for word in words if word not in ("-h", "--help")]
    verbs = [verb for verb in VERBS if verb.words.split()[: len(first)] == first]
    prefix = " ".join(["longstride", *first])
    if verbs and (len(first) < len(words) or not words):
        lines = [f"usage: {prefix} VERB …"]
        for title, group in GROUPS.items():
            members = [verb for verb in group if verb in verbs]
            lines += ["", f"{title}:"] if members else []
            for verb in members:
                example = verb.examples[0].removeprefix("longstride ")
                if len(example) > _EXAMPLE_COLUMNS:
                    lines.append(f"  {example}")
                    example = ""
                lines.append(f"  {example:{_EXAMPLE_COLUMNS}} {verb.summary}")
        print("\n".join([*lines, "", f"{prefix} VERB --help lists the options of a verb, with examples."]))
        return exit_codes.DONE
    names = [verb.words for verb in VERBS]
    close = [name for text in (" ".join(words[:2]), words[0]) for name in difflib.get_close_matches(text, names, n=1)]
    suggestions = [verb.words for verb in verbs] or close[:1]
    hint = f"; did you mean {', '.join(suggestions)}" if suggestions else ""
    return report(AgreedError(f"no verb {' '.join(first[:2]) or words[0]}{hint}; `longstride --help` lists all"))


def print_schema(arguments: argparse.Namespace) -> int:
    """Run `longstride config schema`: print or write the JSON schema of a run's configuration."""
    from longstride.launcher.config import RunConfig
    from longstride.launcher.files import check_new, write_new

    text = json.dumps(RunConfig.model_json_schema(), indent=2)
    if arguments.output is None:
        print(text)
        return exit_codes.DONE
    check_new(arguments.output)
    write_new(arguments.output, f"{text}\n".encode())
    say(f'wrote {arguments.output}; configurations in its folder use it as "$schema": "./{arguments.output.name}"')
    return exit_codes.DONE


def complete(arguments: argparse.Namespace) -> int:
    """Run `longstride completion`: print a script with which a shell completes verbs, options and files.

    The script comes from the parsers of all verbs, so that TAB starts no Python."""
    try:
        import shtab
    except ImportError as error:
        raise AgreedError(f'completion: needs shtab ({error}); pip install "longstride[completion]"') from None
    root = argparse.ArgumentParser(prog="longstride")
    subparsers: dict[tuple[str, ...], Any] = {(): root.add_subparsers()}
    for verb in VERBS:
        *group, last = verb.words.split()
        if tuple(group) not in subparsers:  # shtab only completes parsers with a help
            subparsers[tuple(group)] = subparsers[()].add_parser(*group, help=f"{group[0]} VERB").add_subparsers()
        parser = subparsers[tuple(group)].add_parser(last, help=verb.summary)
        verb.add_arguments(parser)
        for action in parser._actions:
            if action.choices is None and any(name in str(action.metavar) for name in _FILES):
                vars(action)["complete"] = shtab.FILE
    print(shtab.complete(root, arguments.shell))
    return exit_codes.DONE


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # one of several ranks, started by a launcher
        from longstride.launcher.ranks import leave

        leave(code)
    sys.exit(code)
