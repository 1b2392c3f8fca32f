"""The stacks of processes that no longer answer, read by their neighbours on the same host.

Each process has a sheet, which is a file in memory. Its first page says where the process is. After that page, Python's
own handler of SIGUSR2 writes the stacks of all threads. The handler is C and needs no interpreter: it works whatever
the process is stuck in. A neighbour reads the sheet through /proc. So nothing is written to a disk until there is
something to report, and even a process that cannot write any more is reported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import secrets
import signal
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

STACKS_SIGNAL = signal.SIGUSR2
_PAGE_BYTES = mmap.PAGESIZE
_PLACE = struct.Struct("<d256s")  # since when by the clock that all processes of a host share, and where
_MARK = _PLACE.size  # after the place: 1 where a neighbour has found that the run is over


class SheetAddress(NamedTuple):
    """Where the neighbours of a process find its sheet."""

    rank: int
    host: str  # with the namespaces in which pid and sockets mean something
    pid: int
    file: int  # the process's own number of the sheet's open file
    token: str  # the name of the file in memory


class Reading(NamedTuple):
    """What a sheet says."""

    place: str
    seconds: float  # since the process came there
    stacks: str  # empty where the process has not been asked for them, or could not run its handler


class Sheet:
    """This process's sheet."""

    def __init__(self, rank: int) -> None:
        token = f"longstride-stacks-{secrets.token_hex(8)}"
        self._file = os.memfd_create(token)
        os.ftruncate(self._file, _PAGE_BYTES)
        self._page = mmap.mmap(self._file, _PAGE_BYTES)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # stacks stand after the page, one after the other
        # Two processes can signal one another where name, and namespaces of processes and sockets, are the same.
        spaces = [str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "net")]
        host = " ".join([socket.gethostname(), *spaces])
        self.address = SheetAddress(rank, host, os.getpid(), self._file, token)
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=True)

    def at(self, place: str) -> None:
        """Says where the process is from now on."""
        _PLACE.pack_into(self._page, 0, time.monotonic(), place.encode()[:255])

    @property
    def marked(self) -> bool:
        """Whether a neighbour has found that the run is over, and has asked for the stacks."""
        return self._page[_MARK] == 1

    def write(self, text: str) -> None:
        """Writes what is to be read with the stacks."""
        os.write(self._file, f"{text}\n".encode(errors="replace"))

    def write_stacks(self) -> None:
        """Writes the stacks of all threads as they are now."""
        faulthandler.dump_traceback(self._file, all_threads=True)

    def read(self) -> Reading:
        """What it says now."""
        return _read(self._file)

    def close(self) -> None:
        """Gives up the signal and the memory."""
        faulthandler.unregister(STACKS_SIGNAL)
        self._page.close()
        os.close(self._file)


class Neighbour:
    """The sheet of another process on this host. A process that is gone, or whose id has a new owner, says nothing."""

    def __init__(self, address: SheetAddress) -> None:
        self.address = address
        self._path = Path(f"/proc/{address.pid}/fd/{address.file}")

    def ask(self) -> None:
        """Marks the sheet, has the process write its stacks, and wakes it where it was stopped."""
        with contextlib.suppress(OSError):
            if not self._is_there():
                return
            with self._path.open("r+b", buffering=0) as sheet:
                sheet.seek(_MARK)
                sheet.write(b"\x01")
            os.kill(self.address.pid, STACKS_SIGNAL)
            os.kill(self.address.pid, signal.SIGCONT)

    def read(self) -> Reading | None:
        """What it says now; None where the process is gone."""
        try:
            if not self._is_there():
                return None
            with self._path.open("rb") as sheet:
                return _read(sheet.fileno())
        except OSError:
            return None

    def _is_there(self) -> bool:
        """Whether the process id still means that process: a new one may have got it."""
        return str(self._path.readlink()).startswith(f"/memfd:{self.address.token} ")


def _read(file: int) -> Reading:
    size = os.fstat(file).st_size
    content = os.pread(file, size, 0)
    since, place = _PLACE.unpack_from(content)
    stacks = content[_PAGE_BYTES:].decode(errors="replace")
    return Reading(place.rstrip(b"\0").decode(errors="replace"), time.monotonic() - since, stacks)
