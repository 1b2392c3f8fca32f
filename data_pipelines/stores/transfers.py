"""One file on its way from a server: what came of it, and the bounds that end it.

A server is believed nothing. What it sends is held against the size that the manifest states, or against
``most_bytes`` where nothing states one; how slowly it sends it, against ``least_bytes_per_second``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from longstride.data_pipelines.settings import RemoteSettings


class RefusedError(Exception):
    """The server's answer is final (no such file, no access): one line that says so."""


class DifferentFileError(Exception):
    """The remote file is not the one in the manifest: one line that says why."""


class HttpStatusError(OSError):
    """An answer that may differ at the next attempt."""


class LimitError(Exception):
    """A fetch takes more bytes or time than it may: one line that names the setting."""


@dataclass
class Transfer:
    """A file, over all attempts to fetch it. Each goes on behind the bytes that the last ones brought."""

    name: str  # within the folder
    size: int | None  # bytes; None where nothing states them
    settings: RemoteSettings
    have: int = 0  # bytes from the beginning on that came
    version: str = ""  # of what came, as the server calls it (strong ETag or Last-Modified), if it does

    def __post_init__(self) -> None:
        self._left_seconds = self.settings.window_seconds  # that the fetch may fall behind from now on
        self._came = self._again = 0  # bytes in all; of those, such as had come before

    @property
    def size_or_bound(self) -> int:
        """Bytes that the file has, or may have at most."""
        return self.settings.most_bytes if self.size is None else self.size

    def check_size(self, size: int) -> None:
        """Raises DifferentFileError or LimitError where a file of so many bytes is not the one, or too long."""
        if size <= self.size_or_bound:
            return
        if self.size is not None:
            raise DifferentFileError(f"more than the {self.size} bytes that it should have")
        raise LimitError(
            f"has more than most_bytes={self.settings.most_bytes}; is it the file that was meant? "
            f"If so, good: data.remote.most_bytes of at least its size, such as {2 * self.settings.most_bytes}"
        )

    def start_over(self) -> None:
        """The next bytes are the file's first."""
        self._count_again(self.have)
        self.have, self.version = 0, ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the seconds inside: what the caller does with the bytes is not the server's time."""
        begun = time.monotonic()
        try:
            yield
        finally:
            # No wait is longer than that, unless this process was stopped.
            self._left_seconds -= min(time.monotonic() - begun, self.settings.timeout_seconds)

    def came(self, count: int, again: int = 0) -> None:
        """Counts bytes, the first ``again`` of which had come before.

        Raises DifferentFileError or LimitError, see ``check_size``; LimitError where they came too slowly.
        """
        self._came += count
        self.have += count - again
        self._count_again(again)
        self._left_seconds += count / self.settings.least_bytes_per_second
        self._left_seconds = min(self._left_seconds, self.settings.window_seconds)
        self.check_size(self.have)
        self.check_pace()

    def check_pace(self) -> None:
        """Raises LimitError where the fetch has fallen too far behind the least rate."""
        if self._left_seconds < 0:
            rate, seconds = self.settings.least_bytes_per_second, self.settings.window_seconds
            raise LimitError(
                f"{self._came} bytes came, which is window_seconds={seconds:g} behind least_bytes_per_second={rate:g}; "
                "look at the network and the server; for one that is so slow, "
                f"good: data.remote.least_bytes_per_second={rate / 10:g}, "
                f"and for one that is away for so long, data.remote.window_seconds={10 * seconds:g}"
            )

    def _count_again(self, count: int) -> None:
        self._again += count
        if self._again > self.settings.attempts * self.size_or_bound:
            raise LimitError(
                f"{self._again} bytes came more than once: the server sends a file from its beginning whatever part "
                f"is asked for, and breaks off; name one that knows ranges, or raise attempts={self.settings.attempts}"
            )
