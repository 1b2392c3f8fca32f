"""A finding of the doctor, and the children by which it looks at what may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import longstride

ROOT = str(Path(longstride.__file__).resolve().parents[1])  # of this code, for a child's path
CHILD_SECONDS = 180.0  # a first import of torch and DeepSpeed from a slow disk takes a minute


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one subject, and how it is mended where it is not well."""

    subject: str
    state: Literal["ok", "warning", "broken"]
    text: str
    mend: str | None = None

    def __str__(self) -> str:
        """A line of it."""
        return f"{self.state:<8} {self.subject}: {self.text}{f'; {self.mend}' if self.mend else ''}"


def answer_of_child(
    words: list[str], seconds: float = CHILD_SECONDS, environment: dict[str, str] | None = None
) -> dict[str, Any] | str:
    """The JSON object that a child of this Python prints last, or in words why there is none."""
    command = [sys.executable, *words]
    # Last on its path, where it hides no other package.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT]))
    try:
        ended = subprocess.run(
            command,
            env={**(os.environ if environment is None else environment), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:g} seconds"
    return parsed(ended)


def parsed(ended: subprocess.CompletedProcess[str]) -> dict[str, Any] | str:
    """The JSON object on the last line that a program has printed, or the last line of what it says is wrong."""
    try:
        found = json.loads(ended.stdout.strip().splitlines()[-1])
        if isinstance(found, dict):
            return found
    except (IndexError, ValueError):
        pass
    if ended.returncode < 0:
        return f"ended by signal {-ended.returncode}"
    return (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}, without a word"])[-1].strip()
