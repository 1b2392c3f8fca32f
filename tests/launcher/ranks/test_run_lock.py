"""One run at a time in a folder, and how far a run has come."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster.start import Progress, is_done, read_progress
from longstride.launcher.output.file_names import OVER
from longstride.launcher.ranks.processes import Ranks, check_unlocked, run_lock
from tests.harness.lines import step_line

# Another process that takes the lock, says whether it got it, and holds it until it is told to end.
_TAKE = """
import fcntl, sys
file = open(sys.argv[1], "a+")
try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.truncate(0)
    file.write("process 7 on elsewhere\\n")
    file.flush()
    print("taken", flush=True)
    sys.stdin.read()
except BlockingIOError:
    print("refused", flush=True)
"""


@contextmanager
def other(run: Path) -> Iterator[str]:
    """Another process that tries to lock a folder; what it says."""
    command = [sys.executable, "-I", "-c", _TAKE, str(run / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def test_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    check_unlocked(run)
    assert not run.exists()
    with run_lock(run, Ranks()), other(run) as said:
        assert said == "refused"
    with other(run) as said:
        assert said == "taken"
        message = "another run writes there \\(process 7 on elsewhere\\); wait for it, or name another folder"
        with pytest.raises(ConfigError, match=message):
            check_unlocked(run)
        with pytest.raises(ConfigError, match=message), run_lock(run, Ranks()):
            pass
    check_unlocked(run)  # the other one has ended


def test_progress_is_read_from_names_and_the_last_lines(tmp_path: Path) -> None:
    assert read_progress(tmp_path) == Progress(0, 0)
    assert not is_done(tmp_path, None)
    for name in ("step-00000004", "step-00000012", "step-00000016.replaced-1", ".step-00000020.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    lines = [json.dumps(step_line(step, notes="x" * 5000)) for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[41]", '{"step": 4']))
    assert read_progress(tmp_path) == Progress(12, 40)
    for steps, done in ((12, True), (16, False)):
        (tmp_path / "config.json").write_text(json.dumps({"train": {"steps": steps}}))
        assert is_done(tmp_path, None) is done
        assert is_done(tmp_path, 12) and not is_done(tmp_path, 16)  # whatever an earlier start was to do
    for step, done in ((8, False), (4, True)):  # at which train.stop_when ended the run, not saved and saved
        (tmp_path / OVER).write_text(f"{step}\n")
        assert is_done(tmp_path, 16) is done


def test_file_system_without_locks_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", unsupported)
    with run_lock(tmp_path, Ranks()):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    line = (
        f"longstride: {tmp_path}: this file system does not support locks; make sure that no second run writes there\n"
    )
    assert capsys.readouterr().err == line
