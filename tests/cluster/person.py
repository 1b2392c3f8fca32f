"""A user at the first of two hosts, who starts runs there."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Host, wait_until
from tests.harness.runs import ROOT, metrics

LONGSTRIDE = [sys.executable, "-m", "longstride.launcher.cli"]
SECONDS = 300  # of a start and a few steps, on a machine that is busy
# More steps than any test waits for, and no evaluation in between.
ENDLESS = ["train.steps=100000", "train.checkpoint_every=0", "train.evaluate_every=0"]
Lines = Callable[..., list[dict]]  # of the fixture on_one_host


@dataclass
class Person:
    """A user logged in on the first host, in a folder that all hosts share and that holds run.json.

    The virtual environment is active; a rank has one thread. Commands write to ``log``, the run to ``run``.
    """

    hosts: list[Host]
    folder: Path

    def __post_init__(self) -> None:
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/root"),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.config, self.run, self.log = self.folder / "run.json", self.folder / "run", self.folder / "log"

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a command without waiting for it."""
        return self.hosts[0].start(command, self.environment, self.folder, self.log)

    def ends(self, command: list[str]) -> int:
        """Run a command to its end, and return its exit code."""
        return self.hosts[0].run(command, self.environment, self.folder, self.log, SECONDS)

    def said(self) -> str:
        """Read the log."""
        return self.log.read_text()

    def lines(self) -> list[dict]:
        """Read the run's metrics, without fields that differ between equal runs."""
        return metrics(self.run)

    def wait_for_steps(self, count: int, log: Path | None = None) -> None:
        """Wait until the run has written so many lines of metrics; a failure shows the log."""
        log = log or self.log
        steps = self.run / "metrics.jsonl"
        wait_until(lambda: steps.read_text().count("\n") >= count, SECONDS, lambda: log.exists() and log.read_text())

    def wait_for_text(self, text: str) -> None:
        """Wait until the log has a text."""
        wait_until(lambda: text in self.said(), SECONDS, lambda: self.log.exists() and self.said())

    def hostfile(self, slots: int) -> Path:
        """Write a file that names both hosts, with so many slots each."""
        path = self.folder / "hostfile"
        path.write_text(f"# two hosts\nnode1 slots={slots}\nnode2 slots={slots}\n")
        return path

    def train(self, slots: int, *words: str) -> list[str]:
        """Return the command that trains on both hosts, with so many processes on each."""
        hostfile = str(self.hostfile(slots))
        return [*LONGSTRIDE, "train", "--config", str(self.config), "--hostfile", hostfile, *words]
