"""The folder that an export makes: in a free place."""

from __future__ import annotations

from pathlib import Path

from longstride.kernels import ConfigError


def check_free(output: Path) -> None:
    """Raise ConfigError where something has the name already."""
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
