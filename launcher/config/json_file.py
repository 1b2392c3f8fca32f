"""JSON files written by hand: errors with line and column, repeated keys, ``path.to.key=value`` overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstride.data_pipelines.plain_files import JSONError, RepeatedKeyError, parse_json, read_plain
from longstride.kernels import ConfigError, join_paths

MOST_OBJECT_BYTES = 2**24  # the manifest of a checkpoint of 16,384 ranks takes two thirds of it
# A string or a structural character, which is enough to find keys.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]')


def load_json_object(path: Path, *, follow_links: bool = True) -> dict[str, Any]:
    """Load the object in a JSON file.

    Raises:
        ConfigError: the file is missing, not a regular one or too long, or as ``parse_json_object``.
    """
    try:
        content = read_plain(path, MOST_OBJECT_BYTES, follow_links=follow_links)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_json_object(path, content)


def parse_json_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse the object in the bytes of a JSON file. ``path`` is only for messages.

    Raises:
        ConfigError: not UTF-8, not JSON (with line and column), a key twice in one object, not an object.
    """
    try:
        value = parse_json(content, keys_once=True)
    except RepeatedKeyError as error:
        repeated = _repeated_keys(content.decode())
        lines = [f"{path}:{line}:{column}: key {key} occurs twice" for line, column, key in repeated]
        raise ConfigError(*(lines or [f"{path}: {error}"])) from None  # none if one is written with escapes
    except JSONError as error:
        place = path if error.line is None else f"{path}:{error.line}:{error.column}"
        raise ConfigError(f"{place}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse ``train.steps=10`` to (["train", "steps"], 10); a value that is not JSON is a string.

    Raises:
        ConfigError: no ``=``, or an empty part of the path.
    """
    path, equals, value = text.partition("=")
    parts = path.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{text}: must be path.to.key=value, such as train.steps=100")
    try:
        return parts, parse_json(value)
    except JSONError as error:
        if error.line is not None:  # not JSON at all
            return parts, value
        raise ConfigError(f"{path}: {error}") from None


def put(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Set a nested key in place, and create missing objects on the way.

    Raises:
        ConfigError: the path leads through a value that is not an object.
    """
    place = content
    for number, part in enumerate(parts[:-1]):
        below = place.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError.at(".".join(parts[: number + 1]), below, f"has no key {parts[number + 1]} to override")
        place = below
    place[parts[-1]] = value


def flattened(content: object, prefix: str = "") -> dict[str, object]:
    """Flatten nested objects to one object with dotted paths; lists count as values."""
    if not isinstance(content, dict) or not content:
        return {prefix: content}
    flat: dict[str, object] = {}
    for key, value in content.items():
        flat.update(flattened(value, join_paths(prefix, key)))
    return flat


def _repeated_keys(text: str) -> list[tuple[int, int, str]]:
    """Find (line, column, key) of every key that occurs again in its object. The text must be valid JSON."""
    repeated = []
    open_objects: list[set[str]] = []  # the keys so far; the set of a list stays empty
    last = None
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in "{[":
            open_objects.append(set())
        elif mark in "}]":
            open_objects.pop()
        elif mark == ":" and last is not None:
            key = last.group()
            if key in open_objects[-1]:
                start = last.start()
                repeated.append((text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start), key))
            open_objects[-1].add(key)
        last = token
    return repeated
