"""Bytes of remote files from any offset on, through fsspec, with messages that show no credentials.

One call is one attempt, bounded by the time-outs of the protocol's library: `remote.py` repeats it.
"""

import asyncio
import inspect
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.stores.transfers import DifferentFileError, HttpStatusError, RefusedError, Transfer

_SHOWN_CHARACTERS = 200  # of what a server or a library says
_READ_CHARACTERS = 2000  # of it, to find what must not be shown
_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.:-]*)://(?:(?P<user>[^/?#]*)@)?(?P<rest>.*)", re.DOTALL)
_ANY_USER = re.compile(r"://[^/\s'\"]*@")
_ANY_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\")]*")
_HTTP = ("http", "https")
_LIBRARIES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs"}
# Errors that no second attempt mends, of libraries that may be missing: so by name.
_FINAL_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError"}


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
        return self._without_secrets(text)

    def told(self, text: object) -> str:
        """What a server or a library says, as messages repeat it: one printable line, cut short, without secrets."""
        # Own secrets first: a cut through one would leave what looks like none.
        words = " ".join(self._without_secrets(str(text))[:_READ_CHARACTERS].split())
        line = "".join(letter if letter.isprintable() else "?" for letter in self.hide(words))
        return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} …"

    def _without_secrets(self, text: str) -> str:
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


class Transport:
    """One process's connection to a remote folder. No other process may use it."""

    def __init__(self, url: FolderUrl, settings: RemoteSettings) -> None:
        import fsspec

        self.url, self._settings = url, settings
        try:
            self._filesystem = fsspec.filesystem(url.protocol, skip_instance_cache=True, **_options(url, settings))
        except Exception as error:  # any library, any reason
            raise DataError(
                f"{url.shown}: {url.protocol}:// cannot be read here ({url.told(_words(error))}); "
                "good ones are https:// and s3://"
            ) from error
        if hasattr(self._filesystem, "retries"):
            self._filesystem.retries = 1  # s3fs would try five times by itself for each of our attempts

    def find(self, *endings: str) -> dict[str, int | None]:
        """Paths of the files below the folder that end in one of these, and their bytes, if known. One attempt.

        Raises RefusedError, LimitError, or whatever the protocol's library raises.
        """
        sizes: dict[str, int | None] = {}
        with _final_answers(self.url):
            if self.url.protocol in _HTTP:
                from longstride.data_pipelines.stores import web

                sizes.update(web.find(self._filesystem, self.url.of, self._settings))
            else:
                url = self.url.of("").rstrip("/")
                root = self._filesystem._strip_protocol(url).rstrip("/") + "/"
                for path, details in self._call("find", url, detail=True).items():
                    sizes[path.removeprefix(root)] = details.get("size")
        return {name: sizes[name] for name in sorted(sizes) if name.endswith(endings) and "/." not in f"/{name}"}

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where the server does not tell. One attempt, which raises as ``find`` does."""
        with _final_answers(self.url):
            return self._call("info", self.url.of(name))["size"]

    def stream(self, transfer: Transfer, chunk_bytes: int) -> Iterator[bytes]:
        """Bytes of a file from ``transfer.have`` on, in one attempt. They may end early.

        Where the file's size is not known and it changed, they are its first ones: ``transfer.have`` tells behind which
        byte of the file they end. Raises RefusedError, DifferentFileError, LimitError, or whatever the protocol's
        library raises.
        """
        file_url = self.url.of(transfer.name)
        with _final_answers(self.url):
            if self.url.protocol in _HTTP:
                from longstride.data_pipelines.stores import web

                yield from web.body(self._filesystem, file_url, transfer)
            elif transfer.size is None:
                transfer.check_size(self._call("info", file_url)["size"] or 0)
                yield from self._chunk(file_url, transfer)
            else:
                yield from self._chunks(file_url, transfer, chunk_bytes)

    def reason(self, error: Exception) -> str:
        """Why an attempt failed, in one line."""
        kind = type(error).__name__
        if isinstance(error, HttpStatusError):
            return self.url.told(error)
        if isinstance(error, TimeoutError) or "Timeout" in kind:
            return f"nothing came for {self._settings.timeout_seconds:g} s ({kind})"
        return self.url.told(f"{kind}: {error}" if str(error).strip() else kind)

    def _chunks(self, url: str, transfer: Transfer, chunk_bytes: int) -> Iterator[bytes]:
        """For any filesystem of fsspec: one request per chunk. A chunk that breaks off is lost."""
        assert transfer.size is not None
        while transfer.have < transfer.size:
            offset = transfer.have
            end = min(offset + chunk_bytes, transfer.size)
            yield from self._chunk(url, transfer, start=offset, end=end)
            if transfer.have < end:
                remote_size = self._call("info", url)["size"]
                if remote_size is not None and remote_size != transfer.size:
                    raise DifferentFileError(f"{remote_size} bytes, and it should have {transfer.size}")
                return

    def _chunk(self, url: str, transfer: Transfer, **interval: int) -> Iterator[bytes]:
        with transfer.waiting():
            chunk: bytes = self._call("cat_file", url, **interval)
        if interval and len(chunk) > interval["end"] - interval["start"]:  # the range was ignored
            chunk = chunk[interval["start"] : interval["end"]]
        transfer.came(len(chunk))
        yield chunk

    def _call(self, method: str, url: str, **arguments: Any) -> Any:
        """What a method of the filesystem returns, which ends by itself where it is no coroutine."""
        from fsspec.asyn import sync

        if not self._filesystem.async_impl:
            return getattr(self._filesystem, method)(url, **arguments)
        call = getattr(self._filesystem, f"_{method}")(url, **arguments)
        return sync(self._filesystem.loop, asyncio.wait_for, call, self._settings.window_seconds)


@contextmanager
def _final_answers(url: FolderUrl) -> Iterator[None]:
    """Raises RefusedError for errors that no second attempt would mend."""
    try:
        yield
    except FileNotFoundError:
        words = "no such file"
    except PermissionError as error:
        words = f"access denied ({_words(error)})"
    except ssl.CertificateError as error:
        words = f"the server's certificate is not trusted ({_words(error)})"
    except (NotImplementedError, ValueError, RefusedError) as error:
        words = _words(error)
    except Exception as error:
        if type(error).__name__ not in _FINAL_ERRORS:
            raise
        words = _words(error)
    else:
        return
    raise RefusedError(url.told(words))


def _words(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


def _options(url: FolderUrl, settings: RemoteSettings) -> dict[str, Any]:
    """Time-outs as the protocol's library names them. A library without such options keeps its own."""
    if url.protocol in _HTTP:
        from longstride.data_pipelines.stores import web

        return web.options(settings)
    if _LIBRARIES.get(url.protocol) == "s3fs":
        config = {
            "connect_timeout": settings.timeout_seconds,
            "read_timeout": settings.timeout_seconds,
            "retries": {"max_attempts": 0},  # our own are counted, logged, and go on where a file broke off
        }
        return {"config_kwargs": config, "use_listings_cache": False}
    return {}
