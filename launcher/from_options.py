"""`--from` and the options beside it: where a run's first weights come from, as it is asked."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longstride.kernels import ConfigError
from longstride.launcher.output import file_names

POSITIONS = ("repeat", "interpolate", "fresh")  # how position tables of other sizes are made
WEIGHTS = ("trained", "ema")  # of a run: as they were trained, or their moving average
_STEP = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class FromOptions:
    """Where a run's first weights come from, as it is asked: `--from` and the options beside it."""

    path: Path  # an exported model's folder, or a run's
    step: int | Literal["best"] | None = None  # of a run; None: its newest
    weights: str = WEIGHTS[0]  # one of WEIGHTS
    positions: str | None = None  # one of POSITIONS: how position tables of other sizes are made
    partly: bool = False  # whether what does not fit begins anew

    @classmethod
    def of(cls, arguments: argparse.Namespace, resume: str, *, elsewhere: bool = False) -> FromOptions | None:
        """By a command line and what its --resume says; None: it names no source.

        A folder that only hosts ``elsewhere`` have is checked there.

        Raises:
            ConfigError: the folder is none, or an option makes no sense.
        """
        beside = {
            "--from-step": arguments.from_step,
            "--from-weights": arguments.from_weights if arguments.from_weights != WEIGHTS[0] else None,
            "--from-positions": arguments.from_positions,
            "--from-partly": arguments.from_partly or None,
        }
        if arguments.source is None:
            for option, given in beside.items():
                if given is not None:
                    shown = option if given is True else f"{option}={given}"
                    raise ConfigError(f"{shown}: says how weights are taken, and no --from says where from; give both")
            return None
        path = Path(arguments.source)
        if resume not in ("auto", "never"):
            rule = f"says where a run begins, and --resume={resume} has it go on; leave one of them out"
            raise ConfigError(f"--from={path}: {rule}")
        there = path.is_dir() and ((path / file_names.CONFIG).exists() or (path / file_names.CHECKPOINTS).is_dir())
        if not there and not elsewhere and resume != "auto":  # which may not need it
            rule = "holds no model; name a folder of `longstride export`, or a run folder"
            raise ConfigError(f"--from={path}: {rule if path.is_dir() else 'no such folder; name one of them'}")
        return cls(path, *(getattr(arguments, f"from_{name}") for name in ("step", "weights", "positions", "partly")))

    def words(self) -> list[str]:
        """The same on a command line that is read in any folder."""
        words = ["--from", str(self.path.absolute()), "--from-weights", self.weights]
        for option, given in (("--from-step", self.step), ("--from-positions", self.positions)):
            words += [] if given is None else [option, str(given)]
        return words + ["--from-partly"] * self.partly


def step_named(text: str) -> int | str:
    """An option that names a checkpoint: the number of its step, or best."""
    if text != "best" and not _STEP.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text}: must be the number of a step, or best")
    return text if text == "best" else int(text)


def add_from_arguments(parser: argparse.ArgumentParser) -> None:
    """`--from` and the options beside it, of every verb that starts a run."""
    what = "take the first weights from an exported folder or from another run; the optimiser begins anew"
    parser.add_argument("--from", dest="source", metavar="MODEL|RUN", help=what)
    which = "which checkpoint of the other run (best: the lowest validation loss; default: the newest)"
    parser.add_argument("--from-step", type=step_named, metavar="N|best", help=which)
    which = f"of the other run: as they were trained, or their moving average (default: {WEIGHTS[0]})"
    parser.add_argument("--from-weights", choices=WEIGHTS, default=WEIGHTS[0], help=which)
    how = "how position tables of another context are made: repeat or interpolate the learned rows, or draw fresh ones"
    parser.add_argument("--from-positions", choices=POSITIONS, help=how)
    parser.add_argument(
        "--from-partly", action="store_true", help="take what fits the model, and begin anew what does not"
    )
