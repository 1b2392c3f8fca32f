"""Texts of runs on a page: nothing of them is obeyed, and each is as long as there is room for."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

MOST_PAGE_BYTES = 2_000_000
_MOST_CHARACTERS = 300


class Room:
    """How many bytes a page has left for what is large."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, text: str) -> bool:
        """Whether a text still fits; then its bytes are taken."""
        size = len(text.encode())
        if size > self.left:
            return False
        self.left -= size
        return True

    def fitting(self, rows: list[list[str]]) -> list[list[str]]:
        """The first rows of a table, as many as fit."""
        for count, row in enumerate(rows):
            if not self.take(_row(row)):
                return rows[:count]
        return rows

    def embed(self, kind: str, content: bytes) -> str | None:
        """A file's content as the address of itself; None where there is no room for it."""
        address = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        return address if self.take(address) else None


def shown(value: Any, most: int = _MOST_CHARACTERS) -> str:
    """Any text as HTML of itself: what does not print, or turns the order of letters, is written by its number."""
    text = str(value)
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return escape("".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text))


def absent(text: str, command: str = "") -> str:
    """What stands where a part of the page cannot be, and how it could."""
    return f'<p class="absent">{shown(text)}{f": <code>{shown(command)}</code>" if command else ""}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already; the columns ``numbers`` stand at the right."""
    top = _row(head, "th", numbers)
    body = "".join(_row(row, "td", numbers) for row in rows)
    broad = ' class="broad"' if len(head) > 4 else ""
    return f'<div class="scroll"><table{broad}><thead>{top}</thead><tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str], tag: str = "td", numbers: Sequence[int] = ()) -> str:
    kinds = [' class="n"' if column in numbers else "" for column in range(len(cells))]
    return f"<tr>{''.join(f'<{tag}{kind}>{cell}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"


def mebibytes(num_bytes: float) -> str:
    """A size of memory."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def flops(count: float) -> str:
    """A number of operations with a prefix."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:,.3g} {prefix}FLOP"
    return f"{count:,.0f} FLOP"
