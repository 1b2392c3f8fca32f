"""How verbs write a picture: by matplotlib without a screen, and never over a file."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot as plt

from longstride.data_pipelines.durable import write_new
from longstride.kernels import ConfigError


def check_output(output: Path, option: str = "--output") -> None:
    """Raise ConfigError where a picture cannot be written. Called before it is drawn."""
    if output.exists():
        raise ConfigError(f"{option}={output}: exists already; nothing is overwritten")
    if output.suffix != ".png" or not output.parent.is_dir():
        raise ConfigError(f"{option}={output}: must be a .png in a folder that exists")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"{option}={output}: {output.parent} cannot be written; name another folder")


def save_picture(figure: Any, output: Path, option: str = "--output") -> None:
    """Write a figure into a new file, which appears whole, and free its memory.

    Raises:
        ConfigError: the file cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    try:
        write_new(output, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"{option}={output}: cannot be written: {error.strerror}") from None
