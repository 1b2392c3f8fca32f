"""Files of a web server, by aiohttp in fsspec's loop. fsspec's own file system of web servers has no such bounds."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from fsspec.asyn import sync

from longstride.data_pipelines.stores.transport import (
    DifferentFileError,
    FinalError,
    HttpStatusError,
    Transfer,
    Transport,
    web_timeout,
)

READ_BYTES = 2**20  # of a body at once, at most
_CONTENT_RANGE = re.compile(r"bytes (\d{1,20})-\d{1,20}/(\d{1,20}|\*)")
_LINK = re.compile(r"""\bhref\s*=\s*["']?([^"'\s<>]{1,2000})""", re.IGNORECASE)
_MOST_LINKS = 1_000_000


class WebTransport(Transport):
    """One process's connection to a folder on a web server."""

    def _options(self) -> dict[str, Any]:
        # trust_env: proxies and the credentials of ~/.netrc, as for other tools on the machine.
        timeout = web_timeout(self.settings.timeout_seconds)
        return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "get_client": _session}

    def _find(self) -> dict[str, int | None]:
        """List the files that the page of the folder links to, and those of folders below it.

        Raises FinalError for pages without end.
        """
        root, settings = urlsplit(self.url.of("")), self.settings
        names: dict[str, int | None] = {}
        folders, visited = deque([""]), {""}
        pages = Transfer("", None, settings)  # all of them are one in their bytes and their time
        begun = time.monotonic()
        while folders:
            page = Transfer(folders.popleft(), None, settings)
            url = self.url.of(page.name)
            text = b"".join(self._stream(page, 0)).decode(errors="replace")
            pages.count_bytes(page.received)
            for link in _LINK.findall(text):
                with suppress(ValueError):  # no address at all
                    address = urlsplit(urljoin(url, html.unescape(link)))
                    if _host(address) == _host(root) and address.path.startswith(root.path):
                        name = address.path[len(root.path) :]
                        if not name.endswith("/"):
                            names[name] = None
                        elif name not in visited:
                            folders.append(name)
                            visited.add(name)
            if time.monotonic() > begun + settings.window_seconds or len(names) + len(visited) > _MOST_LINKS:
                raise FinalError(
                    f"{len(visited)} pages of folders link to {len(names)} files and more after window_seconds="
                    f"{settings.window_seconds:g}; name the files themselves, such as train-{{000..012}}.tar"
                )
        names.pop("", None)
        return names

    def _stream(self, transfer: Transfer, failures: int) -> Iterator[bytes]:
        """Yield bytes as they arrive, from ``transfer.received`` on, or from the beginning if the file changed.

        They may end early. Bytes that came before a connection broke are yielded before the error is raised.
        """
        # A compressed body would have other offsets and another length. A proxy may hold an old manifest.
        headers = {"Accept-Encoding": "identity"}
        if transfer.size is None:
            headers["Cache-Control"] = "no-cache"
            if transfer.received and not transfer.version:
                transfer.start_over()
        if transfer.received:
            headers["Range"] = f"bytes={transfer.received}-"
            if transfer.version and not transfer.has_checksum:
                headers["If-Range"] = transfer.version
        loop, seconds = self._filesystem.loop, self.settings.timeout_seconds
        with transfer.waiting():
            response = sync(loop, _request, self._filesystem, self.url.of(transfer.name), headers, seconds)
        try:
            _check_status(response, transfer)
            skip = _bytes_to_skip(response, transfer)
            error = None
            while error is None and transfer.received != transfer.size:
                with transfer.waiting():
                    chunk, error = sync(loop, _read, response.content, seconds)
                again = min(skip, len(chunk))
                skip -= again
                transfer.count_bytes(len(chunk), again)
                if again < len(chunk):
                    yield chunk[again:]
                if not chunk and error is None:
                    return
            if error is not None:
                raise error
        finally:
            loop.call_soon_threadsafe(response.close)


def _host(url: SplitResult) -> str:
    return url.netloc.rpartition("@")[2]


async def _session(**options: Any) -> aiohttp.ClientSession:
    """Create a session without cookies: a file must not depend on the client."""
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), **options)


async def _request(filesystem: Any, url: str, headers: dict[str, str], seconds: float) -> Any:
    """Wait for the response headers. aiohttp's own time-outs restart with every byte."""
    session = await filesystem.set_session()
    try:
        response = await asyncio.wait_for(session.get(filesystem.encode_url(url), headers=headers), seconds)
    except aiohttp.TooManyRedirects:
        raise FinalError("the server redirects without end; check the location") from None
    except aiohttp.RedirectClientError as error:
        raise FinalError(f"the server redirects to an invalid web address ({error}); check the location") from None
    if response.url.scheme != "https" and url.startswith("https:"):
        response.close()
        rule = "the server redirects from https to http, where anybody on the path may change the file"
        raise FinalError(f"{rule}; check the location")
    return response


async def _read(content: Any, seconds: float) -> tuple[bytes, Exception | None]:
    """Return the next bytes of a body, none at its end, and the error that ended it."""
    try:
        # A separate time-out: bytes may come for ever without any of the body.
        return await asyncio.wait_for(content.read(READ_BYTES), seconds), None
    except Exception as error:
        content.set_exception(None)  # with an exception, a reader does not return the bytes before it
        return content.read_nowait(), error


def _check_status(response: Any, transfer: Transfer) -> None:
    if response.status == 416 and transfer.size is not None:
        raise DifferentFileError(f"it ends before byte {transfer.received}")
    if response.status == 416:
        transfer.start_over()
    if response.status not in (200, 206):
        # A range that cannot be served is no final answer, as the next attempt begins at the first byte.
        status = None if response.status == 416 else response.status
        raise HttpStatusError(f"the server answers HTTP {response.status} {response.reason}", status)


def _bytes_to_skip(response: Any, transfer: Transfer) -> int:
    """Count the bytes of a body that were received before. Raises an error for a body of another file."""
    tag = response.headers.get("ETag", "")
    version = response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag
    version = version if version.isascii() and version.isprintable() else ""  # it is sent back unchanged
    changed = bool(transfer.received) and not transfer.has_checksum and version != transfer.version
    if response.status == 206:
        range_sent = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if range_sent is None or int(range_sent[1]) != transfer.received:
            raise HttpStatusError("the server sends a different range from the one requested")
        size = None if range_sent[2] == "*" else int(range_sent[2])
        if transfer.size not in (None, size) and size is not None:
            raise DifferentFileError(f"{size} bytes, but it should have {transfer.size}")
        transfer.check_size(size or 0)
        if changed and transfer.size is not None:
            raise DifferentFileError("a different version")
        if changed:
            transfer.start_over()
            raise HttpStatusError("the file changed while it was fetched")
        transfer.version = version
        return 0
    length = None if "Content-Encoding" in response.headers else response.content_length
    # A proxy may have cut a shorter body: the missing bytes are fetched again.
    if transfer.size is not None and length is not None and length > transfer.size:
        raise DifferentFileError(f"{length} bytes, but it should have {transfer.size}")
    transfer.check_size(length or 0)
    if transfer.size is None:
        transfer.start_over()
    elif changed:
        raise DifferentFileError("a different version")
    transfer.version = version
    return transfer.received
