"""A folder that is there whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longstride.data_pipelines.durable import flush_folder
from longstride.kernels import ConfigError


def check_free(output: Path) -> None:
    """Raise ConfigError where something has the name already."""
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output={output}: exists already; nothing is overwritten")


@contextmanager
def made_whole(output: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name once the block has ended; where the block fails, nothing is left."""
    folder = output.with_name(f".{output.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.mkdir(parents=True)
    try:
        yield folder
        flush_folder(folder)
        folder.rename(output)
        flush_folder(output.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # something else has come to lie there
            for parent in missing:
                parent.rmdir()
        raise
