"""JSON files written by hand: errors with line and column, keys that stand twice, ``path.to.key=value`` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstride.kernels import ConfigError, join_paths

_DEEPEST = 64  # objects and lists within each other
# A string, or a mark of structure: enough to find keys.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')


def load_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: no such file, not UTF-8, not JSON (with line and column), a key twice in one object, not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: must be UTF-8; byte {error.start} is not") from None
    try:
        content = _parse(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except _ConstantError as error:
        raise ConfigError(f"{path}: {error} is not JSON; give a finite number") from None
    except RecursionError:
        raise ConfigError(f"{path}: objects and lists nested more than {_DEEPEST} deep") from None
    twice = _repeated_keys(text)
    if twice:
        raise ConfigError(*(f"{path}:{line}:{column}: key {key} stands twice" for line, column, key in twice))
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return content


def parse_override(text: str) -> tuple[list[str], Any]:
    """``train.steps=10`` as (["train", "steps"], 10); a value that is no JSON is a string.

    Raises:
        ConfigError: no ``=``, or an empty part of the path.
    """
    path, equals, value = text.partition("=")
    parts = path.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{text}: must be path.to.key=value, such as train.steps=100")
    try:
        return parts, _parse(value)
    except (json.JSONDecodeError, _ConstantError):
        return parts, value
    except RecursionError:
        raise ConfigError(f"{path}: objects and lists nested more than {_DEEPEST} deep") from None


def put(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Sets a nested key in place, making the objects on the way.

    Raises:
        ConfigError: the path leads through something that is no object.
    """
    place = content
    for number, part in enumerate(parts[:-1]):
        below = place.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError.at(".".join(parts[: number + 1]), below, f"has no key {parts[number + 1]} to override")
        place = below
    place[parts[-1]] = value


def flattened(content: object, prefix: str = "") -> dict[str, object]:
    """Nested objects as one object of dotted paths; lists count as values."""
    if not isinstance(content, dict) or not content:
        return {prefix: content}
    flat: dict[str, object] = {}
    for key, value in content.items():
        flat.update(flattened(value, join_paths(prefix, key)))
    return flat


class _ConstantError(Exception):
    """NaN or Infinity in the text."""


def _refuse_constant(name: str) -> None:
    raise _ConstantError(name)


def _parse(text: str) -> Any:
    """The value of a JSON text. Raises RecursionError where it is nested too deep for what reads the value."""
    content = json.loads(text, parse_constant=_refuse_constant)
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token.group() in "{[") - (token.group() in "}]")
        if depth > _DEEPEST:
            raise RecursionError
    return content


def _repeated_keys(text: str) -> list[tuple[int, int, str]]:
    """(line, column, key) of every key that its object holds already; the text is known to be JSON."""
    repeated = []
    open_objects: list[set[str]] = []  # the keys so far; a list has an empty set that never fills
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
