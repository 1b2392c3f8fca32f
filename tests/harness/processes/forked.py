"""Many small runs from one process (fork_server.py). Traced runs need Linux and a C compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.processes.asked import Asked
from tests.harness.runs import free_port


class ForkServer(Asked):
    """A process that forks the ranks of runs, one run after the other; a context manager."""

    def __init__(self, folder: Path) -> None:
        super().__init__("tests/harness/processes/fork_server.py", folder, cwd=Path("/"))

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
        """Return the exit codes of a run's ranks."""
        case = {"arguments": arguments, "world_size": world_size, "port": free_port(), "folder": str(self._folder)}
        case |= {"traced": traced, "failing": failing, "chunk_rows": chunk_rows, "fault": fault, "spoil": spoil}
        return self.ask(case)

    def stderr(self, rank: int = 0) -> str:
        """Return the standard error of a rank of the last run."""
        return (self._folder / f"stderr-{rank}").read_text()

    def operations(self) -> list[str]:
        """Return what the traced rank of the last run did to files, including the operation that killed it."""
        return [str(operation) for operation in self.log()]
