"""What is left to go on with after a process or a host was lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from longstride.kernels.errors import ConfigError
from longstride.launcher.config import RunConfig

_COUNT_SECONDS = 120.0
VISIBLE = "CUDA_VISIBLE_DEVICES"  # of which the launcher takes all, where it is given no number


def usable_world_sizes(config: RunConfig, most: int) -> list[int]:
    """The numbers of processes up to ``most`` over which the batch divides, largest first."""
    sizes = []
    for size in range(most, 0, -1):
        try:
            config.check_world_size(size)
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
    """The environment in which the launcher takes the first so many of the GPUs that it may see.

    Raises:
        ConfigError: they are named in another way than by their numbers, which the launcher does not know.
    """
    told = environment.get(VISIBLE, "")
    named = [each.strip() for each in told.split(",") if each.strip()]
    if not all(each.isdecimal() for each in named):
        raise ConfigError(f"{VISIBLE}={told}: the deepspeed launcher takes numbers alone; such as 0,1")
    chosen = (named or [str(number) for number in range(count)])[:count]
    return {**environment, VISIBLE: ",".join(chosen)}


def fewer_slots(slots: Mapping[str, Sequence[int]], world_size: int) -> dict[str, list[int]]:
    """So many of the hosts' slots, of which there are as many at least: the first hosts' first."""
    chosen: dict[str, list[int]] = {}
    for host, own in slots.items():
        take = min(len(own), world_size - sum(map(len, chosen.values())))
        if take:
            chosen[host] = list(own[:take])
    return chosen
