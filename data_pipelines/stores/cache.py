"""A bounded folder of complete files that all processes of a machine share.

    CACHE/.lock                                       held while room is made and while a partial file is created
    CACHE/0123456789abcdef/train-00000.tar            a verified file of the data set with that fingerprint
    CACHE/0123456789abcdef/train-00000.tar.SIZE-SHA.partial    a file that is being fetched, or was when a process died

A process that fetches a file holds a lock (flock) on its partial file. The system releases the lock however the process
ends. A partial file counts with its final size, so simultaneous fetches do not fill the disk together.
"""

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from longstride.data_pipelines.durable import lock_path
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.local import StoredFile

_SET_FOLDER = re.compile(r"[0-9a-f]{16}")
_PARTIAL = re.compile(r".*\.(\d+)-[0-9a-f]+\.partial")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")  # others have their hash for a name
_POLL_SECONDS = 0.02  # at first; it grows while another process fetches
_LONGEST_POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Cache:
    """The files of one data set in the shared cache, as one process sees them.

    Raises DataError for a folder that cannot be made or written.
    """

    def __init__(self, settings: RemoteSettings, fingerprint: str) -> None:
        self._root, self._limit = settings.cache_folder, settings.cache_bytes
        self._folder = self._root / fingerprint[:16]
        assert _SET_FOLDER.fullmatch(self._folder.name), fingerprint
        self._locked: set[BinaryIO] = set()
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._root / ".lock").touch()

    def find(self, file: StoredFile) -> Path | None:
        """Return the path of a complete file, marked as just used; None if it has to be fetched."""
        path = self._path(file)
        with self._usable(), suppress(FileNotFoundError):
            if path.stat().st_size == file.size:
                now = time.time_ns()
                os.utime(path, ns=(now, now))
                return path
        return None

    def claim(self, file: StoredFile, stop: threading.Event) -> BinaryIO | None:
        """Make room for a file and lock its partial file. Wait while others fetch it or fill the cache.

        Returns None if another process completed the file, or the store is being closed. Raises DataError if the file
        is larger than the cache.
        """
        if file.size > self._limit:
            rule = f"{file.name} alone has {file.size} bytes; set at least {file.size}"
            raise DataError(f"cache_bytes={self._limit}: {rule}")
        path = self._partial_path(file)
        pause = _POLL_SECONDS
        while not stop.is_set():
            with self._usable(), (self._root / ".lock").open("ab") as lock, ExitStack() as after:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Closing alone does not unlock it if a child was forked meanwhile.
                after.callback(fcntl.flock, lock, fcntl.LOCK_UN)
                if self.find(file) is not None:
                    return None
                self._folder.mkdir(exist_ok=True)
                handle = lock_file(path)
                if handle is not None:
                    if self._make_room(file.size, path):
                        self._locked.add(handle)
                        return handle
                    unlock_file(handle)
            stop.wait(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        return None

    @contextmanager
    def filling(self, file: StoredFile, handle: BinaryIO) -> Iterator[Path]:
        """Provide the path of a claimed partial file, which becomes the file when the block ends without an error."""
        try:
            with self._usable(), completing(handle, self._partial_path(file), self._path(file)):
                yield self._partial_path(file)
        finally:
            self._locked.discard(handle)

    def remove(self, file: StoredFile) -> None:
        """Remove the copy of a file, if there is one. An open file stays readable."""
        with self._usable():
            self._path(file).unlink(missing_ok=True)

    def forget_locks(self) -> None:
        """Close the parent's partial files in a forked child, which would keep their locks."""
        while self._locked:
            self._locked.pop().close()

    def _path(self, file: StoredFile) -> Path:
        """Return the path of a complete file: its name, or a hash of a name that is a path or has odd characters."""
        if _FILE_NAME.fullmatch(file.name):
            return self._folder / file.name
        return self._folder / f"{hashlib.sha256(file.name.encode()).hexdigest()}{Path(file.name).suffix}"

    def _partial_path(self, file: StoredFile) -> Path:
        return self._folder / f"{self._path(file).name}.{file.size}-{file.sha256[:8]}.partial"

    def _make_room(self, size: int, partial: Path) -> bool:
        """Remove the least recently used files until ``size`` more bytes fit. Return whether they do."""
        entries = []  # of all data sets: (time of the last use, final bytes, path, whether it is partial)
        for folder in list(self._root.iterdir()):
            if not _SET_FOLDER.fullmatch(folder.name):
                continue
            with suppress(FileNotFoundError), os.scandir(folder) as files:
                for file in files:
                    with suppress(FileNotFoundError):  # renamed meanwhile
                        status, match = file.stat(), _PARTIAL.fullmatch(file.name)
                        full_size = int(match[1]) if match else status.st_size
                        entries.append((status.st_mtime_ns, full_size, Path(file.path), match is not None))
        entries = sorted(entry for entry in entries if entry[2] != partial)
        excess = sum(full_size for _, full_size, _, _ in entries) + size - self._limit
        for _, full_size, path, is_partial in entries:
            if excess <= 0:
                break
            if is_partial:
                handle = lock_file(path)
                if handle is None:  # another process fetches it
                    continue
                unlock_file(handle)
            path.unlink(missing_ok=True)
            excess -= full_size
            _log.info("%s: removed from the cache, %d bytes: it is bounded to %d", path, full_size, self._limit)
            if path.parent != self._folder:
                with suppress(OSError):  # not empty
                    path.parent.rmdir()
        return excess <= 0

    def _usable(self) -> AbstractContextManager[None]:
        mend = "name a cache folder that you may write to, on a disk with free space and file locks"
        return as_data_error(self._root, "the cache cannot be used", mend)


def lock_file(path: Path) -> BinaryIO | None:
    """Open or create a partial file, and lock it. Return None if another process holds the lock."""
    descriptor = lock_path(path)
    return None if descriptor is None else os.fdopen(descriptor, "r+b", buffering=0)


def unlock_file(handle: BinaryIO) -> None:
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)  # after a close alone, a child forked meanwhile would hold it
    handle.close()


@contextmanager
def completing(handle: BinaryIO, partial: Path, target: Path) -> Iterator[None]:
    """Rename a locked partial file to ``target`` when the block ends, atomically for all readers, and unlock it.

    After an error, its bytes stay for the next attempt.
    """
    try:
        yield
        os.fsync(handle.fileno())
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            if not os.fstat(handle.fileno()).st_size:
                partial.unlink()
        raise
    finally:
        unlock_file(handle)
