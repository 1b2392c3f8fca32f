"""What a rank does when another one no longer answers: it writes the stacks of its host's ranks, and exits by 77.

Every collective ends by its time-out, or as soon as a connection breaks (processes.py). The error that it raises ends
the process here. So does a thread that watches the main one: it finds a wait that no time-out has ended, or a run that
stands still without its launcher.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch

from longstride.launcher.output import exit_codes, file_names, say, settle_output
from longstride.launcher.ranks.stacks import Neighbour, Reading, Sheet, SheetAddress

_LOOK_SECONDS = 0.5
_SURE_SECONDS = 2.0  # until a frame is held: before, another frame may take its place in memory
_LATE_SECONDS = 3.0  # after its time-out, a collective that still waits will not end by itself
_STACKS_SECONDS = 3.0  # in which any process that runs has written its stacks
_LOST_SECONDS = 2.0  # a launcher looks once a second: it should see the exit code of the lost rank first
_MARKED_SECONDS = 5.0  # a process whose stacks a neighbour reads stays so long
_REPORT_SECONDS = 12.0  # for the whole report: a file system that hangs must not hold it up
# Files, by the ends of their names, whose code waits for other ranks, and one that only polls for them.
_POLLING = "/launcher/ranks/waiting.py"
_WAITING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rendezvous.py",
    "/launcher/ranks/processes.py",
)
# Those errors of gloo, torch's store and NCCL which say that other processes did not answer. Their other errors, such
# as sizes that differ between ranks, are bugs here.
_TIMED_OUT = re.compile(r"timed? ?out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_LOST = re.compile(
    r"closed by peer|Socket closed|Connection (reset|refused|closed|was likely closed)|Broken pipe|No route to host"
    r"|Network is unreachable|(Read|Write) error|connectFullMesh failed|failed to connect"
    r"|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
_GLOO = re.compile(r"gloo/.*\.(cc|h):\d+\]|^Gloo |monitoredBarrier", re.IGNORECASE)


class PeerFailure(NamedTuple):
    """Why a run cannot go on: another process did not answer."""

    reason: str
    lost: bool  # another process is gone, rather than late


def peer_failure(error: BaseException) -> PeerFailure | None:
    """What an error says of other processes that did not answer; None for all other errors."""
    lines = str(error).splitlines() or [""]
    family = isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and _GLOO.search(lines[0]) is not None
    )
    if not family:
        return None
    reason = " ".join(re.sub(r"^\[.*?\] |This is typically.*", "", lines[0]).split())
    if _TIMED_OUT.search(str(error)):
        return PeerFailure(reason, lost=False)
    return PeerFailure(reason, lost=True) if _LOST.search(str(error)) else None


class Watchdog:
    """Knows where this rank is, and ends it where the others do not answer."""

    def __init__(
        self,
        run: Path | None,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        orphaned: Callable[[], bool] | None = None,
    ) -> None:
        """``run`` is the folder for stacks, which go to standard error where there is none.

        ``orphaned`` says whether the launcher is gone; by default, whether the process that started this one is.
        """
        self._run, self._rank, self._world_size, self._timeout = run, rank, world_size, timeout_seconds
        parent = os.getppid()
        launched = "RANK" in os.environ  # a process started by hand may well outlive its shell
        self._orphaned = orphaned or (lambda: launched and os.getppid() != parent)
        self._sheet = Sheet(rank)
        self.hosts: list[str] = []  # of all ranks in their order, once they have met
        self._neighbours: list[Neighbour] = []
        self._name = _stamp()
        met_by = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        self._meeting_place = ":".join(met_by) if all(met_by) else f"process {os.getpid()}"  # alone
        self._met = False
        self._main = threading.get_ident()
        self._over, self._ends = threading.Event(), threading.Lock()
        self.at(f"waiting for {world_size} processes at {self._meeting_place}")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[SheetAddress, str]:
        """What the other ranks have to know: see ``meet``."""
        return self._sheet.address, self._name

    def meet(self, everyone: Sequence[tuple[SheetAddress, str]]) -> None:
        """Takes the addresses of all ranks, in rank order."""
        self._name = everyone[0][1]  # the same for all ranks of an attempt
        self.hosts = [each.host for each, _ in everyone]
        here = self._sheet.address
        self._neighbours = [Neighbour(each) for each, _ in everyone if each.host == here.host and each != here]
        self._met = True

    def at(self, place: str) -> None:
        """Says where the run is from now on: a step, an evaluation, a save."""
        self._sheet.at(place)

    def close(self) -> None:
        """The end of watching."""
        self._over.set()
        self._thread.join()
        self._sheet.close()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Ends this process where the block fails as other processes do not answer."""
        try:
            yield
        except Exception as error:
            failure = peer_failure(error)
            if failure is not None:
                self.end(failure, error)
            raise

    def end(self, failure: PeerFailure, raised: BaseException | None = None) -> NoReturn:
        """Reports a failure, with the stacks of the processes of this host, and exits."""
        if not self._ends.acquire(blocking=False):
            time.sleep(2 * _REPORT_SECONDS)  # the other thread leaves for both
        last = threading.Timer(_REPORT_SECONDS, os._exit, (exit_codes.HUNG,))
        last.daemon = True
        last.start()
        if raised is not None:  # before a neighbour may ask where this rank was, and finds it here
            self._sheet.write("".join(traceback.format_exception(raised)))
        if self._sheet.marked:  # a neighbour reports it, and reads this rank's stacks
            time.sleep(_MARKED_SECONDS)
        else:
            place, seconds, _ = self._sheet.read()
            self._sheet.write_stacks()
            with socket.socket(socket.AF_UNIX) as name:  # bound by the host's first rank to report, until it leaves
                try:
                    name.bind("\0longstride" + self._meeting_place[-90:])  # a hundred bytes are the most
                    is_first = True
                except OSError:
                    is_first = False
                written = [self._write(self._rank, failure, self._sheet.read())]
                if is_first:
                    written += self._neighbours_stacks(failure)
                    folder = next((path.parent for path in written if path is not None), None)
                    what = "lost another process" if failure.lost else "heard nothing of another process in time"
                    where = f"{place}, after {seconds:.0f} s"
                    files = f"; stacks: {folder}/{self._name}-rank-*.txt" if folder else ""
                    say(f"rank {self._rank} on {socket.gethostname()} {what} ({where}): {failure.reason}{files}")
                if failure.lost:
                    time.sleep(_LOST_SECONDS)
        leave_at_once()

    def _watch(self) -> None:
        """The watching thread: looks at the main one twice a second."""
        still = marked = 0.0
        before: tuple[int, int] | None = None
        held: FrameType | None = None
        last = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            # A process that was stopped, or a machine that slept, has not waited in that time.
            passed, last = min(now - last, 2 * _LOOK_SECONDS), now
            marked = marked + passed if self._sheet.marked else 0.0
            if marked > _MARKED_SECONDS and self._ends.acquire(blocking=False):
                leave_at_once()
            frame = sys._current_frames().get(self._main)
            place = None if frame is None else (id(frame), frame.f_lasti)
            same = place == before and (held is None or held is frame)
            still, before = still + passed if same else 0.0, place
            waits = still > _SURE_SECONDS and _waits(frame)
            orphaned = still > _SURE_SECONDS and self._orphaned()
            # A held frame keeps its variables alive, so only one that seems to stand still is held.
            held = frame if waits or orphaned else None
            del frame
            if waits and still > self._timeout + _LATE_SECONDS:
                self.end(PeerFailure(f"nothing came for {still:.0f} s, and no time-out ended it", lost=False))
            if orphaned and still > self._timeout:
                self.end(PeerFailure(f"the launcher is gone, and nothing moved for {still:.0f} s", lost=False))

    def _neighbours_stacks(self, failure: PeerFailure) -> list[Path | None]:
        """Writes the files of this host's other ranks, as far as they have not; returns the paths."""
        for neighbour in self._neighbours:
            neighbour.ask()
        end = time.monotonic() + _STACKS_SECONDS
        waiting = list(self._neighbours)
        while waiting and time.monotonic() < end:
            time.sleep(0.05)
            readings = [(each, each.read()) for each in waiting]
            waiting = [each for each, reading in readings if reading is not None and not reading.stacks]
        time.sleep(0.1)  # the handler writes line by line
        return [
            self._write(each.address.rank, failure, reading)
            for each in self._neighbours
            if (reading := each.read()) is not None
        ]

    def _write(self, rank: int, failure: PeerFailure, reading: Reading) -> Path | None:
        """A rank's file; None where it has one already, or there is no run folder to write to."""
        by = "" if rank == self._rank else f", written by rank {self._rank}"
        lines = [
            f"rank {rank} of {self._world_size} on {socket.gethostname()}, {_stamp()}{by}",
            f"{reading.place}, for {reading.seconds:.1f} s; time-out {self._timeout:g} s",
            f"rank {self._rank}: {failure.reason}",
            "",
            reading.stacks or "It could not write its stacks.",
        ]
        try:
            if self._run is None or not self._run.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no run folder")
            path = self._run / file_names.STACKS / f"{self._name}-rank-{rank:05d}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join(lines))
        except FileExistsError:
            return None
        except OSError as error:
            if self._met:  # before, the line itself says who came and who did not
                say("\n".join([f"stacks: {error.strerror}", *lines]))
            return None
        return path


def leave_at_once() -> NoReturn:
    """Ends the process without anything that waits for others, such as the end of the process group."""
    for child in multiprocessing.active_children():  # loader workers, which ignore softer signals
        child.kill()
    with contextlib.suppress(OSError, ValueError):
        settle_output()
    os._exit(exit_codes.HUNG)


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective, or meets the others; the innermost file that says so decides."""
    while frame is not None:
        if frame.f_code.co_filename.endswith((*_WAITING, _POLLING)):
            return not frame.f_code.co_filename.endswith(_POLLING)
        frame = frame.f_back
    return False


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
