"""Runs that tests stop or kill: started by a launcher, followed by their marks, and counted by a token."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.runs import ROOT, free_port, hear_hangups, plain_environment

_WORKER = ROOT / "tests/harness/processes/launched_worker.py"
_PATIENCE_SECONDS = 240.0


def longstride(arguments: list[str]) -> list[str]:
    """`longstride train` on two processes."""
    return [
        sys.executable,
        str(ROOT / "tests/harness/processes/supervised.py"),
        "train",
        "--processes",
        "2",
        *arguments,
    ]


def deepspeed(arguments: list[str]) -> list[str]:
    """`deepspeed launcher/train.py` on two processes."""
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [sys.executable, program, "--num_gpus", "2", f"--master_port={free_port()}", str(_WORKER), *arguments]


class Tended:
    """A run under a launcher, in a session of its own; its processes are known by a token in their environment."""

    def __init__(self, command: list[str], folder: Path, extra: dict[str, str]) -> None:
        self._token = f"TENDED={secrets.token_hex(8)}"
        self._marks = folder / "marks"
        self._output = folder / f"output-{secrets.token_hex(4)}"
        name, _, value = self._token.partition("=")
        told = {name: value, "MARKS": str(self._marks), "MARK_SECONDS": "0.05", "DS_ACCELERATOR": "cpu"} | extra
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=plain_environment() | told,
                cwd="/",
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=hear_hangups,
            )

    @property
    def output(self) -> str:
        """What the run has said."""
        return self._output.read_text()

    def processes(self) -> dict[int, str]:
        """The command line of every process of the run that lives, by its number."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                if self._token.encode() in environment:
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if line:  # none: it has ended, and waits for its parent
                        found[int(folder.name)] = line
            except OSError:
                continue
        return found

    def named(self, *words: str) -> list[int]:
        """The processes whose command line holds one of the words before the script of the ranks."""
        lines = {pid: line.partition(str(_WORKER))[0] for pid, line in self.processes().items()}
        return [pid for pid, line in lines.items() if any(word in line for word in words)]

    def ranks(self) -> list[int]:
        """The ranks, without their loader workers."""
        lines = {
            pid: line for pid, line in self.processes().items() if f"-u {_WORKER}" in line and "world_info" not in line
        }
        return [pid for pid in sorted(lines) if _parent(pid) not in lines]

    def marks(self) -> list[str]:
        """What the run has begun so far."""
        return self._marks.read_text().splitlines() if self._marks.exists() else []

    def wait_for(self, number: int) -> bool:
        """Waits until so many marks are there; whether they came before the run ended."""
        return self._until(lambda: len(self.marks()) >= number or self.process.poll() is not None) and (
            self.process.poll() is None
        )

    def wait_for_new(self, word: str) -> bool:
        """Waits until there is one more mark of a kind than now; whether it came before the run ended."""
        before = self.marks().count(word)
        self._until(lambda: self.marks().count(word) > before or self.process.poll() is not None)
        return self.process.poll() is None

    def end(self) -> int:
        """The exit code, once there is one."""
        return self.process.wait(_PATIENCE_SECONDS)

    def all_ended(self, seconds: float) -> bool:
        """Whether no process of the run is left after so many seconds at most."""
        return self._until(lambda: not self.processes(), seconds)

    def _until(self, holds: object, seconds: float = _PATIENCE_SECONDS) -> bool:
        assert callable(holds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if holds():
                return True
            time.sleep(0.01)
        return False


@contextmanager
def tended(command: list[str], folder: Path, extra: dict[str, str] | None = None) -> Iterator[Tended]:
    """A run, of which nothing is left behind whatever the test does."""
    run = Tended(command, folder, extra or {})
    try:
        yield run
    finally:
        run.process.kill()
        while left := run.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        run.process.wait()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
