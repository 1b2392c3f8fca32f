"""Find classes by the `type` of a JSON object: built-in names, names that packages register, and import paths.

A package registers a class as an entry point of a group, such as ``longstride.mixers``. "package.module:Class" names
any class that can be imported. A class of another package is imported only when a `type` names it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from longstride.kernels.errors import ConfigError

_MOST_CHARACTERS = 200  # of another package's error


def class_named(kind: str, builtin: Mapping[str, type], group: str) -> type | None:
    """Find the class that a `type` names: a built-in one, an entry point of the group, or an import path.

    Returns:
        The class, or None if there is no such name.

    Raises:
        ConfigError: the class cannot be imported, or two packages register the name; the path is `type`.
    """
    if kind in builtin:
        return builtin[kind]
    path = kind
    if ":" not in kind:
        paths = {entry.value for entry in metadata.entry_points(group=group, name=kind)}
        if not paths:
            return None
        if len(paths) > 1:
            raise ConfigError.at("type", kind, f"is registered more than once; give one of {', '.join(sorted(paths))}")
        (path,) = paths
    module, _, name = path.partition(":")
    try:
        cls = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # importing another package may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_CHARACTERS]}"
        rule = f"cannot be imported ({why}); install its package for every process, or correct the path"
        raise ConfigError.at("type", kind, rule) from None
    if not isinstance(cls, type):
        raise ConfigError.at("type", kind, f"must name a class, and {path} is of type {type(cls).__name__}")
    return cls


def registered_names(group: str) -> list[str]:
    """List the names that installed packages register in a group."""
    return sorted(metadata.entry_points(group=group).names)


def foreign_schema(*groups: str) -> dict[str, Any]:
    """Return the JSON schema of an object with a class of another package, which checks the other keys itself."""
    path = {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"}
    names = [{"enum": names} for group in groups if (names := registered_names(group))]
    kinds = {
        "anyOf": [*names, path],
        "description": "of another package: package.module:Class, or a name that it registers",
    }
    return {"type": "object", "properties": {"type": kinds}, "required": ["type"]}


def import_path(cls: type) -> str:
    """Return the `type` that names the class in any process that can import its module."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_foreign(cls: type) -> bool:
    """Whether the class comes from another package."""
    return not cls.__module__.startswith("longstride.")


def source_of(cls: type) -> str:
    """Return the distribution, its version and the SHA-256 of the file that defines a class of another package."""
    names = metadata.packages_distributions().get(cls.__module__.partition(".")[0], ())
    packages = [f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)]
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    if file is not None:
        packages.append(f"source {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}")
    return ", ".join(packages) or "unknown"
