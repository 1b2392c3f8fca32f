"""The template of the page, which escapes and cuts all texts of runs, and the limit on the size of the page."""

from __future__ import annotations

import base64
import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

MOST_PAGE_BYTES = 2_000_000
_MOST_CHARACTERS = 300


def shown(value: Any, most: int = _MOST_CHARACTERS) -> Markup:
    """Cut and escape a text, and write characters that are not printable by their numbers; return markup unchanged."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return escape("".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text))


def data_url(content: bytes, kind: str) -> Markup:
    """Return a file's content as a URL."""
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")


@functools.cache
def pieces() -> Any:
    """Return the template's macros, which return HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"shown": shown, "data_url": data_url}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("report.html").module


class Room:
    """The remaining bytes of a page."""

    def __init__(self, num_bytes: int) -> None:
        self._remaining = num_bytes
        self._refused = 0

    def take(self, text: str) -> bool:
        """Take the bytes of a text; return whether it fits."""
        size = len(text.encode())
        fits = size <= self._remaining
        self._remaining -= size * fits
        self._refused += not fits
        return fits

    def count_refused(self) -> int:
        """Return the number of texts that did not fit since the last call."""
        count, self._refused = self._refused, 0
        return count
