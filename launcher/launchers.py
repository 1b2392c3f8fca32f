"""The command lines by which launchers start the ranks of a run."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

import torch

from launcher import train
from launcher.trust import TRUST_OPTION


def launcher_environment() -> dict[str, str]:
    """This process's environment; without a GPU it names what DeepSpeed would choose, with a warning a process."""
    chosen = {} if torch.accelerator.is_available() else {"DS_ACCELERATOR": "cpu"}
    return chosen | os.environ


def launcher_command(arguments: argparse.Namespace, processes: int | None) -> list[str]:
    """The command line of `deepspeed launcher/train.py …`; None leaves the number of processes to the launcher."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(_free_port())]
    # How it starts each rank would fill the screen, and that a rank ended is told by the rank itself.
    command += ["--log_level", "critical"]
    if processes is not None:
        command += ["--num_gpus", str(processes)]  # on a CPU too this is the number of processes
    command += [str(Path(train.__file__).resolve()), "--config", str(arguments.config), "--resume", arguments.resume]
    command += [TRUST_OPTION] if arguments.trust_checkpoint else []
    if arguments.replay is not None:
        command += ["--replay", arguments.replay]
    return command + arguments.overrides


def _free_port() -> int:
    """A port for the ranks to meet at: the launcher's own choice is always the same, so that two runs would clash."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
