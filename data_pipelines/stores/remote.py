"""A remote data folder: `transport.py` fetches files completely into the bounded folder of `cache.py`.

Connections, threads and locks belong to one process. Each process creates its own when it first needs them, so a store
may be pickled, or its process forked, at any time.
"""

import hashlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.cache import Cache, completing, lock_file
from longstride.data_pipelines.stores.local import Store, StoredFile
from longstride.data_pipelines.stores.transport import (
    WEB,
    DifferentFileError,
    FolderUrl,
    StoppedError,
    Transfer,
    Transport,
)

ROUNDS = 3  # fetches of a file with a wrong checksum: a proxy or a disk may have been at fault
_HASH_BYTES = 2**20
_FINGERPRINT = re.compile(r"[0-9a-f]{16,}")
_JOIN_SECONDS = 5.0  # for all threads together, when a store is closed
_log = logging.getLogger(__name__)


class RemoteStore(Store):
    """The files of a data folder at a URL. Raises DataError for an unknown protocol or a missing library."""

    def __init__(self, location: str, settings: RemoteSettings) -> None:
        self._url = FolderUrl(location)
        self._url.check_protocol()
        self.settings = settings
        self.location = self._url.shown
        self._fingerprint: str | None = None
        self._room_for = 0
        self._by_process: dict[int, _InProcess] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_process": {}}

    def path_for_messages(self, name: str) -> str:
        return self._url.shown_of(name)

    def read(self, name: str) -> bytes:
        transfer = Transfer(name, None, self.settings)
        content = bytearray()
        for block in self._in_process().transport.content(transfer):
            content[transfer.received - len(block) :] = block  # from the beginning again if the file changed
        return bytes(content)

    def find(self, *endings: str) -> tuple[Mapping[str, int | None], int]:
        """List files; of a web server those that its page of the folder links to."""
        names = self._in_process().transport.find(endings)
        if not names:
            good = f"{self.location.rstrip('/')}/train-{{000..012}}{endings[0]}"
            raise DataError(f"{self.location}: lists no file *{endings[0]}; name the files themselves, such as {good}")
        return names, 0

    def size(self, name: str) -> int:
        return self._in_process().transport.size(name)

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        try:
            yield from self._in_process().transport.content(Transfer(name, size, self.settings))
        except DifferentFileError as error:
            shown = self.path_for_messages(name)
            raise DataError(f"{shown}: {error}: the file changed while it was read; start again") from None

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Name the data set's folder in the cache by the first 16 digits of its fingerprint."""
        assert _FINGERPRINT.fullmatch(fingerprint), fingerprint
        if room_for > self.settings.cache_bytes:
            rule = f"{room_for} bytes of {self.location} are needed at the same time; set at least {room_for}"
            raise DataError(f"cache_bytes={self.settings.cache_bytes}: {rule}")
        Cache(self.settings, fingerprint)  # raises now, not at the first fetch, if the folder cannot be used
        assert self._fingerprint in (None, fingerprint)
        self._fingerprint, self._room_for = fingerprint, room_for

    def local(self, file: StoredFile) -> Path:
        """Return the file in the cache, fetched if need be. Errors name the URL or the path in the cache."""
        return self._in_process().fetch(file)

    def expect(self, files: Iterable[StoredFile]) -> None:
        """Fetch files in the background, as many as the cache has room for."""
        assert self._fingerprint is not None, "bind comes first"
        room = self.settings.cache_bytes - self._room_for
        queue = []
        for file in files:
            room -= file.size
            if room < 0:  # it would evict a file that was fetched but not yet read
                break
            queue.append(file)
        self._in_process().fetch_ahead(queue)

    def discard(self, file: StoredFile) -> bool:
        _log.warning("%s: the cached copy is damaged; removed", self.path_for_messages(file.name))
        self._in_process().cache.remove(file)
        return True

    def close(self) -> None:
        """Wait a while for the fetches to end. Fetched bytes stay."""
        process = self._by_process.pop(os.getpid(), None)
        if process is not None:
            process.end()

    def _in_process(self) -> "_InProcess":
        process = self._by_process.get(os.getpid())
        if process is None:
            # A parent's entries stay in the dictionary: closing its connections here would disturb the parent.
            for parent in self._by_process.values():
                if "cache" in vars(parent):
                    parent.cache.forget_locks()
            process = self._by_process.setdefault(os.getpid(), _InProcess(self._url, self.settings))
        process.fingerprint = self._fingerprint
        return process


def fetch_file(
    folder_url: str,
    file: StoredFile,
    target: Path,
    settings: RemoteSettings,
    *,
    advance: Callable[[int], None],
    way_out: str,
) -> None:
    """Fetch one file of a folder to the path ``target``, going on from an earlier attempt.

    ``advance`` gets the bytes so far. ``way_out`` ends the message of a failed fetch. Raises DataError, naming the URL
    or the path.
    """
    partial = target.with_name(target.name + ".partial")
    with as_data_error(target, None):
        new_folders = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = lock_file(partial)
    if handle is None:
        raise DataError(f"{partial}: is being fetched by another process; wait until it has finished")
    try:
        with as_data_error(target, None), completing(handle, partial, target):
            url = FolderUrl(folder_url)
            url.check_protocol()
            transport = _connect(url, settings, threading.Event())
            _download(transport, file, handle, partial, advance, mend="fetch it by hand and look at it")
    except DataError as error:
        raise DataError(f"{error}; {way_out}") from error
    finally:
        with suppress(OSError):  # a fetch that got no byte leaves no folder
            for folder in new_folders:  # nearest first
                folder.rmdir()


def _connect(url: FolderUrl, settings: RemoteSettings, stop: threading.Event) -> Transport:
    if url.protocol not in WEB:
        return Transport(url, settings, stop)
    from longstride.data_pipelines.stores.web import WebTransport  # only web servers need aiohttp

    return WebTransport(url, settings, stop)


class _InProcess:
    """One process's side of a store: its connection, its threads and their queue."""

    def __init__(self, url: FolderUrl, settings: RemoteSettings) -> None:
        self._url, self._settings = url, settings
        self.fingerprint: str | None = None
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._queue: deque[StoredFile] = deque()
        self._threads: set[threading.Thread] = set()

    @cached_property
    def transport(self) -> Transport:
        """Connect when this process first needs it."""
        return _connect(self._url, self._settings, self.stop)

    @cached_property
    def cache(self) -> Cache:
        """Open the cache of the data set that the store is bound to."""
        assert self.fingerprint is not None, "bind comes first"
        return Cache(self._settings, self.fingerprint)

    def fetch(self, file: StoredFile) -> Path:
        """Return the whole file in the cache. Raises DataError, or StoppedError after the store was closed."""
        cache = self.cache
        while not self.stop.is_set():
            path = cache.find(file)
            if path is not None:
                return path
            handle = cache.claim(file, self.stop)
            if handle is not None:
                with cache.filling(file, handle) as partial:
                    _download(self.transport, file, handle, partial)
                _log.info("%s: fetched, %d bytes", self._url.shown_of(file.name), file.size)
        raise StoppedError

    def fetch_ahead(self, files: Iterable[StoredFile]) -> None:
        """Queue files for the background threads. There are never more threads than queued files."""
        # Created here, not in a thread: a fork in between would leave the child half a connection.
        assert self.transport and self.cache
        with self._lock:
            self._queue.extend(file for file in files if file not in self._queue)
            start = min(self._settings.parallel, len(self._queue)) - len(self._threads)
            for _ in range(start):
                # A daemon: a fetch that waits for a stalled server must not keep the process from ending.
                thread = threading.Thread(target=self._work, name="longstride-fetch", daemon=True)
                self._threads.add(thread)
                thread.start()

    def end(self) -> None:
        """Stop the threads. One that waits for a stalled server is left to its time-out."""
        self.stop.set()
        end = time.monotonic() + _JOIN_SECONDS
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                if self.stop.is_set() or not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                file = self._queue.popleft()
            try:
                self.fetch(file)
            except StoppedError:
                pass
            except Exception as error:  # `local` will try again, and raise for the reader that needs the file
                _log.warning("%s: prefetching it failed: %s", self._url.shown_of(file.name), error)


def _download(
    transport: Transport,
    file: StoredFile,
    partial: BinaryIO,
    path: Path,
    advance: Callable[[int], None] = lambda received: None,
    mend: str = "upload the folder again, all its files together",
) -> None:
    """Fetch the missing bytes of a file to its partial file, and verify it.

    Args:
        partial: open for reading and writing, without a buffer, and locked.
        path: of ``partial``.
        advance: called with the bytes so far.
        mend: advice if the remote file is another one.

    Raises:
        DataError: the message names URL or local path. The received bytes stay in the partial file.
    """
    shown, problem = transport.url.shown_of(file.name), ""
    room = "free space there, name another cache folder, or set fewer cache_bytes"
    for _ in range(ROUNDS):
        if os.fstat(partial.fileno()).st_size > file.size:
            partial.truncate(0)
        partial.seek(0)
        digest, received = hashlib.sha256(), 0
        while content := partial.read(_HASH_BYTES):  # of an earlier attempt, or an earlier process
            digest.update(content)
            received += len(content)
        if received:
            _log.info("%s: continuing after %d of %d bytes", shown, received, file.size)
        transfer = Transfer(file.name, file.size, transport.settings, received, has_checksum=True)
        try:
            for content in transport.content(transfer):
                if transport.stop.is_set():
                    raise StoppedError
                digest.update(content)
                with as_data_error(path, "cannot be written", room):
                    remaining = memoryview(content)
                    while remaining:
                        remaining = remaining[partial.write(remaining) :]
                advance(transfer.received)
        except DifferentFileError as error:
            problem = str(error)
        else:
            if digest.hexdigest() == file.sha256:
                return
            problem = "its SHA-256 does not match"
        _log.warning("%s: %s; fetching it again from its beginning", shown, problem)
        partial.truncate(0)
    raise DataError(f"{shown}: {problem}: the remote file is damaged or belongs to another set; {mend}")
