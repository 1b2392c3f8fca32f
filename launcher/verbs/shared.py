"""The class of verbs, options that several verbs share, an early search for misspelt keys, and the small verbs."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from longstride.data_pipelines.plain_files import JSONError, dotted_paths, expand_path, parse_json, read_plain

TRUST_OPTION = "--trust-checkpoint"
PRECISIONS = ("bf16", "fp16", "fp32")
WEIGHTS = ("trained", "ema")
KEYS = Path(__file__).with_name("keys.json")
_PRESETS = Path(__file__).resolve().parents[2] / "ds_configs" / "experiments"
_MOST_CONFIG_BYTES = 1 << 20  # a larger file is not searched for misspelt keys
_NUMBER = re.compile(r"[0-9]{1,18}")


class Verb(NamedTuple):
    """A verb of `longstride`: its help and options, and the function that does its work."""

    words: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str  # a function below longstride.launcher, imported late. A user's mistake is an OSError or a ValueError
    examples: tuple[str, ...]  # in its help; `longstride --help` shows the first one
    passes_words: bool = False  # ``run`` takes all words but --help unparsed: another program has the options


Declare = Callable[[argparse.ArgumentParser], None]


def register(
    group: list[Verb], words: str, summary: str, run: str, *examples: str, passes_words: bool = False
) -> Callable[[Declare], Declare]:
    """Decorate a function that declares the options of a verb, to append the verb to its group; see ``Verb``."""

    def append(add_arguments: Declare) -> Declare:
        group.append(Verb(words, summary, add_arguments, run, examples, passes_words))
        return add_arguments

    return append


def place(text: str) -> str:
    """Parse an option that names a path or a URL; see ``expand_path``."""
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def path(text: str) -> Path:
    """Parse an option that names a path."""
    return Path(place(text))


def add_config_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare a run's configuration as ``name``: an option or a positional argument."""
    what = "JSON file of the run, or the name of one of ds_configs/experiments, such as enwik8_fixed"
    if name.startswith("--"):
        parser.add_argument(name, type=place, required=True, metavar="X.json|NAME", help=what)
    else:
        parser.add_argument(name, type=place, metavar="CONFIG", help=what)


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare overrides of a run's configuration, which follow all options."""
    changes = "changes to the configuration, each value as JSON, such as train.steps=100"
    # Without a default argparse lists it as missing.
    parser.add_argument("overrides", nargs="*", default=[], metavar="path.to.key=value", help=changes)


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--trust-checkpoint`, by which the user allows a checkpoint to run code; `--trust-code` for an export."""
    code = "open files of the checkpoint that hold more than tensors and numbers, and run the code that they ask for"
    parser.add_argument(TRUST_OPTION, "--trust-code", action="store_true", help=code, dest="trust_checkpoint")


def add_code_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--trust-code`, by which the user allows an export to import other packages."""
    code = "import other packages that define parts of the model"
    parser.add_argument("--trust-code", action="store_true", help=code)


def step_named(text: str) -> int | str:
    """Parse an option that names a checkpoint: the number of its step, or best."""
    if text == "best" or _NUMBER.fullmatch(text):
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"{text}: must be the number of a step, or best")


def add_step_argument(parser: argparse.ArgumentParser, use: str = "read") -> None:
    """Declare `--step`, which chooses a checkpoint: a number, "best", or None for the newest."""
    which = "of this step, or the one with the lowest validation loss (default: the newest)"
    parser.add_argument("--step", type=step_named, metavar="N|best", help=f"{use} the checkpoint {which}")


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--weights`, which chooses between the trained weights and their moving average."""
    which = "take the weights as they were trained, or their moving average of train.ema_decay (default: trained)"
    parser.add_argument("--weights", choices=WEIGHTS, default="trained", help=which)


def add_device_argument(parser: argparse.ArgumentParser, work: str, default: str | None = None) -> None:
    """Declare `--device`; without a default the verb chooses."""
    usual = default or "cuda where there is a GPU, else cpu"
    text = f"{work} on this device, such as cpu or cuda:1 (default: {usual})"
    parser.add_argument("--device", default=default, metavar="DEVICE", help=text)


def misspelt_keys(config: str | None, overrides: Sequence[str]) -> list[str]:
    """Find misspelt keys of a configuration without importing torch; return a line for each.

    ``keys.json`` has the keys of every object with a fixed set of keys; `python docs/keys.py` writes it. Only unknown
    keys that resemble a known one are found. The classes of the configuration find all others later.
    """
    keys_of: dict[str, list[str]] = json.loads(KEYS.read_text(encoding="utf-8"))
    all_keys = {key for keys in keys_of.values() for key in keys}
    paths: list[str] = []
    if config is not None:
        file = Path(config)
        if not file.is_file():
            file = _PRESETS / f"{file.name}.json"
        with suppress(OSError, JSONError):  # reported later
            paths += dotted_paths(parse_json(read_plain(file, _MOST_CONFIG_BYTES)))
    for override in overrides:
        parts = override.partition("=")[0].split(".")
        paths += [".".join(parts[: end + 1]) for end in range(len(parts))]
    lines = {}
    for path in dict.fromkeys(paths):
        section, _, key = path.rpartition(".")
        matches = [] if key in all_keys else difflib.get_close_matches(key, keys_of.get(section, ()), 1)
        if matches:
            lines[path] = f"{path}: unknown key; nearest {matches[0]}"
    return ["".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line) for line in lines.values()]


CONFIGURE: list[Verb] = []


@register(
    CONFIGURE,
    "config schema",
    "the JSON schema of a run",
    "cli.print_schema",
    "longstride config schema",
    "longstride config schema --output longstride.schema.json",
)
def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    what = "write it to this new file, for `$schema` of configurations (default: print it)"
    parser.add_argument("--output", type=path, default=None, metavar="FILE.json", help=what)


@register(
    CONFIGURE,
    "completion",
    "TAB completes verbs and options",
    "cli.complete",
    "longstride completion bash",
    "longstride completion bash > ~/.local/share/bash-completion/completions/longstride",
)
def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")
