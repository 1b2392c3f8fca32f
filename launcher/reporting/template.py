"""The template of the page, and what keeps texts of runs harmless and the page small.

No text of a run is obeyed: the template escapes everything that it prints, and each text is cut.
"""

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
    """Escape a text and cut it; write what does not print, or turns the order of letters, by its number.

    What the template has made already stays as it is.
    """
    if isinstance(value, Markup):
        return value
    text = str(value)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return escape("".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text))


@functools.cache
def pieces() -> Any:
    """Return the template's macros; each returns HTML."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, finalize=shown, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["shown"] = shown
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("report.html").module


class Room:
    """The bytes that a page has left for what is large."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, text: str) -> bool:
        """Whether a text still fits; then its bytes are taken."""
        size = len(text.encode())
        if size > self.left:
            return False
        self.left -= size
        return True

    def embed(self, kind: str, content: bytes) -> Markup | None:
        """Return a file's content as a data URL; None where there is no room for it."""
        address = Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")
        return address if self.take(address) else None
