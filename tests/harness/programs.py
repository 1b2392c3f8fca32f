"""Programs of a cluster that is not there: small scripts on PATH, which note how they were called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Programs:
    """A folder in front of everything else on PATH, or alone on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool = False) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", str(folder) if alone else f"{folder}:{os.environ['PATH']}")

    def add(self, name: str, script: str = "") -> Path:
        """A program of that name; what it does is shell."""
        path = self.folder / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> "{self.folder}/{name}.calls"\n{script}\n')
        path.chmod(0o755)
        return path

    def calls(self, name: str) -> list[str]:
        """The words of each call, in turn."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []
