"""`longstride show pattern CONFIG`: the verb, and the page of --html, which shows what every query reads, as one file.

The page holds no pairs. It has the closed forms by which kernels find the keys of a query (``PatternPart``), a few
integers per part, and its script evaluates them. Vectors of parts without a closed form are stored as linear pieces.

Letters: N positions of the context.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import string
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstride.kernels import ConfigError, num_pairs
from longstride.kernels.patterns import declares_causal
from longstride.launcher.drawing.kinds import KINDS, kind_of, places_of, words_of
from longstride.launcher.drawing.pattern import (
    check_number,
    default_query,
    draw_pattern,
    grid_of,
    model_config,
    name_of,
    share_of_pairs,
    users_of,
    why_unread,
)
from longstride.launcher.files import check_new, write_new
from longstride.launcher.pictures import save_picture
from longstride.launcher.verbs import TRUST_OPTION

MOST_BYTES = 2 << 20  # of a page


def run(arguments: argparse.Namespace) -> int:
    """Run `show pattern`; return its exit code."""
    source, query, text = arguments.source, arguments.query, arguments.text
    if arguments.output is None and arguments.html is None:
        raise ConfigError("--output: is missing; such as --output pattern.png, or --html pattern.html for a page")
    if arguments.trust_checkpoint and text is None:
        raise ConfigError(f"{TRUST_OPTION}: only --text FILE reads a checkpoint; leave it out")
    if arguments.html is not None and text is not None:
        raise ConfigError(f"--text={text}: a page has no text; draw --output FILE.png, and leave out --html")
    for option, output, suffix in (("--output", arguments.output, ".png"), ("--html", arguments.html, ".html")):
        if output is not None:
            check_new(output, option, suffix)
    if arguments.html is not None:
        write_new(arguments.html, pattern_page(source, query).encode(), "--html")
        print(arguments.html)
    if arguments.output is not None:
        save_picture(draw_pattern(source, query, text, trusted=arguments.trust_checkpoint), arguments.output)
        print(arguments.output)
    return 0


def pattern_page(source: Path, query: int | None = None) -> str:
    """Return the page of a configuration (see ``draw_pattern``); ``query`` is shown first.

    Raises:
        ConfigError: the configuration cannot be read, has no valid model, or has no such position; its heads choose by
            content; or its patterns are too irregular for a page.
    """
    config = model_config(source)
    context, grid = config.context, grid_of(config)
    if query is not None:
        check_number("--query", query, context, "a position")
    users, chosen = users_of(config)
    hidden = why_unread(config) or f"{chosen} heads choose their keys by content, and are not shown"
    if not users:
        rule = "its heads choose their keys by content; draw --output FILE.png with --text FILE"
        raise ConfigError(f"{source}: {why_unread(config) or rule}")
    patterns = [
        {
            "words": words_of(pattern),
            "places": places_of(places, config.heads),
            "share": f"{share_of_pairs(pattern, context):.3g}",
            "pairs": num_pairs(pattern, context),
            "causal": declares_causal(pattern),
            "parts": [part_json(part, context) for part in pattern.parts()],
        }
        for pattern, places in users.items()
    ]
    counts = ((context, "position"), (len(config.layer_patterns()), "layer"), (config.heads, "head"))
    about = ", ".join(f"{count:,} {what}{'s' if count > 1 else ''}" for count, what in counts) + " a layer"
    content = {
        "name": f"{name_of(source)}: who reads whom",
        "about": f"{about}; {hidden}" if chosen else about,
        "context": context,
        "query": default_query(grid, context) if query is None else query,
        "grid": grid._asdict(),
        "kinds": [kind._asdict() for kind in KINDS],
        "patterns": patterns,
    }
    # Only a "<" could end a script element, or begin a comment in it.
    data = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    if len(data) > MOST_BYTES // 2:
        rule = f"its patterns have no closed form, and take {len(data) >> 20} MiB of numbers; draw --output FILE.png"
        raise ConfigError(f"{source}: {rule}")
    files = resources.files("longstride.launcher.drawing")
    template, style, script = ((files / f"pattern.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    hashes = []
    for name, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes.append(f"{name} 'sha256-{digest}'")
    # The script sets the colours of elements, which no hash covers and no policy forbids.
    policy = "; ".join(["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'", *hashes])
    title = html.escape(f"{name_of(source)}: who reads whom")
    return string.Template(template).substitute(policy=policy, title=title, style=style, script=script, data=data)


def part_json(part: Any, context: int) -> dict[str, Any]:
    """Describe a part of a pattern for the page's script: its kind, and orders and bounds of its queries.

    ``row_fold`` or ``row_pieces`` map a query's position to its row. ``bounds``, or ``low`` and ``high``, map a row to
    its interval of columns. ``key_fold`` or ``key_pieces`` map a column to a key's position. Without them the map is
    the identity.
    """
    content: dict[str, Any] = {"kind": kind_of(part)}
    rows, keys, bounds = part.query_order(context), part.key_order(context), part.by_query(context)
    if isinstance(rows, Tensor):
        inverse = torch.empty_like(rows)
        inverse[rows] = torch.arange(len(rows))
        content["row_pieces"] = pieces(inverse)
    elif rows is not None:
        content["row_fold"] = _fold(rows.inverse())
    if isinstance(keys, Tensor):
        content["key_pieces"] = pieces(keys)
    elif keys is not None:
        content["key_fold"] = _fold(keys)
    if isinstance(bounds.low, Tensor):
        content |= {"low": pieces(bounds.low), "high": pieces(bounds.high)}
    else:
        content["bounds"] = {"period": bounds.period, "low": list(bounds.low), "high": list(bounds.high)}
    return content


def _fold(order: Any) -> list[int]:
    return [order.period, order.step, order.stride, order.shift]


def pieces(vector: Tensor) -> list[list[int]]:
    """Split a vector (n,) int64 into linear pieces ``[first row, value there, rise per row]``."""
    values = vector.tolist()
    result: list[list[int]] = []
    for row, value in enumerate(values):
        if result:
            first, begin, rise = result[-1]
            if value == begin + (row - first) * rise:
                continue
            if row == first + 1:  # the piece has no rise yet
                result[-1][2] = value - begin
                continue
        result.append([row, value, 0])
    return result
