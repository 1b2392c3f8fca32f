"""Many small runs from one process: see fork_server.py. Linux and a C compiler are needed for the traced ones."""

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
        """The exit codes of a run's ranks."""
        case = {"arguments": arguments, "world_size": world_size, "port": free_port(), "folder": str(self._folder)}
        case |= {"traced": traced, "failing": failing, "chunk_rows": chunk_rows, "fault": fault, "spoil": spoil}
        return self.ask(case)

    def stderr(self, rank: int = 0) -> str:
        """What a rank of the last run told."""
        return (self._folder / f"stderr-{rank}").read_text()

    def operations(self) -> list[str]:
        """What the traced rank of the last run did to files, the one that killed it included."""
        return [str(each) for each in self.log()]
