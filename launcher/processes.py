"""Which process this is, and the process group they share. Imports deepspeed."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed

from kernels.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among W."""

    rank: int = 0
    local_rank: int = 0  # on this host
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """The place told by the deepspeed launcher or torchrun; without either, one process.

    Raises:
        ConfigError: the variables are set in part, or are no numbers.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: environment[name] for name in names if name in environment}
    if not given:
        return Ranks()
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(f"environment: {', '.join(given)} given without {', '.join(missing)}; start by a launcher")
    try:
        rank, local_rank, world_size = (int(environment[name]) for name in names)
    except ValueError:
        raise ConfigError(f"environment: {given}: must be whole numbers") from None
    if not 0 <= rank < world_size:
        raise ConfigError(f"environment: RANK={rank}: must be from 0 to {world_size - 1}")
    return Ranks(rank, local_rank, world_size)


@contextmanager
def process_group(ranks: Ranks, timeout_seconds: float) -> Iterator[None]:
    """Joins the processes for as long as the block runs; every collective in it ends by the time-out.

    Leaving without destroying the group can abort a process that has done its work.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    timeout = timedelta(seconds=timeout_seconds)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(ranks.local_rank)
    alone = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # deepspeed.initialize asks for it
    if ranks.world_size == 1 and "MASTER_PORT" not in os.environ:
        # A store of its own, not a port: two single runs on one machine cannot meet.
        store = torch.distributed.HashStore()
        backend = get_accelerator().communication_backend_name()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    with _default_group_timeout(timeout):
        try:
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
            yield
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            if alone:  # by itself it would look like half a launcher's environment
                del os.environ["LOCAL_RANK"]


@contextmanager
def _default_group_timeout(timeout: timedelta) -> Iterator[None]:
    """Gives groups made without a time-out this one.

    DeepSpeed clones the world group by ``new_group(ranks)`` and runs its collectives there, so that the time-out of
    the world group would never apply.
    """
    original = torch.distributed.new_group
    torch.distributed.new_group = functools.partial(original, timeout=timeout)
    try:
        yield
    finally:
        torch.distributed.new_group = original


def gather_int64(values: torch.Tensor, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """Every rank's (n,) int64 values on the CPU, in rank order: (W, n). All ranks must call, with the same n."""
    values = values.to(device)
    if ranks.world_size == 1:
        return values.cpu()[None]
    everyone = [torch.empty_like(values) for _ in range(ranks.world_size)]
    torch.distributed.all_gather(everyone, values)
    return torch.stack(everyone).cpu()


def sum_int64(values: torch.Tensor, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """The sums of all ranks' int64 values on the CPU, of their shape. All ranks must call, with the same shape."""
    if ranks.world_size == 1:
        return values
    summed = values.to(device, copy=True)
    torch.distributed.all_reduce(summed)
    return summed.cpu()


def gather_float64(value: torch.Tensor, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """Every rank's () float64 value on the CPU, in rank order: (W,). All ranks must call."""
    # The float's bits travel as an integer, and come back unchanged on devices without float64.
    return gather_int64(value.reshape(1).view(torch.int64), ranks, device).view(torch.float64)[:, 0]


def gather_objects(value: object, ranks: Ranks) -> list:
    """Every rank's value in rank order. All ranks must call."""
    if ranks.world_size == 1:
        return [value]
    everyone: list = [None] * ranks.world_size
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def barrier(ranks: Ranks) -> None:
    """Waits until every rank is here."""
    if ranks.world_size > 1:
        torch.distributed.barrier()
