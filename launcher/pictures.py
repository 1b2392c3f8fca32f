"""How verbs write a picture: by matplotlib without a screen, and never over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot as plt

from kernels.errors import ConfigError

__all__ = ["check_output", "plt", "write_picture"]


def check_output(output: Path) -> None:
    """Raise ConfigError where a picture cannot be written: told before it is drawn."""
    if output.exists():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")
    if output.suffix != ".png" or not output.parent.is_dir():
        raise ConfigError(f"--output={output}: must be a .png in a folder that exists")


def write_picture(figure: Any, output: Path) -> None:
    """Write a figure, forget it, and print where it is.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(output, dpi=120)
    except OSError as error:
        raise ConfigError(f"--output={output}: cannot be written: {error.strerror}") from None
    plt.close(figure)
    print(output)
