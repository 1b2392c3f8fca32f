"""Many small runs from one process, with faults of files, which need Linux and a C compiler."""

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from typing_extensions import Self

from tests.harness.runs import Rank, free_port, plain_environment, rank_environment, start_rank_server
from tests.hostile.generators import faults

RUN_SECONDS = 120.0
ALONE_SECONDS = 10.0  # that ranks may go on after one has died, until a launcher would end them


class ForkServer:
    """A process that forks the ranks of runs, one run after the other; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = plain_environment() | {"LD_PRELOAD": str(faults.library(folder))}
        self._connection, self._server = start_rank_server(environment)
        self._outputs: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._server.wait(60.0)

    def run(
        self,
        arguments: list[str],
        world_size: int,
        failing: dict[str, Any] | None = None,
        fault: dict[str, Any] | None = None,
        spoil: str | None = None,
    ) -> list[int]:
        """Return the exit codes of a run's ranks: negative for a signal. The options are changes of worker.py.

        Args:
            arguments: of launcher/train.py.
            world_size: the number of ranks.
            failing: {rank, steps, bytes, folder, stop}: in the saves of these steps the rank can write no longer file,
                and None for `bytes` removes the folder. In step `stop` it gets SIGTERM.
            fault: {rank, folder, kind, number}: of tests/hostile/generators/faults.py, from the start on; rank None is
                all.
            spoil: as in worker.py.
        """
        log = self._folder / "operations"
        log.unlink(missing_ok=True)
        changes = {"FAILING": failing and json.dumps(failing), "SPOIL": spoil}
        changes["FAULT"] = fault and json.dumps(fault | {"log": str(log)})
        shared = plain_environment() | {name: str(change) for name, change in changes.items() if change is not None}
        port = free_port()
        places = [rank_environment(rank, world_size, port) for rank in range(world_size)]
        ranks = [Rank(arguments, shared | place, server=self._connection) for place in places]
        end, running = time.monotonic() + RUN_SECONDS, list(ranks)
        while running and time.monotonic() < end:
            for rank in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if rank.wait(0.01):
                        end = min(end, time.monotonic() + ALONE_SECONDS)
            running = [rank for rank in running if rank.returncode is None]
        self._outputs = [rank.end() for rank in ranks]
        return [rank.wait(0.0) for rank in ranks]

    def stderr(self, rank: int = 0) -> str:
        """Return the standard error of a rank of the last run."""
        return self._outputs[rank][1]

    def log(self) -> list[faults.Operation]:
        """Return what the last faulty run did to files below the folder of its fault."""
        return faults.read_log(self._folder / "operations")
