"""Errors of a configuration: path, value, rule and the nearest good value, one line per problem."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

_SHOWN_CHARACTERS = 80  # of a value; longer ones are truncated


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong field: ``path=value: rule``."""

    path: str  # dotted, with list positions in brackets: model.attention[0].stride; may be empty
    rule: str  # what must hold, and the nearest good value
    value: object = ...  # ``...`` means no value, as None is a value

    def __str__(self) -> str:
        """Format the problem as one line."""
        if not self.path:
            text = self.rule
        elif self.value is ...:
            text = f"{self.path}: {self.rule}"
        else:
            text = f"{self.path}={self.format_value(self.value)}: {self.rule}"
        # A name may contain line ends and control characters.
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)

    @staticmethod
    def format_value(value: object) -> str:
        """Format a value as JSON if possible, in one line, truncated to a readable length."""
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            text = " ".join(repr(value).split())
        return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


class ConfigError(ValueError):
    """A wrong configuration: all its problems, one per line."""

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(Problem("", problem) if isinstance(problem, str) else problem for problem in problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, path: str, value: object, rule: str) -> ConfigError:
        """Create the error of one field, e.g. ``at("stride", 100, "must divide context 12288; nearest 96, 128")``."""
        return cls(Problem(path, rule, value))

    @classmethod
    def joined(cls, errors: Iterable[ConfigError]) -> ConfigError:
        """Combine several errors into one."""
        return cls(*(problem for error in errors for problem in error.problems))

    def under(self, prefix: str) -> ConfigError:
        """Prepend a prefix to the path of each problem, e.g. ``under("model.attention")``."""
        return type(self)(*(replace(problem, path=join_paths(prefix, problem.path)) for problem in self.problems))


def join_paths(prefix: str, path: str) -> str:
    """Join two dotted paths; either may be empty."""
    if not prefix or not path or path.startswith("["):
        return prefix + path
    return f"{prefix}.{path}"


def nearest(key: str, names: Iterable[str]) -> str:
    """Suggest a replacement for an unknown key: the nearest known one, or all of them."""
    names = list(names)
    close = difflib.get_close_matches(key, names, n=1)
    if close:
        return f"nearest {close[0]}"
    return f"known: {', '.join(names)}" if names else "no key is known here"
