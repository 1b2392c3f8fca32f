"""One remote file, fetched in as many attempts as it takes: each goes on where the last one ended.

An attempt that brings bytes is progress, however it ends. Only attempts in a row without a byte are counted.
"""

import hashlib
import logging
import random
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO, TypeVar

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.stores import StoredFile
from longstride.data_pipelines.stores.transport import DifferentFileError, RefusedError, Transport

CHUNK_BYTES = 8 * 2**20  # of a request where bodies cannot be streamed; halved with every failure
SMALLEST_CHUNK_BYTES = 2**18
FIRST_WAIT_SECONDS = 0.1  # a dropped connection is mostly alone
WAIT_GROWTH = 3
LONGEST_WAIT_SECONDS = 30.0  # eight attempts last a minute, and five where each times out
ROUNDS = 3  # from zero, where the whole is not what the manifest says: a proxy or a disk may have been at fault
_HASH_BYTES = 2**20
T = TypeVar("T")
_log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The store was closed while it was fetching."""


class Patience:
    """Counts attempts without progress, and waits between attempts."""

    def __init__(self, settings: RemoteSettings, stop: threading.Event) -> None:
        self._attempts, self._stop = settings.attempts, stop
        # Of its own: the global generators belong to training, whose resumes are exact.
        self._random = random.Random()
        self.failures = 0

    def after(self, problem: str, shown: str, progress: bool) -> None:
        """Wait before the next attempt. Raises DataError where there is none, StoppedError at the store's end."""
        self.failures = 0 if progress else self.failures + 1
        if self.failures >= self._attempts:
            raise DataError(
                f"{shown}: {problem}; given up after {self.failures} attempts in a row without a byte; "
                "check the network and the server, and start again: a file goes on where it broke off"
            )
        longest = min(FIRST_WAIT_SECONDS * WAIT_GROWTH**self.failures, LONGEST_WAIT_SECONDS)
        seconds = longest * self._random.uniform(0.5, 1)  # or all ranks would come back at the same moment
        _log.warning("%s: %s; trying again in %.1f s", shown, problem, seconds)
        if self._stop.wait(seconds):
            raise StoppedError


def read_whole(transport: Transport, name: str, settings: RemoteSettings, stop: threading.Event) -> bytes:
    """A small remote file, whole. Raises DataError, naming the URL."""
    return retried(lambda: transport.whole(name), transport, transport.address.shown_of(name), settings, stop)


def retried(
    ask: Callable[[], T], transport: Transport, shown: str, settings: RemoteSettings, stop: threading.Event
) -> T:
    """What a server answers, in as many attempts as it takes. Raises DataError, naming ``shown``."""
    patience = Patience(settings, stop)
    while True:
        try:
            return ask()
        except RefusedError as error:
            raise _refused(shown, error) from None
        except Exception as error:
            problem = transport.reason(error)
        patience.after(problem, shown, progress=False)


def read_once(
    transport: Transport, name: str, size: int, settings: RemoteSettings, stop: threading.Event
) -> Generator[bytes, None, None]:
    """A remote file of so many bytes, as it comes in; each attempt goes on where the last one ended.

    Nothing tells what it should hold. Raises DataError, naming the URL.
    """
    shown, have = transport.address.shown_of(name), 0
    patience = Patience(settings, stop)
    while have < size:
        before = have
        try:
            for content in transport.stream(
                name, have, size, max(CHUNK_BYTES >> patience.failures, SMALLEST_CHUNK_BYTES)
            ):
                have += len(content)
                yield content
            problem = f"the body ended after {have} of {size} bytes"
        except RefusedError as error:
            raise _refused(shown, error) from None
        except DifferentFileError as error:
            raise DataError(f"{shown}: {error}: it changed while it was read; start again") from None
        except Exception as error:
            problem = transport.reason(error)
        if have < size:
            patience.after(problem, shown, progress=have > before)


class Download:
    """Completes a partial file. ``partial`` is open for reading and writing, unbuffered, and locked by the caller.

    ``way_out`` is what a person does where the remote file is another one; ``advance`` is told the bytes so far.
    """

    def __init__(
        self,
        transport: Transport,
        file: StoredFile,
        partial: BinaryIO,
        path: Path,
        settings: RemoteSettings,
        stop: threading.Event,
        way_out: str = "upload the folder again, all its files together",
        advance: Callable[[int], None] = lambda have: None,
    ) -> None:
        self._way_out, self._advance = way_out, advance
        self._transport, self._file, self._partial, self._path = transport, file, partial, path
        self._settings, self._stop = settings, stop
        self._shown = transport.address.shown_of(file.name)
        self._have = 0  # bytes of the partial file
        self._digest = hashlib.sha256()  # over them

    def run(self) -> None:
        """Fetch what is missing and verify the whole.

        Raises DataError, naming URL or local path; what has come stays in the partial file.
        """
        problem = ""
        for _ in range(ROUNDS):
            try:
                self._take_up()
                self._fetch_rest()
                if self._digest.hexdigest() == self._file.sha256:
                    return
                problem = "its SHA-256 is not what it should be"
            except DifferentFileError as error:
                problem = str(error)
            _log.warning("%s: %s; fetching it again from its beginning", self._shown, problem)
            self._start_over()
        raise DataError(
            f"{self._shown}: {problem}: the remote file is damaged or belongs to another set; {self._way_out}"
        )

    def _take_up(self) -> None:
        """Hash what an earlier attempt, or an earlier process, left."""
        self._have, self._digest = 0, hashlib.sha256()
        self._partial.seek(0)
        while content := self._partial.read(_HASH_BYTES):
            self._digest.update(content)
            self._have += len(content)
        if self._have > self._file.size:
            self._start_over()
        elif self._have:
            _log.info("%s: going on after %d of %d bytes", self._shown, self._have, self._file.size)

    def _start_over(self) -> None:
        self._partial.seek(0)
        self._partial.truncate()
        self._have, self._digest = 0, hashlib.sha256()

    def _fetch_rest(self) -> None:
        patience = Patience(self._settings, self._stop)
        while self._have < self._file.size:
            before = self._have
            try:
                self._attempt(max(CHUNK_BYTES >> patience.failures, SMALLEST_CHUNK_BYTES))
                problem = f"the body ended after {self._have} of {self._file.size} bytes"
            except RefusedError as error:
                raise _refused(self._shown, error) from None
            except (DataError, DifferentFileError, StoppedError):
                raise
            except Exception as error:
                problem = self._transport.reason(error)
            if self._have < self._file.size:
                patience.after(problem, self._shown, progress=self._have > before)

    def _attempt(self, chunk_bytes: int) -> None:
        for content in self._transport.stream(self._file.name, self._have, self._file.size, chunk_bytes):
            if self._stop.is_set():
                raise StoppedError
            if self._have + len(content) > self._file.size:
                raise DifferentFileError(f"more than the {self._file.size} bytes that it should have")
            self._write(content)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            try:
                written = self._partial.write(rest)
            except OSError as error:
                raise DataError(
                    f"{self._path}: cannot be written ({error.strerror}); "
                    "free space there, or name another folder or fewer cache_bytes for the cache"
                ) from error
            self._digest.update(rest[:written])
            self._have += written
            self._advance(self._have)
            rest = rest[written:]


def _refused(shown: str, error: RefusedError) -> DataError:
    return DataError(f"{shown}: {error}; check the location, and the credentials in the environment if it asks for any")
