"""Many small runs from one process: see fork_server.py. Linux and a C compiler are needed for the traced ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.runs import ROOT, free_port, plain_environment
from tests.hostile.generators import faults


class ForkServer:
    """A process that forks the ranks of runs, one run after the other; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/harness/processes/fork_server.py")],
            env=plain_environment() | {"LD_PRELOAD": str(faults.library(folder))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd="/",
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def run(
        self,
        arguments: list[str],
        world_size: int,
        traced: dict[str, Any] | None = None,
        failing: dict[str, Any] | None = None,
        chunk_rows: int | None = None,
        fault: dict[str, Any] | None = None,
        spoil: str | None = None,
    ) -> list[int]:
        """The exit codes of a run's ranks."""
        case = {"arguments": arguments, "world_size": world_size, "port": free_port(), "folder": str(self._folder)}
        case |= {"traced": traced, "failing": failing, "chunk_rows": chunk_rows, "fault": fault, "spoil": spoil}
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "server.log").read_text()
        return json.loads(answer)

    def stderr(self, rank: int = 0) -> str:
        """What a rank of the last run told."""
        return (self._folder / f"stderr-{rank}").read_text()

    def operations(self) -> list[str]:
        """What the traced rank of the last run did to files, the one that killed it included."""
        return [str(each) for each in self.log()]

    def log(self) -> list[faults.Operation]:
        """The same with all that a record has."""
        return faults.read_log(self._folder / "operations")
