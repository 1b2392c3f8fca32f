"""Read remote files from any offset on, through any file system of fsspec; `web.py` has that of web servers.

Servers are not trusted. The bytes that they send are bounded by the size in the manifest, or by ``most_bytes`` if the
size is unknown. Their speed is bounded by ``least_bytes_per_second``.

A file is read in several attempts if needed, each from where the last one ended. An attempt with new bytes is progress,
however it ends: only consecutive attempts without a byte are counted.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import fsspec
from fsspec.asyn import sync

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings

WEB = ("http", "https")
GOOD = "use https://, s3://, gs://, az:// or hf://"
_SHOWN_CHARACTERS = 200  # of a message of a server or a library
_READ_CHARACTERS = 2000  # of it, searched for secrets
_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.:-]*)://(?:(?P<user>[^/?#]*)@)?(?P<path>.*)", re.DOTALL)
_ANY_USER = re.compile(r"://[^/\s'\"]*@")
_ANY_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\")]*")
CHUNK_BYTES = 8 * 2**20  # of one request; halved with every failure
SMALLEST_CHUNK_BYTES = 2**18
FIRST_WAIT_SECONDS = 0.1  # most dropped connections are followed by a good one
WAIT_GROWTH = 3
LONGEST_WAIT_SECONDS = 30.0  # eight attempts last a minute, and five where each times out
_TRANSIENT_STATUSES = (408, 425, 429)  # of the 4xx: time-out, too early, too many requests
# Final errors of libraries that may be missing, therefore by name.
_FINAL_ERRORS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError",  # s3fs
    "DefaultCredentialsError", "NonRetryableError",  # gcsfs
    "ClientAuthenticationError",  # adlfs
}  # fmt: skip
# Keys for the version of a file: of S3, Google, Azure, the Hugging Face hub, and others.
_VERSIONS = {"ETag", "VersionId", "etag", "generation", "version_id", "blob_id", "mtime", "created"}
_log = logging.getLogger(__name__)
_SILENT = logging.NullHandler()
T = TypeVar("T")


class DifferentFileError(Exception):
    """The remote file is not the one in the manifest: one line that says why."""


class HttpStatusError(OSError):
    """An answer without content: one line, and the HTTP status, if that is the reason."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.code = status


class FinalError(Exception):
    """A fetch that no attempt mends, such as one beyond a limit: one line with the rule, and what to do."""


class StoppedError(Exception):
    """The store was closed while it was fetching."""


def web_timeout(seconds: float) -> Any:
    """Return aiohttp's time-outs: for a connection and for a read without data, and none for the full response."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=None, connect=seconds, sock_connect=seconds, sock_read=seconds)


class FolderUrl:
    """The URL of a remote folder. Only ``shown`` and what the methods for messages return may be printed."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        assert match is not None
        self.url, self.protocol = url, match["protocol"].lower()  # such as https
        self._user = f"{match['user']}@" if match["user"] else ""  # user:password@ or nothing
        self._path, self._query = match["path"], ""  # host and path; ?query or nothing
        if self.protocol in WEB:
            self._path, mark, query = self._path.partition("#")[0].partition("?")
            self._query = mark + query
        self.shown = self.hide(url)  # as the user wrote it, with *** in place of user, password and query

    def of(self, name: str) -> str:
        """Return the URL of a file of the folder, credentials included."""
        return f"{self.protocol}://{self._user}{self._path.rstrip('/')}/{name}{self._query}"

    def shown_of(self, name: str) -> str:
        """Return the URL of a file of the folder, for messages."""
        return self.hide(self.of(name))

    def hide(self, text: str) -> str:
        """Remove this URL's secrets from a text, and users and queries of any other URL in it."""
        text = _ANY_QUERY.sub(r"\1?***", _ANY_USER.sub("://***@", text))
        return self._without_secrets(text)

    def quote(self, message: object) -> str:
        """Return what a server or a library says as one printable line, cut short and without secrets."""
        # Own secrets first: a cut through one would leave what looks like none.
        words = " ".join(self._without_secrets(str(message))[:_READ_CHARACTERS].split())
        line = "".join(letter if letter.isprintable() else "?" for letter in self.hide(words))
        return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} …"

    def check_protocol(self) -> None:
        """Raise DataError, saying what to install, for a protocol that cannot be read here."""
        protocol = self.protocol
        if "::" in self.url:
            rule = "chained protocols (::) are not supported; name the folder that holds the files"
            raise DataError(f"{self.shown}: {rule}")
        try:
            filesystem = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            library = getattr(error.__cause__, "name", None)  # such as gcsfs
            raise DataError(
                f"{self.shown}: the library that reads {protocol}:// is not installed; "
                + (f"pip install {library.partition('.')[0]}" if library else str(error))
            ) from error
        except ValueError as error:
            raise DataError(f"{self.shown}: {protocol}:// is not a protocol that fsspec knows; {GOOD}") from error
        try:
            inspect.signature(filesystem.__init__).bind(None)
        except TypeError as error:  # such as ftp://, whose object would fail in its __del__ too
            rule = f"fsspec needs more than a URL to read {protocol}:// ({error}); {GOOD}"
            raise DataError(f"{self.shown}: {rule}") from error

    def _without_secrets(self, text: str) -> str:
        user = self._user[:-1]
        for secret in (user, user.partition(":")[2], self._query[1:]):
            for form in {secret, unquote(secret)}:
                if len(form) > 2:
                    text = text.replace(form, "***")
        return text


@dataclass
class Transfer:
    """The transfer of a file over all attempts, and its bounds."""

    name: str  # within the folder
    size: int | None  # bytes; None if unknown
    settings: RemoteSettings
    received: int = 0  # bytes received from the beginning on
    has_checksum: bool = False  # without one, only ``version`` shows whether two attempts read the same file
    version: str = ""  # the server's version of the file (ETag, Last-Modified, ...), if any

    def __post_init__(self) -> None:
        self._slack_seconds = self.settings.window_seconds  # remaining delay of the fetch
        self._total = self._repeated = 0  # received bytes, and those of them that were received before

    @property
    def size_or_bound(self) -> int:
        return self.settings.most_bytes if self.size is None else self.size

    def check_size(self, size: int) -> None:
        """Raise DifferentFileError or FinalError if a file has more bytes than expected or allowed."""
        if size <= self.size_or_bound:
            return
        if self.size is not None:
            raise DifferentFileError(f"more than the {self.size} bytes that it should have")
        raise FinalError(
            f"has more than most_bytes={self.settings.most_bytes}; check that this is the right file; "
            f"if it is, set data.remote.most_bytes to at least its size, such as {2 * self.settings.most_bytes}"
        )

    def start_over(self) -> None:
        """Begin again at the first byte of the file."""
        self._count_repeated(self.received)
        self.received, self.version = 0, ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the seconds of the block; the caller's own time does not count against the server."""
        begun = time.monotonic()
        try:
            yield
        finally:
            # No wait is longer than that, unless this process was stopped.
            self._slack_seconds -= min(time.monotonic() - begun, self.settings.timeout_seconds)

    def count_bytes(self, count: int, again: int = 0) -> None:
        """Count received bytes, of which the first ``again`` are repeated.

        Raises DifferentFileError or FinalError, see ``check_size``; and FinalError if they came too slowly.
        """
        self._total += count
        self.received += count - again
        self._count_repeated(again)
        self._slack_seconds += count / self.settings.least_bytes_per_second
        self._slack_seconds = min(self._slack_seconds, self.settings.window_seconds)
        self.check_size(self.received)
        self.check_pace()

    def check_pace(self) -> None:
        """Raise FinalError if the fetch is too far behind the lowest rate."""
        if self._slack_seconds < 0:
            rate, seconds = self.settings.least_bytes_per_second, self.settings.window_seconds
            raise FinalError(
                f"{self._total} bytes came, window_seconds={seconds:g} later than "
                f"least_bytes_per_second={rate:g} allows; check the network and the server; for a slow server, "
                f"set data.remote.least_bytes_per_second={rate / 10:g}, "
                f"and for one that pauses so long, data.remote.window_seconds={10 * seconds:g}"
            )

    def _count_repeated(self, count: int) -> None:
        self._repeated += count
        if self._repeated > self.settings.attempts * self.size_or_bound:
            raise FinalError(
                f"{self._repeated} bytes came more than once: the server ignores ranges, sends each file from its "
                f"beginning, and breaks off; use one that supports ranges, or raise attempts={self.settings.attempts}"
            )


class Transport:
    """One process's connection to a remote folder. No other process may use it."""

    def __init__(self, url: FolderUrl, settings: RemoteSettings, stop: threading.Event) -> None:
        """Connect; waits between attempts end with StoppedError once ``stop`` is set."""
        self.url, self.settings, self.stop = url, settings, stop
        try:
            self._filesystem = fsspec.filesystem(url.protocol, skip_instance_cache=True, **self._options())
        except Exception as error:  # any library, any reason
            words = url.quote(str(error).strip() or type(error).__name__)
            raise DataError(f"{url.shown}: {url.protocol}:// cannot be read here ({words}); {GOOD}") from error
        # Errors are reported once, here and without secrets.
        logging.getLogger(type(self._filesystem).__module__.partition(".")[0]).addHandler(_SILENT)
        if hasattr(self._filesystem, "retries"):
            self._filesystem.retries = 1  # s3fs would try five times by itself for each of our attempts

    def content(self, transfer: Transfer) -> Iterator[bytes]:
        """Read a file from ``transfer.received`` on. If its size is unknown, it may start over, see ``received``.

        Raises DataError after the last attempt and beyond a bound, DifferentFileError, and StoppedError.
        """
        return self._retry(lambda failures: self._stream(transfer, failures), transfer)

    def find(self, endings: tuple[str, ...]) -> dict[str, int | None]:
        """List the files below the folder that end in one of these: their paths, and their bytes, if known."""
        (sizes,) = self._retry(lambda _: iter([self._find()]), Transfer("", None, self.settings))
        return {name: sizes[name] for name in sorted(sizes) if name.endswith(endings) and "/." not in f"/{name}"}

    def size(self, name: str) -> int:
        """Request the size of a file. Raises DataError if the server does not state it."""
        (info,) = self._retry(lambda _: iter([self._info(name)]), Transfer(name, None, self.settings))
        size: int | None = info["size"]
        if size is None:
            raise DataError(f"{self.url.shown_of(name)}: the server does not state its size; fetch the file first")
        return size

    def _retry(self, attempt: Callable[[int], Iterator[T]], transfer: Transfer) -> Iterator[T]:
        """Yield the items of attempts until one succeeds. ``attempt`` takes the number of previous failures."""
        shown = self.url.shown_of(transfer.name) if transfer.name else self.url.shown
        failures, furthest = 0, transfer.received  # progress is only beyond the furthest byte so far
        generator = random.Random()  # the global ones belong to training, whose resumes are exact
        while transfer.received != transfer.size:
            try:
                transfer.check_pace()
                yield from attempt(failures)
                if transfer.size is None:
                    return
                problem = f"the body ended after {transfer.received} of {transfer.size} bytes"
            except DifferentFileError:
                raise
            except FinalError as error:
                raise DataError(f"{shown}: {error}") from None
            except Exception as error:
                final, problem = self._explain(error)
                if final:
                    rule = "check the location, and the credentials in the environment if it asks for any"
                    raise DataError(f"{shown}: {problem}; {rule}") from None
            if transfer.received == transfer.size:
                return
            failures = 0 if transfer.received > furthest else failures + 1
            furthest = max(furthest, transfer.received)
            if failures >= self.settings.attempts:
                raise DataError(
                    f"{shown}: {problem}; given up after {failures} attempts in a row that brought nothing new; "
                    "check the network and the server, and start again: a file continues where it broke off"
                )
            longest = min(FIRST_WAIT_SECONDS * WAIT_GROWTH**failures, LONGEST_WAIT_SECONDS)
            seconds = longest * generator.uniform(0.5, 1)  # so that ranks do not all return at the same moment
            _log.warning("%s: %s; trying again in %.1f s", shown, problem, seconds)
            with transfer.waiting():
                if self.stop.wait(seconds):
                    raise StoppedError

    def _explain(self, error: Exception) -> tuple[bool, str]:
        """Return whether an error is final, and describe it in one line."""
        kind, words = type(error).__name__, str(error).strip() or type(error).__name__
        # Of gcsfs, adlfs and huggingface_hub. aiohttp calls a broken answer a status 400, which may heal.
        attributes, response = vars(error), getattr(error, "response", None)
        statuses = (attributes.get("code"), attributes.get("status_code"), getattr(response, "status_code", None))
        if isinstance(error, FileNotFoundError) or {404, 410} & set(statuses):
            return True, "no such file"
        # gcsfs raises OSError for "Forbidden".
        if isinstance(error, PermissionError) or 401 in statuses or 403 in statuses or words.startswith("Forbidden"):
            return True, self.url.quote(f"access denied ({words})")
        if isinstance(error, ssl.CertificateError):
            return True, self.url.quote(f"the server's certificate is not trusted ({words})")
        if isinstance(error, NotImplementedError | ValueError) or kind in _FINAL_ERRORS:
            return True, self.url.quote(words)
        numbers = [status for status in statuses if isinstance(status, int) and status not in _TRANSIENT_STATUSES]
        is_final = any(400 <= status < 500 for status in numbers)
        if isinstance(error, HttpStatusError):
            return is_final, self.url.quote(words)
        if is_final:
            return True, self.url.quote(f"{kind}: {words}")
        if isinstance(error, TimeoutError) or "Timeout" in kind:
            return False, f"nothing came for {self.settings.timeout_seconds:g} s ({kind})"
        return False, self.url.quote(kind if words == kind else f"{kind}: {words}")

    # `web.py` overrides these. Each call is one attempt and raises the exceptions of the protocol's library.

    def _options(self) -> dict[str, Any]:
        """Return arguments of the file system: time-outs, as its library names them, and no retries."""
        seconds = self.settings.timeout_seconds
        if self.url.protocol in ("s3", "s3a"):
            config = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 0}}
            return {"config_kwargs": config, "use_listings_cache": False}
        if self.url.protocol in ("gs", "gcs"):
            return {"session_kwargs": {"timeout": web_timeout(seconds)}, "use_listings_cache": False}
        if self.url.protocol in ("az", "abfs", "abfss"):
            return {"connection_timeout": seconds, "read_timeout": seconds, "use_listings_cache": False}
        if self.url.protocol == "hf":
            return {"block_size": 1}  # otherwise each part is read with 5 MiB after it
        return {}

    def _find(self) -> dict[str, int | None]:
        folder = self.url.of("").rstrip("/")
        root = self._filesystem._strip_protocol(folder).rstrip("/") + "/"
        entries = self._call("find", folder, detail=True)
        return {path.removeprefix(root): details.get("size") for path, details in entries.items()}

    def _info(self, name: str) -> dict[str, Any]:
        """Request the current metadata of a file, including ``size``."""
        self._filesystem.invalidate_cache()
        info: dict[str, Any] = self._call("info", self.url.of(name))
        return info

    def _stream(self, transfer: Transfer, failures: int) -> Iterator[bytes]:
        """Yield a file's bytes from ``transfer.received`` on, a request per part. An incomplete part is lost."""
        if transfer.size is None:
            transfer.check_size(self._info(transfer.name)["size"] or 0)
            yield from self._part(transfer)
            return
        if not transfer.has_checksum:
            self._check_version(transfer)
        chunk_bytes = max(CHUNK_BYTES >> failures, SMALLEST_CHUNK_BYTES)
        while transfer.received < transfer.size:
            end = min(transfer.received + chunk_bytes, transfer.size)
            yield from self._part(transfer, start=transfer.received, end=end)
            if transfer.received < end:
                self._check_version(transfer)
                return
        if not transfer.has_checksum:
            self._check_version(transfer)

    def _part(self, transfer: Transfer, **interval: int) -> Iterator[bytes]:
        with transfer.waiting():
            part: bytes = self._call("cat_file", self.url.of(transfer.name), **interval)
        if interval and len(part) > interval["end"] - interval["start"]:  # the range was ignored
            part = part[interval["start"] : interval["end"]]
        transfer.count_bytes(len(part))
        yield part

    def _check_version(self, transfer: Transfer) -> None:
        """Raise DifferentFileError for a file of another size, or of another version than before."""
        info = self._info(transfer.name)
        if info["size"] not in (None, transfer.size):
            raise DifferentFileError(f"{info['size']} bytes, but it should have {transfer.size}")
        version = str(sorted((key, str(info[key])) for key in _VERSIONS & info.keys()))
        if transfer.version not in ("", version):
            raise DifferentFileError("a different version")
        transfer.version = version

    def _call(self, method: str, url: str, **arguments: Any) -> Any:
        """Call a method of the file system, for at most ``window_seconds``."""
        seconds = self.settings.window_seconds
        if self._filesystem.async_impl:
            call = getattr(self._filesystem, f"_{method}")(url, **arguments)
            return sync(self._filesystem.loop, asyncio.wait_for, call, seconds)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(getattr(self._filesystem, method)(url, **arguments))
            except BaseException as error:  # it is raised where the answer is waited for
                answer.set_exception(error)

        # A daemon: a server that stalls must not keep the process from ending.
        threading.Thread(target=ask, name="longstride-ask", daemon=True).start()
        return answer.result(seconds)
