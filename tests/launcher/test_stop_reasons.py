"""Reasons to stop: a time limit, a stop file, the loss of the launcher."""

import time
from pathlib import Path

from longstride.launcher.stops import LEAVE_AT_ONCE, LauncherGone, StopFile, time_is_up


def test_time_is_up_after_so_many_seconds_of_the_process() -> None:
    assert time_is_up(60.0, started=time.time())() is None
    assert time_is_up(60.0, started=time.time() - 59.0)() is None
    assert time_is_up(60.0, started=time.time() - 61.0)() == "train.max_seconds=60"


def test_stop_file_carries_the_reason_and_goes_with_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = StopFile(run / ".stop-1")
    assert file() is None
    StopFile(run / ".stop-2").write("SIGTERM")  # another run's
    assert file() is None
    file.write("SIGINT")
    assert file() == "SIGINT"
    file.write(LEAVE_AT_ONCE)
    assert file() == LEAVE_AT_ONCE
    file.remove()
    assert [path.name for path in run.iterdir()] == [".stop-2"]
    alone = StopFile(tmp_path / "unborn" / ".stop-3")
    alone.write("SIGINT")
    alone.remove()
    assert not (tmp_path / "unborn").exists()


def test_process_by_itself_has_no_launcher_to_lose() -> None:
    assert LauncherGone({})._links == []
    gone = LauncherGone({"RANK": "0"})
    assert gone() is None
    gone._links = [(child, parent + 1) for child, parent in gone._links]
    assert gone() == "the end of its launcher"
