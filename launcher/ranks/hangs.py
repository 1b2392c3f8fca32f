"""End a rank when another one stops answering: write the stacks of its host's ranks, and exit with code 77.

Every collective ends at its time-out, or when a connection breaks (processes.py), and its error ends the process here.
A watching thread also ends it if a wait outlasts its time-out, or if the run stands still without its launcher.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import mmap
import multiprocessing
import os
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch

from longstride.launcher.output import exit_codes, file_names, say, settle_output
from longstride.launcher.stops import LauncherGone

STACKS_SIGNAL = signal.SIGUSR2
_PAGE_BYTES = mmap.PAGESIZE
_PLACE = struct.Struct("<d256s")  # since when, by the monotonic clock of the host, and where
_MARK = _PLACE.size  # after the place: 1 if a neighbour has found that the run is over
_LOOK_SECONDS = 0.5
_SURE_SECONDS = 2.0  # until a frame is referenced; before, another frame may reuse its memory
_LATE_SECONDS = 3.0  # after its time-out, when a waiting collective will not end by itself
_STACKS_SECONDS = 3.0  # in which any running process writes its stacks
_LOST_SECONDS = 2.0  # a launcher polls every second, and should see the lost rank's exit code first
_MARKED_SECONDS = 5.0  # a marked process stays so long, so that its neighbour can read its stacks
_REPORT_SECONDS = 12.0  # for the complete report, even if a file system hangs
# Ends of the names of files that wait for other ranks in a collective, and of the one that only polls.
_POLLING = "/launcher/ranks/waiting.py"
_WAITING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rendezvous.py",
    "/launcher/ranks/processes.py",
)
# Errors of gloo, torch's store and NCCL for processes that did not answer. Others, such as sizes that differ between
# ranks, are bugs of ours.
_TIMED_OUT = re.compile(r"timed? ?out|timeout|failed to pass monitoredBarrier", re.IGNORECASE)
_LOST = re.compile(
    r"closed by peer|Socket closed|Connection (reset|refused|closed|was likely closed)|Broken pipe|No route to host"
    r"|Network is unreachable|(Read|Write) error|connectFullMesh failed|failed to connect"
    r"|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
_GLOO = re.compile(r"gloo/.*\.(cc|h):\d+\]|^Gloo |monitoredBarrier", re.IGNORECASE)


class SheetAddress(NamedTuple):
    """The location of a process's sheet, for its neighbours."""

    rank: int
    host: str  # with its namespaces of processes and sockets
    pid: int
    file: int  # file descriptor of the sheet in the process
    token: str  # name of the in-memory file


class Reading(NamedTuple):
    """The content of a sheet."""

    place: str
    seconds: float  # since the process came there
    stacks: str  # empty if they were not requested, or the handler could not run


class Sheet:
    """This process's sheet: an in-memory file for its neighbours on the host.

    The first page says where the process is. After it, Python's handler of SIGUSR2 writes the stacks of all threads.
    The handler is C and needs no interpreter, so it works wherever the process is stuck. Neighbours read the sheet
    through /proc. Nothing is written to a disk without a failure, and even a process that cannot write is reported.
    """

    def __init__(self, rank: int) -> None:
        token = f"longstride-stacks-{secrets.token_hex(8)}"
        self._file = os.memfd_create(token)
        os.ftruncate(self._file, _PAGE_BYTES)
        self._page = mmap.mmap(self._file, _PAGE_BYTES)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # stacks are appended after the page
        # Two processes can signal one another if the host's name and their namespaces are equal.
        spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]
        host = " ".join([socket.gethostname(), *spaces])
        self.address = SheetAddress(rank, host, os.getpid(), self._file, token)
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def at(self, place: str) -> None:
        """Record where the process is."""
        _PLACE.pack_into(self._page, 0, time.monotonic(), place.encode()[:255])

    @property
    def marked(self) -> bool:
        """Whether a neighbour has found that the run is over, and has requested the stacks."""
        return self._page[_MARK] == 1

    def write(self, text: str) -> None:
        """Write a text before the stacks."""
        os.write(self._file, f"{text}\n".encode(errors="replace"))

    def read(self, *, with_stacks: bool = False) -> Reading:
        """Read the sheet, if so after writing the current stacks of all threads to it."""
        if with_stacks:
            faulthandler.dump_traceback(self._file, all_threads=True)
        return _read(self._file)

    def close(self) -> None:
        """Release the signal and the memory."""
        faulthandler.unregister(STACKS_SIGNAL)
        self._page.close()
        os.close(self._file)


class Neighbour:
    """The sheet of another process on this host. It cannot be read if the process is gone, or its id is reused."""

    def __init__(self, address: SheetAddress) -> None:
        self.address = address
        self._path = Path(f"/proc/{address.pid}/fd/{address.file}")

    def ask(self) -> None:
        """Mark the sheet, let the process write its stacks, and wake it if it was stopped."""
        with contextlib.suppress(OSError):
            if not self._is_there():
                return
            with self._path.open("r+b", buffering=0) as sheet:
                sheet.seek(_MARK)
                sheet.write(b"\x01")
            os.kill(self.address.pid, STACKS_SIGNAL)
            os.kill(self.address.pid, signal.SIGCONT)

    def read(self) -> Reading | None:
        """Read the sheet; None if the process is gone."""
        try:
            if not self._is_there():
                return None
            with self._path.open("rb") as sheet:
                return _read(sheet.fileno())
        except OSError:
            return None

    def _is_there(self) -> bool:
        """Whether the process id still belongs to that process."""
        return str(self._path.readlink()).startswith(f"/memfd:{self.address.token} ")


def _read(file: int) -> Reading:
    size = os.fstat(file).st_size
    content = os.pread(file, size, 0)
    since, place = _PLACE.unpack_from(content)
    stacks = content[_PAGE_BYTES:].decode(errors="replace")
    return Reading(place.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since, stacks)


class PeerFailure(NamedTuple):
    """Why a run cannot continue: another process did not answer."""

    reason: str
    lost: bool  # the other process is gone, not only late


def peer_failure(error: BaseException) -> PeerFailure | None:
    """Return the failure if an error says that other processes did not answer, else None."""
    lines = str(error).splitlines() or [""]
    is_of_gloo = isinstance(error, RuntimeError) and _GLOO.search(lines[0]) is not None
    if not (isinstance(error, torch.distributed.DistError) or is_of_gloo):
        return None
    reason = " ".join(re.sub(r"^\[.*?\] |This is typically.*", "", lines[0]).split())
    if _TIMED_OUT.search(str(error)):
        return PeerFailure(reason, lost=False)
    return PeerFailure(reason, lost=True) if _LOST.search(str(error)) else None


class Watchdog:
    """Tracks where this rank is, and ends it if the others do not answer."""

    def __init__(
        self,
        run: Path | None,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        orphaned: Callable[[], object] | None = None,
    ) -> None:
        """Start watching the calling thread. Stacks go to the folder ``run``, or to standard error if it is None.

        ``orphaned`` says whether the launcher is gone.
        """
        self._run, self._rank, self._world_size, self._timeout = run, rank, world_size, timeout_seconds
        self._orphaned = orphaned or LauncherGone(os.environ)
        self._sheet = Sheet(rank)
        self.hosts: list[str] = []  # of all ranks, after they have met
        self._neighbours: list[Neighbour] = []
        self._name = _stamp()
        place = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
        self._meeting_place = ":".join(place) if all(place) else f"process {os.getpid()}"  # alone
        self._main = threading.get_ident()
        self._over, self._ends = threading.Event(), threading.Lock()
        self.at(f"waiting for {world_size} processes at {self._meeting_place}")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def meet(self, gather: Callable[[object], list]) -> None:
        """Exchange the addresses of all ranks by a collective."""
        everyone: list[tuple[SheetAddress, str]] = gather((self._sheet.address, self._name))
        self._name = everyone[0][1]  # the same for all ranks of an attempt
        addresses, local = [address for address, _ in everyone], self._sheet.address
        self.hosts = [address.host for address in addresses]
        self._neighbours = [Neighbour(peer) for peer in addresses if peer.host == local.host and peer != local]

    def at(self, place: str) -> None:
        """Record where the run is: a step, an evaluation, a save."""
        self._sheet.at(place)

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()
        self._sheet.close()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """End this process if the block fails because other processes do not answer."""
        try:
            yield
        except Exception as error:
            failure = peer_failure(error)
            if failure is not None:
                self.end(failure, error)
            raise

    def end(self, failure: PeerFailure, raised: BaseException | None = None) -> NoReturn:
        """Report a failure, with the stacks of this host's processes, and exit."""
        if not self._ends.acquire(blocking=False):
            time.sleep(2 * _REPORT_SECONDS)  # the other thread exits
        last = threading.Timer(_REPORT_SECONDS, os._exit, (exit_codes.HUNG,))
        last.daemon = True
        last.start()
        if raised is not None:  # before a neighbour requests this rank's stacks, which show this function by then
            self._sheet.write("".join(traceback.format_exception(raised)))
        if self._sheet.marked:  # a neighbour reports this rank's stacks
            time.sleep(_MARKED_SECONDS)
        else:
            place, seconds, _ = reading = self._sheet.read(with_stacks=True)
            with socket.socket(socket.AF_UNIX) as name:  # bound by the first rank of the host that reports
                try:
                    name.bind("\0longstride" + self._meeting_place[-90:])  # the limit is about a hundred bytes
                    is_first = True
                except OSError:
                    is_first = False
                paths = [self._write(self._rank, failure, reading)]
                if is_first:
                    paths += self._write_neighbours(failure)
                    folder = next((path.parent for path in paths if path is not None), None)
                    what = "lost another process" if failure.lost else "timed out waiting for another process"
                    where = f"{place}, after {seconds:.0f} s"
                    files = f"; stacks: {folder}/{self._name}-rank-*.txt" if folder else ""
                    say(f"rank {self._rank} on {socket.gethostname()} {what} ({where}): {failure.reason}{files}")
                if failure.lost:
                    time.sleep(_LOST_SECONDS)
        leave_at_once()

    def _watch(self) -> None:
        """Look at the main thread twice a second."""
        still_seconds = marked_seconds = 0.0
        before: tuple[int, int] | None = None
        held_frame: FrameType | None = None
        last = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            now = time.monotonic()
            # Time in which the process was stopped, or the machine slept, does not count.
            passed, last = min(now - last, 2 * _LOOK_SECONDS), now
            marked_seconds = marked_seconds + passed if self._sheet.marked else 0.0
            if marked_seconds > _MARKED_SECONDS and self._ends.acquire(blocking=False):
                leave_at_once()
            frame = sys._current_frames().get(self._main)
            place = None if frame is None else (id(frame), frame.f_lasti)
            same = place == before and (held_frame is None or held_frame is frame)
            still_seconds, before = still_seconds + passed if same else 0.0, place
            waits = still_seconds > _SURE_SECONDS and _waits(frame)
            orphaned = still_seconds > _SURE_SECONDS and self._orphaned()
            # Reference the frame only if it seems stuck, because this keeps its variables alive.
            held_frame = frame if waits or orphaned else None
            del frame
            if waits and still_seconds > self._timeout + _LATE_SECONDS:
                self.end(PeerFailure(f"nothing came for {still_seconds:.0f} s, and no time-out ended it", lost=False))
            if orphaned and still_seconds > self._timeout:
                self.end(PeerFailure(f"the launcher is gone, and nothing moved for {still_seconds:.0f} s", lost=False))

    def _write_neighbours(self, failure: PeerFailure) -> list[Path | None]:
        """Write the missing files of this host's other ranks; return their paths."""
        for neighbour in self._neighbours:
            neighbour.ask()
        end = time.monotonic() + _STACKS_SECONDS
        waiting = list(self._neighbours)
        while waiting and time.monotonic() < end:
            time.sleep(0.05)
            readings = [(neighbour, neighbour.read()) for neighbour in waiting]
            waiting = [neighbour for neighbour, reading in readings if reading is not None and not reading.stacks]
        time.sleep(0.1)  # the handler writes line by line
        return [
            self._write(neighbour.address.rank, failure, reading)
            for neighbour in self._neighbours
            if (reading := neighbour.read()) is not None
        ]

    def _write(self, rank: int, failure: PeerFailure, reading: Reading) -> Path | None:
        """Write a rank's file; return None if it exists already, or there is no run folder."""
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
            if self.hosts:  # before they meet, the message itself says who is missing
                say("\n".join([f"stacks: {error.strerror}", *lines]))
            return None
        return path


def leave_at_once() -> NoReturn:
    """End the process without anything that waits for others, such as the end of the process group."""
    for child in multiprocessing.active_children():  # loader workers, which ignore other signals
        child.kill()
    with contextlib.suppress(OSError, ValueError):
        settle_output()
    os._exit(exit_codes.HUNG)


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread is in a collective or meets the others; the innermost relevant file decides."""
    while frame is not None:
        if frame.f_code.co_filename.endswith((*_WAITING, _POLLING)):
            return not frame.f_code.co_filename.endswith(_POLLING)
        frame = frame.f_back
    return False


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
