"""`killed_conversion.py RUN`: converts step 4 of a run again and again, killed at every call in turn; prints the kills.

A process of its own, as it forks: importing DeepSpeed for every kill would take minutes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.output import mute_accelerator_warning  # noqa: E402  the path comes first

mute_accelerator_warning()  # standard output carries the count

from longstride.launcher.checkpoints import universal  # noqa: E402
from longstride.launcher.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from longstride.launcher.ranks.processes import Ranks  # noqa: E402


def convert_and_die(run: Path, number: int) -> None:
    """Converts, and is killed before call `number` of those that read a tensor or touch a file."""
    calls = itertools.count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    universal.SavedState.tensor = counted(universal.SavedState.tensor)  # type: ignore[method-assign]
    for name in ("write_manifest", "flush_folder", "write_tensors"):
        setattr(universal, name, counted(getattr(universal, name)))
    for name in ("mkdir", "rename"):
        setattr(Path, name, counted(getattr(Path, name)))
    universal.ready_universal(open_checkpoint(run, 4), Ranks())
    os._exit(0)


def main(run: Path) -> int:
    """How many conversions were killed; the next process made each form again, with the same bytes."""
    checkpoint = open_checkpoint(run, 4)
    folder = universal.universal_folder(checkpoint.folder)
    wanted = contents(universal.ready_universal(checkpoint, Ranks())[0].folder)
    for number in itertools.count():
        shutil.rmtree(folder)
        child = os.fork()
        if child == 0:
            convert_and_die(run, number)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, -signal.SIGKILL), code
        if folder.exists():  # renamed, so whole
            assert contents(folder) == wanted
        assert contents(universal.ready_universal(checkpoint, Ranks())[0].folder) == wanted
        assert not list(folder.parent.glob("*.partial"))
        if code == 0:
            return number
    raise AssertionError


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
