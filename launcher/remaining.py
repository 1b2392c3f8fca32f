"""What is left to go on with after a process or a host was lost."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.errors import ConfigError
from launcher.config import RunConfig, check_world_size

_SSH_SECONDS = 10
_AT_ONCE = 32  # hosts asked at a time
_COUNT_SECONDS = 120.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def usable_world_sizes(config: RunConfig, most: int) -> list[int]:
    """The numbers of processes up to ``most`` over which the batch divides, largest first."""
    sizes = []
    for size in range(most, 0, -1):
        try:
            check_world_size(config, size)
        except ConfigError:
            continue
        sizes.append(size)
    return sizes


def count_accelerators() -> int:
    """How many a new process sees: one that has seen them before may go by what it remembers."""
    code = "import torch; print(torch.accelerator.device_count())"
    try:
        told = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_COUNT_SECONDS, check=False
        )
        return int(told.stdout.split()[-1]) if told.returncode == 0 else 0
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return 0


def first_visible(environment: Mapping[str, str], count: int) -> dict[str, str]:
    """The environment in which the launcher takes the first so many of the GPUs that it may see."""
    named = [each for each in environment.get(_VISIBLE, "").split(",") if each]
    chosen = (named or [str(number) for number in range(count)])[:count]
    return {**environment, _VISIBLE: ",".join(chosen)}


def answering(hosts: Sequence[str], answers: Callable[[str], bool] | None = None) -> list[str]:
    """Those of the hosts that answer, in their order; ``answers`` asks one, by default by ssh as pdsh would."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        replies = pool.map(answers or _answers_by_ssh, hosts)
        return [host for host, answered in zip(hosts, replies, strict=True) if answered]


def fewer_slots(slots: Mapping[str, Sequence[int]], world_size: int, *, equally: bool = False) -> dict[str, list[int]]:
    """So many of the hosts' slots, the first hosts' first; empty where there is no such choice.

    ``equally``: as many on every host that is taken, as mpich and srun need it; the most hosts that this leaves.
    """
    if not equally:
        chosen: dict[str, list[int]] = {}
        for host, own in slots.items():
            take = min(len(own), world_size - sum(map(len, chosen.values())))
            if take > 0:
                chosen[host] = list(own[:take])
        return chosen if sum(map(len, chosen.values())) == world_size else {}
    for count in range(min(len(slots), world_size), 0, -1):
        each, rest = divmod(world_size, count)
        roomy = [host for host, own in slots.items() if len(own) >= each]
        if not rest and len(roomy) >= count:
            return {host: list(slots[host][:each]) for host in roomy[:count]}
    return {}


def write_hostfile(path: Path, slots: Mapping[str, Sequence[int]]) -> Path:
    """Writes the deepspeed launcher's hostfile: a host a line, with its number of processes."""
    path.write_text("".join(f"{host} slots={len(own)}\n" for host, own in slots.items()), encoding="utf-8")
    return path


def _answers_by_ssh(host: str) -> bool:
    own = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", *own, host, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=3 * _SSH_SECONDS, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return False
    return done.returncode == 0
