"""`--from` and the options beside it: where a run's first weights come from, as it is asked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longstride.kernels import ConfigError
from longstride.launcher.output import file_names


@dataclass(frozen=True, slots=True)
class FromOptions:
    """Where a run's first weights come from, as it is asked: `--from` and the options beside it."""

    path: Path  # an exported model's folder, or a run's
    step: int | Literal["best"] | None = None  # of a run; None: its newest
    weights: str = "trained"  # or "ema"
    positions: str | None = None  # repeat, interpolate or fresh: how position tables of other sizes are made
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
            "--from-weights": arguments.from_weights if arguments.from_weights != "trained" else None,
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
