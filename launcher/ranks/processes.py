"""The processes of a run: which one this is, their collectives, their group, and the lock of their run folder.

Joining the group imports deepspeed.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Literal, NoReturn

import torch
import torch.distributed

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError, Problem
from longstride.launcher.output import AgreedError, file_names, mistake, said_where_slow, say, settle_output
from longstride.launcher.ranks.hangs import Watchdog
from longstride.launcher.ranks.rank_environment import choose_interface
from longstride.launcher.ranks.waiting import Result, first_works
from longstride.sparse_model import Division

_AFTER_THE_WATCHDOG_SECONDS = 15.0
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_MOST_LOCK_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among W, and how the W of them meet.

    All ranks must call a collective. Before the process group stands, W is 1 or no collective may be called.
    """

    rank: int = 0
    local_rank: int = 0  # on this host
    world_size: int = 1
    sequence_parallel: int = 1  # ranks that share each context: neighbours

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """The place by the variables of the deepspeed launcher or torchrun; without any, one process.

        Raises:
            ConfigError: the variables are set in part, or are no numbers.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = {name: environment[name] for name in names if name in environment}
        if not given:
            return cls()
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(
                f"environment: {', '.join(given)} given without {', '.join(missing)}; start by a launcher"
            )
        try:
            rank, local_rank, world_size = (int(environment[name]) for name in names)
        except ValueError:
            raise ConfigError(f"environment: {given}: must be whole numbers") from None
        if not 0 <= rank < world_size:
            raise ConfigError(f"environment: RANK={rank}: must be from 0 to {world_size - 1}")
        return cls(rank, local_rank, world_size)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The place of this rank's group among those that have contexts of their own."""
        return self.rank // self.sequence_parallel

    @property
    def data_world_size(self) -> int:
        """How many groups have contexts of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def sequence_rank(self) -> int:
        """The place of this rank in its group, and of its positions in a context."""
        return self.rank % self.sequence_parallel

    def division(self, exchange: Literal["heads", "keys", "auto"]) -> Division:
        """How contexts are divided over the ranks that share them. All ranks must call."""
        if self.sequence_parallel == 1:
            return Division()
        group, _ = torch.distributed.new_subgroups(self.sequence_parallel)
        return Division(self.sequence_rank, self.sequence_parallel, group, exchange)

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().device_name(self.local_rank))

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def gather_objects(self, value: object) -> list:
        """Every rank's value in rank order."""
        if self.world_size == 1:
            return [value]
        everyone: list = [None] * self.world_size
        torch.distributed.all_gather_object(everyone, value)
        return everyone

    def gather_int64(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Every rank's (n,) int64 values on the CPU, in rank order: (W, n). All ranks bring the same n."""
        values = values.to(device)
        if self.world_size == 1:
            return values.cpu()[None]
        everyone = [torch.empty_like(values) for _ in range(self.world_size)]
        torch.distributed.all_gather(everyone, values)
        return torch.stack(everyone).cpu()

    def gather_float64(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Every rank's () float64 value on the CPU, in rank order: (W,)."""
        # The float's bits travel as an integer, and come back unchanged on devices without float64.
        return self.gather_int64(value.reshape(1).view(torch.int64), device).view(torch.float64)[:, 0]

    def sum_int64(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The sums of all ranks' int64 values on the CPU, of their shape. All ranks bring the same shape."""
        if self.world_size == 1:
            return values
        summed = values.to(device, copy=True)
        torch.distributed.all_reduce(summed)
        return summed.cpu()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's values on their device, in rank order: (W, …). All ranks bring the same shape and type."""
        if self.world_size == 1:
            return values[None]
        # As bytes, which every backend takes.
        sent = values.contiguous().view(torch.uint8).flatten()
        everyone = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(everyone, sent)
        return torch.stack(everyone).view(values.dtype).view(self.world_size, *values.shape)

    def swap(
        self, values: torch.Tensor, counts: list[int], expected: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Hands the first ``counts[0]`` rows of values to rank 0, the next to rank 1 …; returns what all hand to this.

        In rank order, with how many each has handed over, which is not asked for where it is ``expected``.
        """
        if expected is None:
            numbers = torch.empty(self.world_size, dtype=torch.int64, device=values.device)
            torch.distributed.all_to_all_single(numbers, torch.tensor(counts, device=values.device))
            expected = numbers.tolist()
        received = values.new_empty(sum(expected), *values.shape[1:])
        torch.distributed.all_to_all_single(received, values.contiguous(), expected, counts)
        return received, expected

    def first_works(self, work: Callable[[], Result]) -> Result:
        """What the first rank's ``work`` returns, on every rank.

        It works in a thread, and all ranks meet in a small collective again and again until it is done: a rank that
        dies meanwhile is noticed at once, and none waits longer in any one collective than between two meetings.

        Raises:
            AgreedError: on every rank, for a mistake of the user that the work met.
        """
        return first_works(work if self.is_first else None, self.gather_objects)

    def all_work(self, work: Callable[[], Result]) -> Result:
        """What this rank's ``work`` returns, once that of every rank has gone well.

        Raises:
            AgreedError: on every rank, for a mistake of the user that the work of any met; see ``agree``.
        """
        try:
            result = work()
        except (OSError, ValueError) as error:
            if (wrong := mistake(error)) is None:
                raise
            self.agree(wrong)
            raise
        self.agree(None)
        return result

    def agree(self, wrong: str | None) -> None:
        """Lets all ranks know what any has found wrong; None: nothing.

        Raises:
            AgreedError: on every rank, with what the first of those found that found something.
        """
        for found in self.gather_objects(wrong):
            if found is not None:
                raise AgreedError(found)


@dataclass(frozen=True, slots=True)
class FakeRanks(Ranks):
    """The first of W processes, of which there is no other: what a run would do there is tried by one process.

    Collectives go through torch's fake process group, which sends nothing: what ranks gather is this one's value W
    times, and sums are this one's. Weights that others hold (ZeRO 3) and rows that they have of a context are none.
    """

    def division(self, exchange: Literal["heads", "keys", "auto"]) -> Division:
        """The place of the first of those that share a context."""
        return _FakeDivision(0, self.sequence_parallel, None, exchange)

    def swap(
        self, values: torch.Tensor, counts: list[int], expected: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """As if this one's own were what all hand to it."""
        return values, counts if expected is None else expected


class _FakeDivision(Division):
    """Exchanges that bring what this process has for itself, and zeros in place of all else."""

    def swap(
        self, values: torch.Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> torch.Tensor:
        sent, received = sent or [1] * self.size, received or [1] * self.size
        out = values.new_zeros(sum(received), *values.shape[1:])
        before = sum(received[: self.rank])
        first = sum(sent[: self.rank])
        out[before : before + received[self.rank]] = values[first : first + sent[self.rank]]
        return out


@contextmanager
def process_group(
    ranks: Ranks, timeout_seconds: float, run: Path | None = None, orphaned: Callable[[], bool] | None = None
) -> Iterator[Watchdog]:
    """Joins the processes for as long as the block runs; every collective in it ends by the time-out.

    Where other processes do not answer, the block does not end: the process does, by ``exit_codes.HUNG``, with the
    stacks of the processes of this host in the run's folder. Leaving without destroying the group can abort a process
    that has done its work; destroying it where others are gone can wait for ever. ``orphaned``: see ``Watchdog``.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().device_name() == "cpu"
    # NCCL ends by aborting the process, so the watchdog is to be first.
    timeout = timedelta(seconds=timeout_seconds + (0 if on_cpu else _AFTER_THE_WATCHDOG_SECONDS))
    if not on_cpu:
        get_accelerator().set_device(ranks.local_rank)
    fake = isinstance(ranks, FakeRanks)
    if ranks.world_size > 1 and not fake:
        choose_interface()
    alone = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # deepspeed.initialize asks for it
    watchdog = Watchdog(run, ranks.rank, ranks.world_size, timeout_seconds, orphaned)
    try:
        with _default_timeout(timeout), watchdog.reporting():
            if fake:
                from torch.testing._internal.distributed.fake_pg import FakeStore  # which makes that backend known

                torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.world_size)
            elif ranks.world_size == 1 and "MASTER_PORT" not in os.environ:
                # A store of its own, not a port: two single runs on one machine cannot meet.
                store = torch.distributed.HashStore()
                backend = get_accelerator().communication_backend_name()
                torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
            with said_where_slow("waiting for the other processes"):
                deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
                watchdog.meet(ranks.gather_objects(watchdog.address))
            watchdog.at("starting")
            yield watchdog
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        watchdog.close()
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


@contextmanager
def run_lock(run: Path, ranks: Ranks) -> Iterator[None]:
    """Holds the run folder for the block, as one run at a time writes there. All ranks must call; the first one locks.

    The lock belongs to its process: forked ones do not share it, and it is free as soon as that process has ended,
    however that happens.

    Raises:
        ConfigError: on every rank, where another process holds it.
    """
    with ExitStack() as held:
        problem = None
        if ranks.is_first:
            run.mkdir(parents=True, exist_ok=True)
            file, problem = _lock(run)
            if file is not None:
                held.enter_context(file).truncate(0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        problem = ranks.gather_objects(problem)[0]
        if problem is not None:
            raise ConfigError(problem)
        try:
            yield
        except BaseException:
            if ranks.is_first:
                with suppress(OSError):  # nothing but the lock is there: the run failed before it wrote anything
                    if [path.name for path in run.iterdir()] == [file_names.LOCK]:
                        (run / file_names.LOCK).unlink()
                        run.rmdir()
            raise


def check_unlocked(run: Path) -> None:
    """Whether no other run writes to a folder, as far as can be known before one starts.

    Raises:
        ConfigError: another run does.
    """
    if not os.path.lexists(run / file_names.LOCK):
        return
    file, problem = _lock(run)
    if file is not None:
        file.close()
    if problem is not None:
        raise ConfigError(problem)


def _lock(run: Path) -> tuple[BinaryIO | None, Problem | None]:
    """Opens the lock file and takes the lock; or returns what is wrong, such as another process that holds it."""
    path = run / file_names.LOCK
    try:
        file = open_plain(path, "a+b", follow_links=False)
    except OSError as error:
        return None, Problem("train.output", f"{path}: {error.strerror}; remove it", str(run))
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            with file:
                file.seek(0)
                holder = file.read(_MOST_LOCK_BYTES).decode(errors="replace").strip() or "another process"
            rule = f"another run writes there ({holder}); wait for it, or name another folder"
            return None, Problem("train.output", rule, str(run))
        say(f"{run}: no locks on this file system; see to it that no second run writes there")
    return file, None


def leave(code: int) -> NoReturn:
    """Ends the process as Python does, but without the destructors of C++ libraries.

    A communication thread that is still ending can meet them there. Now and then that aborts a rank that has done all
    its work, with the process group destroyed and every rank past its last collective.
    """
    for child in multiprocessing.active_children():  # loader workers, which ignore softer signals
        child.kill()
    atexit._run_exitfuncs()
    with suppress(OSError):  # a log on a disk that is full
        settle_output()
    os._exit(code)
