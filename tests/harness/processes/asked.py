"""A process that has everything imported, reads lines of JSON, and forks other processes to run them."""

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tests.harness.runs import ROOT, plain_environment
from tests.hostile.generators import faults


class Asked:
    """A server process of the same interpreter; a context manager, which kills it at the end."""

    def __init__(self, script: str, folder: Path, *arguments: object, cwd: Path, **environment: object) -> None:
        """Start it.

        Args:
            script: its path in the checkout.
            folder: for logs of the processes.
            arguments: of the script.
            cwd: its working directory.
            environment: variables besides those of the tests.
        """
        self._folder = folder
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / script), *map(str, arguments)],
            env={
                **plain_environment(),
                "LD_PRELOAD": str(faults.library(folder)),
                **{name: str(value) for name, value in environment.items()},
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=cwd,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def ask(self, case: dict[str, Any]) -> Any:
        """Send one line and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self._folder / "server.log").read_text()
        return json.loads(answer)

    def log(self) -> list[faults.Operation]:
        """Return what the last faulty process did to files below the folder of its fault."""
        return faults.read_log(self._folder / "operations")
