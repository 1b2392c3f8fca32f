"""`longstride train`: the deepspeed launcher around launcher/train.py, as a person would type it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from kernels.errors import ConfigError
from launcher import train
from launcher.batches import RunData
from launcher.checks import check_output
from launcher.config import check_world_size, load_config
from launcher.launchers import launcher_command, launcher_environment
from launcher.processes import Ranks
from launcher.steps import resolve_steps

HOSTFILE = Path("/job/hostfile")  # where the deepspeed launcher looks for one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `longstride train`."""
    train.add_arguments(parser)
    parser.add_argument(
        "--processes", type=int, default=None, metavar="N", help="on this host (default: one a GPU, or one on a CPU)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Becomes the launcher, so that signals and the exit code are its own.

    Raises:
        ConfigError: the configuration or the run folder is wrong, told here once instead of by every rank.
        DataError: so is the data folder.
    """
    config = load_config(arguments.config, arguments.overrides)
    check_output(config.train.output, arguments.resume)
    processes = arguments.processes
    if processes is None and not torch.cuda.is_available() and not HOSTFILE.exists():
        processes = 1  # the launcher would start one a NUMA node
    if processes is not None:
        if processes < 1:
            raise ConfigError(f"--processes={processes}: must be at least 1")
        check_world_size(config, processes)
    if not HOSTFILE.exists():  # the ranks run here, with the data that is here
        data = RunData(config, Ranks())
        resolve_steps(config, data)
        data.check()
    command = launcher_command(arguments, processes)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, launcher_environment())
