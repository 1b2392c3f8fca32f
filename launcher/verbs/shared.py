"""What a verb is, and options that several verbs have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from longstride.data_pipelines.plain_files import expand_path

TRUST_OPTION = "--trust-checkpoint"
PRECISIONS = ("bf16", "fp16", "fp32")
WEIGHTS = ("trained", "ema")
_NUMBER = re.compile(r"[0-9]{1,18}")


class Verb(NamedTuple):
    """A verb of `longstride`: its help and options, and the function that does its work."""

    words: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str  # a function below longstride.launcher, imported once the words are understood
    examples: tuple[str, ...]  # in its help; `longstride --help` shows the first one
    passes_words: bool = False  # ``run`` takes all words but --help as they are: the options are another program's


def place(text: str) -> str:
    """Take an option that names a path or a URL; see ``expand_path``."""
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def path(text: str) -> Path:
    """Take an option that names a path."""
    return Path(place(text))


def add_config_argument(parser: argparse.ArgumentParser, name: str) -> None:
    """Declare a run's configuration as ``name``: an option, or an argument by its place."""
    what = "JSON file of the run, or the name of one of ds_configs/experiments, such as enwik8_fixed"
    if name.startswith("--"):
        parser.add_argument(name, type=place, required=True, metavar="X.json|NAME", help=what)
    else:
        parser.add_argument(name, type=place, metavar="CONFIG", help=what)


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare changes to a run's configuration, behind all options."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # or argparse names it among what is missing
        metavar="path.to.key=value",
        help="changes to the configuration, each value as JSON, such as train.steps=100",
    )


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--trust-checkpoint`, of every verb that reads a checkpoint: the user's word that it may run code.

    Where such a verb reads an export, it stands for `--trust-code`.
    """
    code = "open files of the checkpoint that hold more than tensors and numbers, and run the code that they ask for"
    parser.add_argument(TRUST_OPTION, "--trust-code", action="store_true", help=code, dest="trust_checkpoint")


def add_code_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--trust-code`, of every verb that reads an export: the user's word that other packages are imported."""
    code = "import the packages that define parts of the model, beside our own"
    parser.add_argument("--trust-code", action="store_true", help=code)


def step_named(text: str) -> int | str:
    """Take an option that names a checkpoint: the number of its step, or best."""
    if text != "best" and not _NUMBER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: must be the number of a step, or best")
    return text if text == "best" else int(text)


def add_step_argument(parser: argparse.ArgumentParser, use: str = "read") -> None:
    """Declare `--step`, of every verb that reads a run: a number, "best", or None for the newest checkpoint."""
    which = "of this step, or the one with the lowest validation loss (default: the newest)"
    parser.add_argument("--step", type=step_named, metavar="N|best", help=f"{use} the checkpoint {which}")


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--weights`, which chooses among the weights of a checkpoint."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="trained",
        help="take the weights as they were trained, or their moving average of train.ema_decay (default: trained)",
    )


def add_device_argument(parser: argparse.ArgumentParser, work: str, default: str | None = None) -> None:
    """Declare `--device`, None where the verb is to choose."""
    told = default or "cuda where there is a GPU, else cpu"
    text = f"{work} on this device, such as cpu or cuda:1 (default: {told})"
    parser.add_argument("--device", default=default, metavar="DEVICE", help=text)
