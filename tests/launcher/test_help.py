"""Help that a person reads: one screen of verbs, examples and whole phrases, without waiting for torch."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

import pytest

from longstride.launcher import cli
from longstride.launcher.options import using
from longstride.launcher.options.shared import PRECISIONS, WEIGHTS
from longstride.launcher.verbs import GROUPS, VERBS, Verb
from tests.harness.runs import ROOT, plain_environment

SCREEN = (80, 40)  # columns and lines
HEAVY = ("torch", "deepspeed", "triton", "webdataset", "safetensors", "matplotlib", "aiohttp")


def heavy_after(commands: list[list[str]]) -> str:
    """What one process has imported of HEAVY once it has run these command lines, and their exit codes."""
    script = f"""
import contextlib, io, sys
from longstride.launcher import cli
codes = []
for words in {commands!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            codes.append(cli.main(words))
        except SystemExit as ended:
            codes.append(ended.code)
print(sorted(set(codes)), [name for name in {HEAVY!r} if name in sys.modules])
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=True)
    return ended.stdout.strip()


def test_help_is_one_screen_of_verbs_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN[1] and max(map(len, lines)) <= SCREEN[0]
    titles = [line for line in lines if line in {f"{title}:" for title in GROUPS.values()}]
    assert titles == [f"{title}:" for title in GROUPS.values()]
    for verb in VERBS:
        assert any(line.startswith(f"  {verb.words}") for line in lines), verb.words
        assert any(line.endswith(f" {verb.summary}") for line in lines), verb.words


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.words)
def test_verb_has_a_group_and_two_examples_that_its_parser_takes(verb: Verb) -> None:
    assert verb.group in GROUPS
    assert len(verb.examples) == 2
    for example in verb.examples:
        words = shlex.split(example.partition(" > ")[0])
        assert words[: 1 + len(verb.words.split())] == ["longstride", *verb.words.split()]
        if not verb.passes_words:
            cli.parser_of(verb).parse_intermixed_args(words[1 + len(verb.words.split()) :])


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.words)
def test_every_option_is_told_in_a_whole_phrase(verb: Verb) -> None:
    for action in cli.parser_of(verb)._actions:
        name = "/".join(action.option_strings) or action.dest
        assert action.help is not None and len(action.help.split()) >= 2, f"{name}: no help"
        assert action.help.split()[0] not in {"of", "the", "that", "there", "with", "default:"}, f"{name}: a fragment"
        takes_value = action.option_strings and action.nargs != 0
        optional = takes_value and not action.required and action.default not in (None, [], "")
        if optional:
            assert "default" in action.help or isinstance(action, argparse._HelpAction), f"{name}: no default told"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.words)
def test_help_of_a_verb_begins_with_its_examples(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*verb.words.split(), "--help"])
    assert ended.value.code == 0
    first, empty, *lines = capsys.readouterr().out.splitlines()
    assert (first, empty) == (f"{verb.summary[0].upper()}{verb.summary[1:]}.", "")
    assert tuple(line.removeprefix("  ") for line in lines[:2]) == verb.examples
    assert lines[3].startswith(f"usage: longstride {verb.words}")


def test_help_and_wrong_options_import_nothing_heavy() -> None:
    assert heavy_after([[*verb.words.split(), "--help"] for verb in VERBS]) == "[0] []"
    wrong = [[*verb.words.split(), "--no-such-option"] for verb in VERBS if not verb.passes_words]
    assert heavy_after(wrong) == "[2] []"


def test_choices_are_those_of_the_code_behind_them() -> None:
    from longstride.launcher.exports.programs import FORMATS
    from longstride.launcher.models import AVERAGE, DTYPES, TRAINED

    assert sorted(DTYPES) == list(PRECISIONS)
    assert (TRAINED, AVERAGE) == WEIGHTS
    assert tuple(FORMATS) == using.FORMATS
