"""The processes of a run: their identities, their collectives, their process group, and the lock of their run folder.

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
from torch.distributed import ProcessGroup

from longstride.data_pipelines.plain_files import open_plain
from longstride.kernels import ConfigError, Problem
from longstride.launcher.output import AgreedError, file_names, mistake, print_if_slow, say, settle_output
from longstride.launcher.ranks.hangs import Watchdog
from longstride.launcher.ranks.rank_environment import choose_interface
from longstride.launcher.ranks.waiting import Result, run_on_first
from longstride.sparse_model import Division

_NCCL_GRACE_SECONDS = 15.0
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_MOST_LOCK_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among W, and their collectives.

    All ranks must call a collective. Before there is a process group, W must be 1.
    """

    rank: int = 0
    local_rank: int = 0  # on this host
    world_size: int = 1
    sequence_parallel: int = 1  # ranks that share each context: neighbours

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Ranks:
        """Read the place from a launcher's variables; without any, there is one process. ConfigError for wrong ones."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        variables = {name: environment[name] for name in names if name in environment}
        if not variables:
            return cls()
        missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            rule = f"given without {', '.join(missing)}; use a launcher"
            raise ConfigError(f"environment: {', '.join(variables)} {rule}")
        try:
            rank, local_rank, world_size = (int(environment[name]) for name in names)
        except ValueError:
            raise ConfigError(f"environment: {variables}: must be integers") from None
        if not 0 <= rank < world_size:
            raise ConfigError(f"environment: RANK={rank}: must be from 0 to {world_size - 1}")
        return cls(rank, local_rank, world_size)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The place of this rank's group among the groups with contexts of their own."""
        return self.rank // self.sequence_parallel

    @property
    def data_world_size(self) -> int:
        """The number of groups with contexts of their own."""
        return self.world_size // self.sequence_parallel

    @property
    def sequence_rank(self) -> int:
        """The place of this rank in its group, and of its positions in a context."""
        return self.rank % self.sequence_parallel

    def division(self, exchange: Literal["heads", "keys", "auto"]) -> Division:
        """Return how contexts are divided over the ranks that share them. All ranks must call."""
        if self.sequence_parallel == 1:
            return Division()
        group, _ = torch.distributed.new_subgroups(self.sequence_parallel)
        return Division(self.sequence_rank, self.sequence_parallel, group, exchange)

    def expert_groups(self, size: int) -> tuple[Division, ProcessGroup | None]:
        """Return the place among the P = ``size`` neighbours that divide experts, and the W / P ranks with the same.

        All ranks must call.
        """
        if size == 1:
            return Division(), None
        group, _ = torch.distributed.new_subgroups(size)
        places = [list(range(place, self.world_size, size)) for place in range(size)]
        replicas, _ = torch.distributed.new_subgroups_by_enumeration(places)
        return Division(self.rank % size, size, group), replicas

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().device_name(self.local_rank))

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def gather_objects(self, value: object) -> list:
        """Return every rank's value in rank order."""
        if self.world_size == 1:
            return [value]
        gathered: list = [None] * self.world_size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def gather_int64(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return every rank's (n,) int64 values on the CPU, in rank order: (W, n). All ranks have the same n."""
        return self.gather(values.to(device)).cpu()

    def sum_int64(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the sums of all ranks' int64 values on the CPU. All ranks have the same shape."""
        if self.world_size == 1:
            return values
        summed = values.to(device, copy=True)
        torch.distributed.all_reduce(summed)
        return summed.cpu()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return every rank's values on their device, in rank order: (W, …). All have the same shape and dtype."""
        if self.world_size == 1:
            return values[None]
        # As bytes, which every backend supports.
        sent = values.contiguous().view(torch.uint8).flatten()
        gathered = [torch.empty_like(sent) for _ in range(self.world_size)]
        torch.distributed.all_gather(gathered, sent)
        return torch.stack(gathered).view(values.dtype).view(self.world_size, *values.shape)

    def swap(
        self, values: torch.Tensor, counts: list[int], expected: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Send the first ``counts[0]`` rows to rank 0, the next to rank 1 …; return the received rows and their counts.

        Both are in rank order. The counts are not exchanged if they are ``expected``.
        """
        if expected is None:
            numbers = torch.empty(self.world_size, dtype=torch.int64, device=values.device)
            torch.distributed.all_to_all_single(numbers, torch.tensor(counts, device=values.device))
            expected = numbers.tolist()
        received = values.new_empty(sum(expected), *values.shape[1:])
        torch.distributed.all_to_all_single(received, values.contiguous(), expected, counts)
        return received, expected

    def run_on_first(self, work: Callable[[], Result]) -> Result:
        """Return what the first rank's ``work`` returns, on every rank; AgreedError for a mistake of the user.

        It works in a thread, and all ranks meet in a small collective again and again until it is done. A rank that
        dies is thus noticed at once, and no collective waits for long.
        """
        return run_on_first(work if self.is_first else None, self.gather_objects)

    def run_on_all(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work`` once all ranks' succeeded; AgreedError on all if any meets a user's mistake."""
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
        """Tell all ranks what is wrong on this one (None: nothing); AgreedError on every rank if any has a problem."""
        for problem in self.gather_objects(wrong):
            if problem is not None:
                raise AgreedError(problem)


@dataclass(frozen=True, slots=True)
class FakeRanks(Ranks):
    """The first of W processes without the others, to try in one process what a run would do there.

    Collectives use torch's fake process group, which sends nothing. Ranks gather this process's value W times, and sums
    are its own. Weights of other ranks (ZeRO 3) and their rows of a context are missing.
    """

    def division(self, exchange: Literal["heads", "keys", "auto"]) -> Division:
        """Return the first place among the ranks that share a context."""
        return LoneDivision(0, self.sequence_parallel, None, exchange)

    def expert_groups(self, size: int) -> tuple[Division, ProcessGroup | None]:
        """Return the first place among the ranks that divide experts."""
        return LoneDivision(0, size), None

    def swap(
        self, values: torch.Tensor, counts: list[int], expected: list[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Return this rank's values as if the others had sent them."""
        return values, counts if expected is None else expected


class LoneDivision(Division):
    """A division whose other processes are missing: exchanges return this one's values, and zeros for the others."""

    def swap(
        self, values: torch.Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> torch.Tensor:
        """Return as many rows as would be received."""
        sent, received = sent or [1] * self.size, received or [1] * self.size
        out = values.new_zeros(sum(received), *values.shape[1:])
        before = sum(received[: self.rank])
        first = sum(sent[: self.rank])
        out[before : before + received[self.rank]] = values[first : first + sent[self.rank]]
        return out


@contextmanager
def process_group(
    ranks: Ranks, timeout_seconds: float, run: Path | None = None, orphaned: Callable[[], object] | None = None
) -> Iterator[Watchdog]:
    """Join the processes for the block; every collective in it has the time-out.

    If other processes do not answer, this process exits with ``exit_codes.HUNG``, and the stacks of this host's
    processes are in the run's folder. Otherwise the group is destroyed at the end: without that, a finished process may
    abort. If others are gone, destroying it could wait forever. ``orphaned``: see ``Watchdog``.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().device_name() == "cpu"
    # NCCL aborts the process, so the watchdog must act first.
    timeout = timedelta(seconds=timeout_seconds + (0 if on_cpu else _NCCL_GRACE_SECONDS))
    if not on_cpu:
        get_accelerator().set_device(ranks.local_rank)
    fake = isinstance(ranks, FakeRanks)
    if ranks.world_size > 1 and not fake:
        choose_interface()
    alone = "LOCAL_RANK" not in os.environ
    os.environ.setdefault("LOCAL_RANK", str(ranks.local_rank))  # deepspeed.initialize reads it
    watchdog = Watchdog(run, ranks.rank, ranks.world_size, timeout_seconds, orphaned)
    try:
        with _default_timeout(timeout), watchdog.reporting():
            if fake:
                from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

                torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.world_size)
            elif ranks.world_size == 1 and "MASTER_PORT" not in os.environ:
                # A store instead of a port, so that two single runs on one machine cannot meet.
                store = torch.distributed.HashStore()
                backend = get_accelerator().communication_backend_name()
                torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
            with print_if_slow("waiting for the other processes"):
                deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
                watchdog.meet(ranks.gather_objects)
            watchdog.at("starting")
            yield watchdog
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        watchdog.close()
        if alone:  # alone it would look like an incomplete environment of a launcher
            del os.environ["LOCAL_RANK"]


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """Give this time-out to groups that are made without one, and to barriers that name missing ranks.

    DeepSpeed clones the world group by ``new_group(ranks)`` for its collectives, so the world group's time-out would
    never apply. Torch's own group makers, such as device meshes, read the same defaults.
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
    """Lock the run folder for the block, because only one run may write there. All ranks must call; the first locks.

    Forked processes do not share the lock. It is released when the process ends for any reason. ConfigError on every
    rank means that another process holds it.
    """
    with ExitStack() as stack:
        problem = None
        if ranks.is_first:
            run.mkdir(parents=True, exist_ok=True)
            file, problem = _lock(run)
            if file is not None:
                stack.enter_context(file).truncate(0)
                since = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
        problem = ranks.gather_objects(problem)[0]
        if problem is not None:
            raise ConfigError(problem)
        try:
            yield
        except BaseException:
            if ranks.is_first:
                with suppress(OSError):  # remove the folder if the run failed before it wrote anything
                    if [path.name for path in run.iterdir()] == [file_names.LOCK]:
                        (run / file_names.LOCK).unlink()
                        run.rmdir()
            raise


def check_unlocked(run: Path) -> None:
    """Raise ConfigError if another run writes to a folder, as far as this can be known before a run starts."""
    if not os.path.lexists(run / file_names.LOCK):
        return
    file, problem = _lock(run)
    if file is not None:
        file.close()
    if problem is not None:
        raise ConfigError(problem)


def _lock(run: Path) -> tuple[BinaryIO | None, Problem | None]:
    """Open and lock the lock file, or return the problem, such as another process that holds it."""
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
        say(f"{run}: this file system does not support locks; make sure that no second run writes there")
    return file, None


def leave(code: int) -> NoReturn:
    """End the process like Python, but without the destructors of C++ libraries.

    A communication thread that is still ending can meet them there. Occasionally that aborts a rank which has done all
    its work and has destroyed its process group.
    """
    for child in multiprocessing.active_children():  # loader workers, which ignore other signals
        child.kill()
    atexit._run_exitfuncs()
    with suppress(OSError):  # the log's disk may be full
        settle_output()
    os._exit(code)
