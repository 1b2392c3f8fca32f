"""Which process this is, and the process group they share. Imports deepspeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from longstride.kernels import ConfigError
from longstride.launcher.ranks.hangs import Watch, found_in
from longstride.launcher.ranks.interfaces import choose_interface

_BEHIND_THE_WATCH_SECONDS = 15.0


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
def process_group(
    ranks: Ranks, timeout_seconds: float, run: Path | None = None, orphaned: Callable[[], bool] | None = None
) -> Iterator[Watch]:
    """Joins the processes for as long as the block runs; every collective in it ends by the time-out.

    Where other processes do not answer, the block does not end: the process does, by ``exit_codes.HUNG``, with the
    stacks of the processes of this host in the run's folder. Leaving without destroying the group can abort a process
    that has done its work; destroying it where others are gone can wait for ever. ``orphaned``: see ``Watch``.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().device_name() == "cpu"
    # NCCL ends by aborting the process, so the watch is to be first.
    timeout = timedelta(seconds=timeout_seconds + (0 if on_cpu else _BEHIND_THE_WATCH_SECONDS))
    if not on_cpu:
        get_accelerator().set_device(ranks.local_rank)
    if ranks.world_size > 1:
        choose_interface()
    alone = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # deepspeed.initialize asks for it
    watch = Watch(run, ranks.rank, ranks.world_size, timeout_seconds, orphaned)
    try:
        with _default_timeout(timeout):
            if ranks.world_size == 1 and "MASTER_PORT" not in os.environ:
                # A store of its own, not a port: two single runs on one machine cannot meet.
                store = torch.distributed.HashStore()
                backend = get_accelerator().communication_backend_name()
                torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
            watch.meet(gather_objects(watch.address, ranks))
            watch.at("starting")
            yield watch
    except Exception as error:
        found = found_in(error)
        if found is not None:
            watch.end(found, error)
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        watch.close()
        if alone:  # by itself it would look like half a launcher's environment
            del os.environ["LOCAL_RANK"]


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """Gives groups made without a time-out, and barriers that name those who are missing, this one.

    DeepSpeed clones the world group by ``new_group(ranks)`` and runs its collectives there, so that the time-out of
    the world group would never apply. Torch's own makers of groups, such as device meshes, ask for these two as well.
    """
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(torch.distributed.distributed_c10d, name) for name in names}
    for name in names:
        setattr(torch.distributed.distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.distributed.distributed_c10d, name, value)


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
