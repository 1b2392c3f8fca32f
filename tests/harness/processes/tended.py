"""Runs that tests stop or kill: a launcher starts them, they write marks, and a token identifies their processes."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.harness.runs import ROOT, free_port, hear_hangups, plain_environment

_WORKER = ROOT / "tests/harness/processes/launched_worker.py"
_PATIENCE_SECONDS = 240.0


def longstride(arguments: list[str], processes: int = 2) -> list[str]:
    """Return the command of `longstride train` on ``processes`` processes."""
    return [
        sys.executable,
        str(ROOT / "tests/harness/processes/supervised.py"),
        "train",
        "--processes",
        str(processes),
        *arguments,
    ]


def deepspeed(arguments: list[str]) -> list[str]:
    """Return the command of `deepspeed launcher/train.py` on two processes."""
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [sys.executable, program, "--num_gpus", "2", f"--master_port={free_port()}", str(_WORKER), *arguments]


class Tended:
    """A run under a launcher, in a separate session; a token in the environment marks its processes."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        extra: dict[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._token = secrets.token_hex(8)
        self._marks = folder / "marks"
        self._output = folder / f"output-{secrets.token_hex(4)}"
        variables = {"TENDED": self._token, "MARKS": str(self._marks), "MARK_SECONDS": "0.05", "DS_ACCELERATOR": "cpu"}
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=plain_environment() | variables | extra,
                cwd="/",
                stdout=output if stdout is None else stdout,
                stderr=output if stderr is None else stderr,
                start_new_session=True,
                preexec_fn=hear_hangups,
            )

    @property
    def output(self) -> str:
        """The output of the run so far."""
        return self._output.read_text()

    def processes(self) -> dict[int, str]:
        """Return the command line of every living process of the run, by its pid."""
        return {
            process.pid: " ".join(words)
            for process in psutil.process_iter(["environ", "cmdline"])
            if (process.info["environ"] or {}).get("TENDED") == self._token
            and (words := process.info["cmdline"])  # none of a process that has ended and is not reaped yet
        }

    def named(self, *words: str) -> list[int]:
        """Return the processes with one of the words in their command line, before the script of the ranks."""
        lines = {pid: line.partition(str(_WORKER))[0] for pid, line in self.processes().items()}
        return [pid for pid, line in lines.items() if any(word in line for word in words)]

    def ranks(self) -> list[int]:
        """Return the ranks, without their loader workers."""
        lines = self.processes().items()
        workers = {pid for pid, line in lines if f"-u {_WORKER}" in line and "world_info" not in line}
        parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
        return sorted(pid for pid in workers if parents.get(pid) not in workers)

    def marks(self) -> list[str]:
        """Return what the run has begun so far: begin, steps, evaluations, saves."""
        return self._marks.read_text().splitlines() if self._marks.exists() else []

    def wait_for(self, number: int) -> bool:
        """Wait until there are ``number`` marks; return whether the run still lives."""
        return self._until(lambda: len(self.marks()) >= number or self.process.poll() is not None) and (
            self.process.poll() is None
        )

    def wait_for_new(self, word: str) -> bool:
        """Wait for another mark of this kind; return whether the run still lives."""
        before = self.marks().count(word)
        self._until(lambda: self.marks().count(word) > before or self.process.poll() is not None)
        return self.process.poll() is None

    def end(self) -> int:
        """Wait for the end of the run; return its exit code."""
        return self.process.wait(_PATIENCE_SECONDS)

    def all_ended(self, seconds: float) -> bool:
        """Whether all processes of the run end within ``seconds``."""
        return self._until(lambda: not self.processes(), seconds)

    def _until(self, holds: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if holds():
                return True
            time.sleep(0.01)
        return False


@contextmanager
def tended(
    command: list[str],
    folder: Path,
    extra: dict[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[Tended]:
    """Start a run; none of its processes outlives the block, whatever the test does.

    ``stdout``, ``stderr``: files that it writes to; None: one that ``Tended.output`` reads.
    """
    run = Tended(command, folder, extra or {}, stdout, stderr)
    try:
        yield run
    finally:
        run.process.kill()
        while processes := run.processes():
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        run.process.wait()
