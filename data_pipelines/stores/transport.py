"""Bytes of remote files from any offset on, through fsspec, with messages that show no credentials.

One call is one attempt, bounded by the time-outs of the protocol's library: `remote.py` repeats it.
"""

import inspect
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from longstride.data_pipelines.errors import DataError

READ_BYTES = 2**20  # of an HTTP body at once, at most
_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.:-]*)://(?:(?P<user>[^/?#]*)@)?(?P<rest>.*)", re.DOTALL)
_ANY_USER = re.compile(r"://[^/\s'\"]*@")
_ANY_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\")]*")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_HTTP = ("http", "https")
_LIBRARIES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs"}
_TRANSIENT_STATUSES = (408, 425, 429)  # of the 4xx: time-out, too early, too many requests
# Errors that no second attempt mends, of libraries that may be missing: so by name.
_FINAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"}


class RefusedError(Exception):
    """The server's answer is final (no such file, no access): one line that says so."""


class DifferentFileError(Exception):
    """The remote file is not the one in the manifest: one line that says why."""


class HttpStatusError(OSError):
    """An answer that may differ at the next attempt."""


class FolderUrl:
    """The URL of a remote folder. Only ``shown`` and what ``hide`` returns may go into messages."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        assert match is not None
        self.url, self.protocol = url, match["protocol"].lower()  # such as https
        self._user = f"{match['user']}@" if match["user"] else ""  # user:password@ or nothing
        self._path, self._query = match["rest"], ""  # host and path; ?query or nothing
        if self.protocol in _HTTP:
            self._path, mark, query = self._path.partition("#")[0].partition("?")
            self._query = mark + query
        self.shown = self.hide(url)  # as the user wrote it, with *** in place of user, password and query

    def of(self, name: str) -> str:
        """The URL of a file of the folder, credentials included."""
        return f"{self.protocol}://{self._user}{self._path.rstrip('/')}/{name}{self._query}"

    def shown_of(self, name: str) -> str:
        """The URL of a file of the folder, for messages."""
        return self.hide(self.of(name))

    def hide(self, text: str) -> str:
        """``text`` without this URL's secrets, and without users and queries of any other URL in it."""
        text = _ANY_QUERY.sub(r"\1?***", _ANY_USER.sub("://***@", text))
        user = self._user[:-1]
        for secret in (user, user.partition(":")[2], self._query[1:]):
            for form in {secret, unquote(secret)}:
                if len(form) > 2:
                    text = text.replace(form, "***")
        return text

    def check_protocol(self) -> None:
        """Raises DataError, saying what to install, for a protocol that cannot be read here."""
        if "::" in self.url:
            raise DataError(f"{self.shown}: chained protocols (::) are not read; name the folder that holds the files")
        protocol = self.protocol
        try:
            import fsspec

            filesystem = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            library = _LIBRARIES.get(protocol)
            how = f"pip install {library}" if library else str(error)
            raise DataError(f"{self.shown}: the library that reads {protocol}:// is not installed; {how}") from error
        except ValueError as error:
            raise DataError(
                f"{self.shown}: {protocol}:// is no protocol that fsspec knows; good ones are https:// and s3://"
            ) from error
        required = [
            parameter.name
            for parameter in list(inspect.signature(filesystem.__init__).parameters.values())[1:]
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if required:  # such as ftp://
            raise DataError(
                f"{self.shown}: fsspec asks for more than a URL to read {protocol}:// ({', '.join(required)}); "
                "good ones are https:// and s3://"
            )


def mend_after_fork() -> None:
    """Call in a forked child before its first Transport: it may have inherited fsspec's event loop with a held lock."""
    from fsspec.asyn import reset_lock

    reset_lock()


class Transport:
    """One process's connection to a remote folder. No other process may use it."""

    def __init__(self, url: FolderUrl, timeout_seconds: float) -> None:
        import fsspec

        self.url, self._timeout = url, timeout_seconds
        try:
            self._filesystem = fsspec.filesystem(
                url.protocol, skip_instance_cache=True, **_options(url.protocol, timeout_seconds)
            )
        except Exception as error:  # any library, any reason
            raise DataError(
                f"{url.shown}: {url.protocol}:// cannot be read here ({url.hide(_one_line(error))}); "
                "good ones are https:// and s3://"
            ) from error
        if hasattr(self._filesystem, "retries"):
            self._filesystem.retries = 1  # s3fs would try five times by itself for each of our attempts

    def whole(self, name: str) -> bytes:
        """A whole file, in one attempt. Raises RefusedError, or whatever the protocol's library raises."""
        file_url = self.url.of(name)
        with _final_answers(self.url):
            if self.url.protocol in _HTTP:
                return b"".join(self._http_body(file_url, 0, None))
            return self._filesystem.cat_file(file_url)

    def find(self, *endings: str) -> dict[str, int | None]:
        """Paths of the files below the folder that end in one of these, and their bytes, if known. One attempt."""
        url = self.url.of("").rstrip("/")
        with _final_answers(self.url):
            listed = self._filesystem.find(url, detail=True)
        root = self._filesystem._strip_protocol(url).rstrip("/") + "/"
        names = {path.removeprefix(root): details for path, details in listed.items() if path.endswith(endings)}
        return {name: names[name].get("size") for name in sorted(names) if "/." not in f"/{name}"}  # no hidden ones

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where the server does not tell. One attempt, which raises as ``whole`` does."""
        with _final_answers(self.url):
            return self._filesystem.size(self.url.of(name))

    def stream(self, name: str, offset: int, size: int, chunk_bytes: int) -> Iterator[bytes]:
        """Bytes from ``offset`` on of a file of ``size`` bytes, in one attempt. They may end early.

        Raises RefusedError, DifferentFileError, or whatever the protocol's library raises.
        """
        file_url = self.url.of(name)
        with _final_answers(self.url):
            if self.url.protocol in _HTTP:
                yield from self._http_body(file_url, offset, size)
            else:
                yield from self._chunks(file_url, offset, size, chunk_bytes)

    def reason(self, error: Exception) -> str:
        """Why an attempt failed, in one line."""
        text = " ".join(str(error).split())
        kind = type(error).__name__
        if isinstance(error, HttpStatusError):
            return text
        if isinstance(error, TimeoutError) or "Timeout" in kind:
            return f"nothing came for {self._timeout:g} s ({kind})"
        return self.url.hide(f"{kind}: {text}" if text else kind)

    def _chunks(self, url: str, offset: int, size: int, chunk_bytes: int) -> Iterator[bytes]:
        """For any filesystem of fsspec: one request per chunk. A chunk that breaks off is lost."""
        while offset < size:
            end = min(offset + chunk_bytes, size)
            chunk = self._filesystem.cat_file(url, start=offset, end=end)
            if len(chunk) > end - offset:  # the range was ignored
                chunk = chunk[offset:end]
            yield chunk
            offset += len(chunk)
            if offset < end:
                remote_size = self._filesystem.size(url)
                if remote_size is not None and remote_size != size:
                    raise DifferentFileError(f"{remote_size} bytes, and it should have {size}")
                return

    def _http_body(self, url: str, offset: int, size: int | None) -> Iterator[bytes]:
        """The body of one request, as it comes in: bytes that came before a connection broke are kept."""
        from fsspec.asyn import sync

        # A compressed body would have other offsets and another length. A proxy may hold an old manifest.
        headers = {"Accept-Encoding": "identity"}
        if size is None:
            headers["Cache-Control"] = "no-cache"
        if offset:
            headers["Range"] = f"bytes={offset}-"
        loop = self._filesystem.loop
        response = sync(loop, _request, self._filesystem, url, headers)
        try:
            _check_status(response, offset)
            skip = _bytes_to_skip(response, offset, size)
            while chunk := sync(loop, response.content.read, READ_BYTES):
                dropped = min(skip, len(chunk))
                skip -= dropped
                if dropped < len(chunk):
                    yield chunk[dropped:]
        finally:
            loop.call_soon_threadsafe(response.close)


@contextmanager
def _final_answers(url: FolderUrl) -> Iterator[None]:
    """Raises RefusedError for errors that no second attempt would mend."""
    try:
        yield
    except FileNotFoundError:
        words = "no such file"
    except PermissionError as error:
        words = f"access denied ({_one_line(error)})"
    except ssl.CertificateError as error:
        words = f"the server's certificate is not trusted ({_one_line(error)})"
    except (NotImplementedError, ValueError) as error:
        words = _one_line(error)
    except Exception as error:
        if type(error).__name__ not in _FINAL_ERRORS:
            raise
        words = _one_line(error)
    else:
        return
    raise RefusedError(url.hide(words))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _options(protocol: str, timeout_seconds: float) -> dict[str, Any]:
    """Time-outs as the protocol's library names them. A library without such options keeps its own."""
    if protocol in _HTTP:
        import aiohttp

        timeout = aiohttp.ClientTimeout(
            total=None, connect=timeout_seconds, sock_connect=timeout_seconds, sock_read=timeout_seconds
        )
        # trust_env: proxies and the credentials of ~/.netrc, as for other tools on the machine.
        return {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    if _LIBRARIES.get(protocol) == "s3fs":
        config = {
            "connect_timeout": timeout_seconds,
            "read_timeout": timeout_seconds,
            "retries": {"max_attempts": 0},  # our own are counted, logged, and go on where a file broke off
        }
        return {"config_kwargs": config, "use_listings_cache": False}
    return {}


async def _request(filesystem: Any, url: str, headers: dict[str, str]) -> Any:
    session = await filesystem.set_session()
    return await session.get(filesystem.encode_url(url), headers=headers)


def _check_status(response: Any, offset: int) -> None:
    """Raises unless the answer is a body."""
    status = response.status
    words = f"HTTP {status} {response.reason}"
    if status == 416:
        raise DifferentFileError(f"it ends before byte {offset}")
    if status in (404, 410):
        raise FileNotFoundError(words)
    if status in (401, 403):
        raise PermissionError(words)
    if 400 <= status < 500 and status not in _TRANSIENT_STATUSES:
        raise RefusedError(f"the server answers {words}")
    if status not in (200, 206):
        raise HttpStatusError(f"the server answers {words}")


def _bytes_to_skip(response: Any, offset: int, size: int | None) -> int:
    """How many bytes of a body lie before ``offset``. Raises where the body is not of a file of ``size`` bytes."""
    if response.status == 206:
        range_sent = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
        if range_sent is None or int(range_sent[1]) != offset:
            raise HttpStatusError("the server sends another range than it was asked for")
        if size is not None and range_sent[2] not in ("*", str(size)):
            raise DifferentFileError(f"{range_sent[2]} bytes, and it should have {size}")
        return 0
    length = None if "Content-Encoding" in response.headers else response.content_length
    # A proxy may have cut a shorter body: the missing bytes are fetched again.
    if size is not None and length is not None and length > size:
        raise DifferentFileError(f"{length} bytes, and it should have {size}")
    return offset
