"""The processes of one build: the ranks of an MPI job, or this process alone.

mpi4py is only imported if an MPI launcher started this process. Importing it starts MPI, which may be missing.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from longstride.data_pipelines.errors import DataError, as_data_error

# Variables with the number of processes (Open MPI; MPICH, Intel MPI; MVAPICH; a step of Slurm, which may have started
# another launcher) ...
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMIX_RANK", "PMI_RANK")  # ... or only the rank
_FIRST = 0

T = TypeVar("T")


class Crew:
    """Processes that build together. An error on the first rank, or on any rank in a round, is raised on all."""

    def __init__(self, communicator: Any = None) -> None:
        """Join an mpi4py communicator; None for this process alone."""
        self._communicator = communicator
        self.rank: int = 0 if communicator is None else communicator.Get_rank()
        self.size: int = 1 if communicator is None else communicator.Get_size()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that plans, reports and finishes."""
        return self.rank == _FIRST

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Call ``function`` on the first rank, and return its result there and None on the others.

        Raises DataError on every rank if ``function`` raises DataError or OSError on the first.
        """
        result, problem = None, None
        if self.is_first:
            result, problem = _attempt(function)
        problem = self.broadcast(problem)
        if problem is not None:
            raise DataError(problem)
        return result

    def on_each(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on each rank, and return the results in order of ranks.

        Raises DataError on every rank if ``function`` raises DataError or OSError on any: that of the lowest rank.
        """
        outcomes = [_attempt(function)]
        if self._communicator is not None:
            outcomes = self._communicator.allgather(outcomes[0])
        for _, problem in outcomes:
            if problem is not None:
                raise DataError(problem)
        return [result for result, _ in outcomes]  # type: ignore[misc]  # no problem, so there is a result

    def broadcast(self, content: T) -> T:
        """Return the first rank's content on every rank."""
        return content if self._communicator is None else self._communicator.bcast(content, root=_FIRST)

    def deal(self, tasks: Iterator[T]) -> tuple[bool, T | None]:
        """Distribute the first rank's next tasks. Returns whether there were any, and this rank's task or None.

        Tasks are sent one by one, so no rank needs the full plan.
        """
        items: list[tuple[bool, T | None]] = []
        if self.is_first:
            batch = list(islice(tasks, self.size))
            items = [(bool(batch), task) for task in (*batch, *[None] * (self.size - len(batch)))]
        return items[0] if self._communicator is None else self._communicator.scatter(items, root=_FIRST)

    def meet(self) -> None:
        if self._communicator is not None:
            self._communicator.barrier()

    @contextmanager
    def bound_together(self) -> Iterator[None]:
        """Abort the job if a rank fails in the block while others wait for it.

        A DataError does not abort, as it is raised on all ranks or on none.
        """
        try:
            yield
        except DataError:
            raise
        except BaseException:
            if self.size > 1:
                traceback.print_exc()
                self._communicator.Abort(1)
            raise


def join_crew(environment: Mapping[str, str] = os.environ) -> Crew:
    """Return the crew of all processes that an MPI launcher started, or of this process without a launcher.

    Raises DataError if a launcher started several processes that MPI does not connect: each would build everything.
    """
    name = next((name for name in _SIZES if environment.get(name, "").isdecimal()), None)
    size = None if name is None else int(environment[name])
    rank = next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdecimal()), None)
    if size == 1 or (size is None and rank is None):
        return Crew()
    who = f"rank {rank} of an MPI launcher" if size is None else f"{name}={size}"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI library
        cause = str(error).splitlines()[0]
        raise DataError(
            f"{who}: started as one of several processes, but mpi4py cannot be imported ({cause}); "
            "install mpi4py and an MPI library, or start one process without a launcher"
        ) from error
    if MPI.COMM_WORLD.Get_size() == 1 and (size is not None or rank):
        library = MPI.Get_library_version().split(",")[0].strip()
        raise DataError(
            f"{who}: started as one of several processes, but mpi4py sees only one, because it uses {library}; "
            "start with the mpirun of that library"
        )
    return Crew(MPI.COMM_WORLD)


def _attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of ``function``, or its error in one line."""
    try:
        with as_data_error(what=None):
            return function(), None
    except DataError as error:
        return None, str(error)
