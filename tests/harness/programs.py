"""Stand-ins for a cluster's programs: small scripts on PATH, which record how they were called."""

import os
from pathlib import Path

import pytest


class Programs:
    """A folder at the front of PATH, or the only one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool = False) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("PATH", str(folder) if alone else f"{folder}:{os.environ['PATH']}")

    def add(self, name: str, script: str = "") -> Path:
        """Add a program with this name and this shell script."""
        path = self.folder / name
        path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> "{self.folder}/{name}.calls"\n{script}\n')
        path.chmod(0o755)
        return path

    def calls(self, name: str) -> list[str]:
        """Return the words of each call, in order."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []
