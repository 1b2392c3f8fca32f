"""A remote data folder: files come through `transport.py`, whole or not at all, into `cache.py`'s bounded folder.

What belongs to a process (its connection, its threads, its locks) is made in the process that needs it: a store may be
pickled, and forked, at any moment.
"""

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.cache import Cache
from longstride.data_pipelines.stores.download import Download, StoppedError, read_once, read_whole, retried
from longstride.data_pipelines.stores.stores import StoredFile
from longstride.data_pipelines.stores.transport import Address, Transport, check_protocol, mend_after_fork

_FINGERPRINT = re.compile(r"[0-9a-f]{16,}")
_END_SECONDS = 5.0  # that threads are waited for
_log = logging.getLogger(__name__)


class RemoteStore:
    """The files of a data folder behind a URL. See ``Store``.

    Raises DataError for a protocol that is unknown or whose library is missing.
    """

    def __init__(self, location: str, settings: RemoteSettings) -> None:
        self._address = Address(location)
        check_protocol(self._address)
        self.settings = settings
        self.location = self._address.shown
        self._fingerprint: str | None = None
        self._room_for = 0
        self._in_process: dict[int, _InProcess] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_in_process": {}}

    def path_for_messages(self, name: str) -> str:
        """The file's URL without credentials."""
        return self._address.shown_of(name)

    def read(self, name: str) -> bytes:
        """A small file, whole, fetched anew. Raises DataError, naming the URL."""
        own = self._own()
        return read_whole(own.transport(), name, self.settings, own.stop)

    def sizes(self) -> None:
        """None: a request for each file would be dear."""

    def find(self, suffix: str) -> Mapping[str, int | None]:
        """See ``Store``. Of a web server, what its page of the folder links to."""
        own = self._own()
        found = retried(lambda: own.transport().find(suffix), own.transport(), self.location, self.settings, own.stop)
        if not found:
            good = f"{self.location.rstrip('/')}/train-{{000..012}}{suffix}"
            raise DataError(f"{self.location}: lists no file *{suffix}; name the files themselves, such as {good}")
        return found

    def size(self, name: str) -> int:
        """See ``Store``."""
        own, shown = self._own(), self.path_for_messages(name)
        size = retried(lambda: own.transport().size(name), own.transport(), shown, self.settings, own.stop)
        if size is None:
            raise DataError(f"{shown}: the server does not tell its size; fetch the file first")
        return size

    def blocks(self, name: str, size: int) -> Generator[bytes, None, None]:
        """See ``Store``; what breaks off goes on where it stopped."""
        own = self._own()
        return read_once(own.transport(), name, size, self.settings, own.stop)

    def bind(self, fingerprint: str, room_for: int = 0) -> None:
        """Which data set this is: its first 16 digits name its folder in the cache.

        Raises DataError where the cache cannot be written or cannot hold ``room_for`` bytes.
        """
        assert _FINGERPRINT.fullmatch(fingerprint), fingerprint
        if room_for > self.settings.cache_bytes:
            raise DataError(
                f"cache_bytes={self.settings.cache_bytes}: {room_for} bytes of {self.location} are needed "
                f"at the same time; good: at least {room_for}"
            )
        Cache(cache_folder(self.settings), self.settings.cache_bytes, fingerprint)  # what is wrong with it shows now
        self._fingerprint, self._room_for = fingerprint, room_for

    def local(self, file: StoredFile) -> Path:
        """The whole file in the cache, fetched if need be. Raises DataError, naming URL or cache path."""
        return self._own().fetch(file)

    def expect(self, files: Iterable[StoredFile]) -> None:
        """Fetch these in the background, as many as the cache holds beside what is needed at the same time."""
        assert self._fingerprint is not None, "bind comes first"
        room = self.settings.cache_bytes - self._room_for
        wanted = []
        for file in files:
            room -= file.size
            if room < 0:  # it would push out what was fetched for nothing
                break
            wanted.append(file)
        self._own().fetch_ahead(wanted)

    def discard(self, file: StoredFile) -> bool:
        """True: the cached copy is removed, and ``local`` fetches the file anew."""
        _log.warning("%s: the cached copy is damaged; removed", self.path_for_messages(file.name))
        self._own().cache().remove(file)
        return True

    def close(self) -> None:
        """Stop the background fetches of this process and wait for them a while; what they have brought stays."""
        own = self._in_process.pop(os.getpid(), None)
        if own is not None:
            own.end()

    def _own(self) -> "_InProcess":
        own = self._in_process.get(os.getpid())
        if own is None:
            # Those of a parent process stay in the dictionary: to end its connections here would disturb them there.
            inherited = list(self._in_process.values())
            for parent in inherited:
                parent.forget_locks()
            if inherited:
                mend_after_fork()
            own = self._in_process.setdefault(os.getpid(), _InProcess(self._address, self.settings))
        own.fingerprint = self._fingerprint
        return own


class _InProcess:
    """What one process holds of a store: its connection, its threads and their queue."""

    def __init__(self, address: Address, settings: RemoteSettings) -> None:
        self._address, self._settings = address, settings
        self.fingerprint: str | None = None
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._caches: dict[str, Cache] = {}
        self._queue: deque[StoredFile] = deque()
        self._threads: set[threading.Thread] = set()

    def transport(self) -> Transport:
        """This process's connection, made when it is first needed."""
        with self._lock:
            if self._transport is None:
                self._transport = Transport(self._address, self._settings.timeout_seconds)
            return self._transport

    def cache(self) -> Cache:
        """The cache of the data set that the store is bound to."""
        assert self.fingerprint is not None, "bind comes first"
        with self._lock:
            if self.fingerprint not in self._caches:
                root, limit = cache_folder(self._settings), self._settings.cache_bytes
                self._caches[self.fingerprint] = Cache(root, limit, self.fingerprint)
            return self._caches[self.fingerprint]

    def forget_locks(self) -> None:
        """See ``Cache.forget``."""
        for cache in self._caches.values():
            cache.forget()

    def fetch(self, file: StoredFile) -> Path:
        """The whole file in the cache. Raises DataError, or StoppedError after the store was closed."""
        cache = self.cache()
        while not self.stop.is_set():
            path = cache.find(file)
            if path is not None:
                return path
            partial = cache.claim(file, self.stop)
            if partial is None:
                continue
            try:
                Download(self.transport(), file, partial.handle, partial.path, self._settings, self.stop).run()
                path = cache.commit(partial)
            except BaseException:
                cache.release(partial)
                raise
            _log.info("%s: fetched, %d bytes", self._address.shown_of(file.name), file.size)
            return path
        raise StoppedError

    def fetch_ahead(self, files: Iterable[StoredFile]) -> None:
        """Queue files for the background threads, of which there are only as many as have something to do."""
        self.transport()  # here and not in a thread: a fork in the midst of it would leave the child half of it
        with self._lock:
            self._queue.extend(file for file in files if file not in self._queue)
            start = min(self._settings.parallel, len(self._queue)) - len(self._threads)
            for _ in range(start):
                # A daemon: a fetch that waits for a stalled server must not keep the process from ending.
                thread = threading.Thread(target=self._work, name="longstride-fetch", daemon=True)
                self._threads.add(thread)
                thread.start()

    def end(self) -> None:
        """Stop the threads; one that waits for a stalled server is left to its time-out."""
        self.stop.set()
        end = time.monotonic() + _END_SECONDS
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
            except Exception as error:  # `local` will try again, and raise where someone is to hear of it
                _log.warning("%s: fetching it ahead failed: %s", self._address.shown_of(file.name), error)


def cache_folder(settings: RemoteSettings) -> Path:
    """The root of the cache that the settings name."""
    if settings.cache is not None:
        return Path(settings.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "longstride"
