"""`longstride VERB …`: help, options and mistakes; a verb's module is imported when its words are understood."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
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
    lasting_output,
    report,
    say,
    settle_libraries,
    version_of,
)
from longstride.launcher.stops import stopped_at_once
from longstride.launcher.verbs import Verb, data, look, misspelt_keys, path, train, use


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstride config schema`."""
    what = "write it to this new file, for `$schema` of configurations (default: print it)"
    parser.add_argument("--output", type=path, default=None, metavar="FILE.json", help=what)


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longstride completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")


_CONFIGURE = (
    Verb(
        "config schema",
        "the JSON schema of a run",
        add_schema_arguments,
        "config.schema.run",
        examples=("longstride config schema", "longstride config schema --output longstride.schema.json"),
    ),
    Verb(
        "completion",
        "TAB completes verbs and options",
        add_completion_arguments,
        "cli.complete",
        examples=(
            "longstride completion bash",
            "longstride completion bash > ~/.local/share/bash-completion/completions/longstride",
        ),
    ),
)
GROUPS = {
    "data: from files to shards": data.VERBS,
    "train: a run, and what it will cost": train.VERBS,
    "look: what a run has learned": look.VERBS,
    "use: a trained model": use.VERBS,
    "configure": _CONFIGURE,
}
VERBS = [verb for verbs in GROUPS.values() for verb in verbs]
_FILES = ("DIR", "FILE", "PATH", "RUN", "CONFIG", "PNG", ".json", ".png")  # in metavars whose words name files
_EXAMPLE_COLUMNS = 45  # of `longstride --help`; a summary stands beside what is shorter


class Parser(argparse.ArgumentParser):
    """Begins its help with examples, and reports a wrong command line as any other mistake: in one line."""

    def __init__(self, *, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self.examples = examples

    def format_help(self) -> str:
        """What the verb does, examples, and its options."""
        about, self.description = self.description, None
        try:
            first = [f"{about}\n"] if about else []
            return "\n".join([*first, *(f"  {example}" for example in self.examples), "", super().format_help()])
        finally:
            self.description = about

    def error(self, message: str) -> NoReturn:
        """Reports the mistake and exits by code 2."""
        sys.exit(report(AgreedError(f"{' '.join(message.split())}; `{self.prog} --help` tells the options")))


def parser_of(verb: Verb) -> Parser:
    """The parser of a verb's options."""
    summary = f"{verb.summary[0].upper()}{verb.summary[1:]}."
    parser = Parser(prog=f"longstride {verb.words}", description=summary, examples=verb.examples)
    verb.add_arguments(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code.

    A mistake of the user (2) and Ctrl-C (130) print no traceback, nor does a reader of standard output that goes away,
    as `| head` does: a verb that it cuts off ends as by SIGPIPE (141), one that is done has its own code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    words = [word for word in words if not word.startswith("--local_rank=")]  # the deepspeed launcher puts it first
    if isinstance(sys.stdout, io.TextIOWrapper):  # a stream of another encoding, such as ASCII, is no reason to fail
        sys.stdout.reconfigure(errors="backslashreplace")
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
    except OSError as error:
        # A full disk, which the verb may have told already: what it printed is still to be written.
        return code if code == exit_codes.WRONG_INPUT else report(error)
    return code


def _run(words: list[str]) -> int:
    """Runs the verb that the words begin with, or answers what is asked of all of them."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words == ["--version"]:
        of_others = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "triton", "deepspeed"))
        print(f"longstride {version_of('longstride')} ({of_others})")  # none of them is imported
        return exit_codes.DONE
    verb = next((verb for verb in VERBS if words[: len(verb.words.split())] == verb.words.split()), None)
    if verb is None:
        return _help(words)
    try:
        Path.cwd()
    except FileNotFoundError:  # torch ends a process that it imports there, with words about a library
        return report(AgreedError("the working directory has been removed; change to one that is there"))
    try:
        with ExitStack() as around:
            if verb.words == "train":
                around.enter_context(lasting_output())
                # The imports take seconds. A signal meanwhile is a stop of the run, with the exit code of one.
                around.enter_context(stopped_at_once())
            settle_libraries(os.environ)
            try:
                parser, rest = parser_of(verb), words[len(verb.words.split()) :]
            except ValueError as error:  # a modality of another package, which cannot be imported
                return report(error)
            as_they_are = verb.passes_words and rest not in (["--help"], ["-h"])
            options: Any = rest if as_they_are else parser.parse_intermixed_args(rest)
            if (
                not as_they_are
                and "overrides" in options
                and options.config is not None  # `doctor` may have none
                and (lines := misspelt_keys(options.config, options.overrides))
            ):
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


def _listed(verb: Verb) -> list[str]:
    """An example of a verb and its summary: one line of `longstride --help`, or two where the example is long."""
    example = verb.examples[0].removeprefix("longstride ")
    if len(example) > _EXAMPLE_COLUMNS:
        return [f"  {example}", f"  {'':{_EXAMPLE_COLUMNS}} {verb.summary}"]
    return [f"  {example:{_EXAMPLE_COLUMNS}} {verb.summary}"]


def _help(words: list[str]) -> int:
    """Lists the verbs that begin as the words do, where that is asked; else says that there is no such verb."""
    first = [word for word in words if word not in ("-h", "--help")]
    verbs = [verb for verb in VERBS if verb.words.split()[: len(first)] == first]
    prefix = " ".join(["longstride", *first])
    if verbs and (len(first) < len(words) or not words):
        lines = [f"usage: {prefix} VERB …"]
        for title, group in GROUPS.items():
            listed = [line for verb in group if verb in verbs for line in _listed(verb)]
            lines += ["", f"{title}:", *listed] if listed else []
        lines += ["", f"{prefix} VERB --help tells the options of one, with examples."]
        print("\n".join(lines))
        return exit_codes.DONE
    names = [verb.words for verb in VERBS]
    close = [each for typed in (" ".join(words[:2]), words[0]) for each in difflib.get_close_matches(typed, names, n=1)]
    meant = [verb.words for verb in verbs] or close[:1]
    hint = f"; there is {', '.join(meant)}" if meant else ""
    return report(AgreedError(f"no verb {' '.join(first[:2]) or words[0]}{hint}; `longstride --help` lists all"))


def complete(arguments: argparse.Namespace) -> int:
    """Runs `longstride completion`: prints a script by which a shell completes verbs, options and files.

    It is written once, from the parsers of all verbs, so that a TAB starts no Python.

    Raises:
        AgreedError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise AgreedError(f'completion: needs shtab ({error}); pip install "longstride[completion]"') from None
    root = argparse.ArgumentParser(prog="longstride")
    below: dict[tuple[str, ...], Any] = {(): root.add_subparsers()}
    for verb in VERBS:
        *above, last = verb.words.split()
        group = tuple(above)
        if group not in below:  # shtab completes parsers that have a help
            below[group] = below[()].add_parser(*above, help=f"{group[0]} VERB").add_subparsers()
        parser = below[group].add_parser(last, help=verb.summary)
        verb.add_arguments(parser)
        for action in parser._actions:
            if action.choices is None and any(name in str(action.metavar) for name in _FILES):
                vars(action)["complete"] = shtab.FILE  # by which shtab is told
    print(shtab.complete(root, arguments.shell))
    return exit_codes.DONE


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:  # one of several ranks, started by a launcher
        from longstride.launcher.ranks import leave

        leave(code)
    sys.exit(code)
