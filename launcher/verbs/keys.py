"""Misspelt keys of a run's configuration, told before the classes that know all of them are imported, with torch.

``keys.json`` has the keys of every object of the configuration whose keys are settled. After a change of the classes
`python docs/keys.py` writes it anew, and a test holds that it is so. What this module does not find, the classes tell.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longstride.data_pipelines.plain_files import JSONError, parse_json, read_plain

KEYS = Path(__file__).with_name("keys.json")
_PRESETS = Path(__file__).resolve().parents[2] / "ds_configs" / "experiments"
_MOST_BYTES = 1 << 20  # of a file that is looked at here


def misspelt_keys(config: str | None, overrides: Sequence[str]) -> list[str]:
    """A line for each key of a file, or of ``path.to.key=value``, that is unknown and nearly one that is known."""
    known: dict[str, list[str]] = json.loads(KEYS.read_text(encoding="utf-8"))
    everywhere = {key for keys in known.values() for key in keys}
    paths = [] if config is None else [path for path in _paths(_content(config)) if path]
    for override in overrides:
        parts = override.partition("=")[0].split(".")
        paths += [".".join(parts[: end + 1]) for end in range(len(parts))]
    lines = {}
    for path in dict.fromkeys(paths):
        above, _, key = path.rpartition(".")
        if above in known and key not in everywhere and (close := difflib.get_close_matches(key, known[above], n=1)):
            lines[path] = f"{path}: unknown key; nearest {close[0]}"
    return ["".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines.values()]


def _content(config: str) -> Any:
    """The JSON of a file or of a preset; None where there is none, which others tell."""
    path = Path(config)
    if not path.is_file():
        path = _PRESETS / f"{path.name}.json"
    try:
        return parse_json(read_plain(path, _MOST_BYTES))
    except (OSError, JSONError):
        return None


def _paths(content: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of all keys of nested objects."""
    yield path
    if isinstance(content, dict):
        for key, value in content.items():
            if key and "." not in key:
                yield from _paths(value, f"{path}.{key}" if path else key)
