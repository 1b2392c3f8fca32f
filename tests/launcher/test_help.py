"""Help that a person reads: one screen of verbs, examples and whole phrases, without waiting for torch."""

import argparse
import importlib
import json
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.cli import GROUPS, VERBS
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.verbs import KEYS, Verb, misspelt_keys
from tests.harness.runs import ROOT, plain_environment
from tests.launcher.conftest import Refusal

SCREEN = (80, 40)  # columns and lines
HEAVY = ("torch", "deepspeed", "triton", "webdataset", "safetensors", "matplotlib", "aiohttp")


def heavy_after(commands: list[list[str]]) -> str:
    """What one process has imported of HEAVY once it has run these command lines, and their exit codes."""
    script = f"""
import contextlib, io, sys
from longstride.launcher import cli
from longstride.launcher.cli import GROUPS, VERBS
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
    titles = [line for line in lines if line in {f"{title}:" for title in GROUPS}]
    assert titles == [f"{title}:" for title in GROUPS]
    for verb in VERBS:
        assert any(line.startswith(f"  {verb.words}") for line in lines), verb.words
        assert any(line.endswith(f" {verb.summary}") for line in lines), verb.words


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.words)
def test_verb_runs_a_function_and_has_two_examples_that_its_parser_takes(verb: Verb) -> None:
    module, _, function = verb.run.rpartition(".")
    assert callable(getattr(importlib.import_module(f"longstride.launcher.{module}"), function))
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


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]], ids=" ".join)
def test_help_is_printed_where_the_locale_is_ascii(words: list[str]) -> None:
    environment = plain_environment() | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "longstride.launcher.cli", *words]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert ended.stderr == b"" and b"\\u2026" in ended.stdout and ended.stdout.isascii()


def test_help_and_wrong_options_import_nothing_heavy() -> None:
    assert heavy_after([[*verb.words.split(), "--help"] for verb in VERBS]) == "[0] []"
    wrong = [[*verb.words.split(), "--no-such-option"] for verb in VERBS if not verb.passes_words]
    assert heavy_after(wrong) == "[2] []"
    assert heavy_after([["completion", "bash"]]) == "[0] []"


def test_a_misspelt_key_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    run = json.loads((ROOT / "ds_configs/experiments/demo.json").read_text())
    run["train"]["guards"] = {"max_rewnids": 3}
    (tmp_path / "run.json").write_text(json.dumps(run))
    file = str(tmp_path / "run.json")
    commands = [["train", "--config", "enwik8_fixed", "train.stpes=3"], ["plan", file], ["train", "--config", file]]
    assert heavy_after(commands) == "[2] []"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["train.stpes=3", "data.remote.atempts=1"], ["train.stpes", "data.remote.atempts"]),
        (["model.widht=3"], ["model.widht"]),
        (["modle.width=3"], ["modle"]),
        (["train.steps=3", "model.attention.strid=4"], []),  # of which object is told by its type: the classes know
        (["learning_rate=3", "train.zzz=1", "deepspeed.zero_optimisation=1"], []),  # not nearly any
    ],
    ids=str,
)
def test_misspelt_keys_are_told_as_the_classes_tell_them(overrides: list[str], lines: list[str]) -> None:
    told = misspelt_keys("demo", overrides)
    assert [line.partition(":")[0] for line in told] == lines
    for override, line in zip(overrides, told, strict=False):
        with pytest.raises(ConfigError) as refused:
            load_config("demo", [override])
        assert line in str(refused.value).splitlines()


def test_keys_are_those_of_the_classes() -> None:
    """Else `python docs/keys.py` mends it."""
    settled_keys = runpy.run_path(str(ROOT / "docs/keys.py"))["settled_keys"]
    assert json.loads(KEYS.read_text()) == settled_keys(RunConfig.model_json_schema())


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, "7", '{"train": 7, "": {"a": 1}, "a.b": 2}', "\xff"], ids=range(5)
)
def test_what_is_no_configuration_is_left_to_the_classes(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content, encoding="latin-1")
    assert misspelt_keys(str(tmp_path / "run.json"), []) == []


def completed(words: list[str], cwd: Path) -> set[str]:
    """What bash offers for the last of the words, by the script that the verb prints."""
    script = subprocess.run(
        [sys.executable, "-m", "longstride.launcher.cli", "completion", "bash"],
        cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (cwd / "longstride.bash").write_text(script)
    asked = f"""
source ./longstride.bash
COMP_WORDS=({shlex.join(["longstride", *words])})
COMP_CWORD={len(words)}
$(complete -p longstride | sed 's/.*-F //; s/ .*//') longstride
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ended = subprocess.run(["bash", "--norc", "-c", asked], cwd=cwd, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ev"], {"evaluate"}),
        (["data", "b"], {"build"}),
        (["data", "build", "--palette-"], {"--palette-from"}),
        (["data", "build", "--modality", "i"], {"image"}),
        (["train", "--config", "my"], {"my.json"}),
        (["sample", "mod"], {"model"}),
    ],
    ids=" ".join,
)
def test_bash_completes_verbs_options_choices_and_files(words: list[str], offered: set[str], tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text("{}")
    (tmp_path / "model").mkdir()
    assert completed(words, tmp_path) == offered


def test_completion_without_shtab_is_told(monkeypatch: pytest.MonkeyPatch, refusal: Refusal) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    line = refusal("completion", "bash")
    assert line.startswith("completion: needs shtab (") and line.endswith('; pip install "longstride[completion]"')
