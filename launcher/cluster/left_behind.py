"""What an attempt whose launcher was lost may have left on other hosts: asked to stop, and ended where it does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from longstride.kernels import ConfigError
from longstride.launcher.cluster.supervisor import Wish
from longstride.launcher.ranks import check_unlocked
from longstride.launcher.stops import StopFile

_LOOK_SECONDS = 1.0
_ENDED_SECONDS = 60.0  # in which the system, or a file system's server, frees the lock of a process that was ended


def vacate(run: Path, stop_file: Path, wish: Wish, stop_seconds: float, end_elsewhere: Callable[[], None]) -> None:
    """Returns once nothing of an attempt writes to the run folder; leaves at once where that is asked for.

    Its first rank holds the folder's lock: it is asked to stop by the attempt's own file, saves, and all ranks end.
    ``stop_seconds``: that it may take. ``end_elsewhere``: ends what is left of the attempt on hosts that answer.

    Raises:
        ConfigError: something writes there still, such as another run.
    """
    file = StopFile(stop_file)
    try:
        free = _is_free(run)
        if not free:
            file.write("the loss of its launcher")
            free = _comes_free(run, wish, stop_seconds)
        if not wish.at_once:
            end_elsewhere()  # the other ranks may be left in either case
        if not free and not _comes_free(run, wish, _ENDED_SECONDS) and not wish.at_once:
            check_unlocked(run)
    finally:
        file.remove()


def _comes_free(run: Path, wish: Wish, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (free := _is_free(run)) and not wish.at_once and (left := end - time.monotonic()) > 0:
        wish.listen(min(left, _LOOK_SECONDS))
    return free


def _is_free(run: Path) -> bool:
    try:
        check_unlocked(run)
    except ConfigError:
        return False
    return True
