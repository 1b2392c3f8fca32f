"""Tiny runs for tests: a configuration, and ranks forked from a process that has imported everything."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNEQUAL = ("seconds", "tokens_per_second", "mfu", "mfu_dense_equivalent", "peak_memory_bytes")  # of two equal runs


def configuration(data: Path, output: Path) -> dict[str, Any]:
    """Return the configuration of a run of eight steps that takes a second, with dropout."""
    return {
        "model": {
            "context": 64,
            "layers": 2,
            "heads": 2,
            "width": 32,
            "attention": {"type": "fixed", "stride": 8, "summary": 2},
            "embedding": {"type": "text", "row_width": 8},
            "dropout": 0.1,
            "backend": "reference",
        },
        "data": {"path": str(data), "shuffle_bytes": 256},  # four contexts a block: a resume lands inside one
        "train": {
            "output": str(output),
            "steps": 8,
            "global_batch": 8,
            "micro_batch": 2,
            "learning_rate": 0.003,
            "warmup_steps": 2,
            "ema_decay": 0.75,
            "checkpoint_every": 4,
            "evaluate_every": 4,
            "evaluate_contexts": 6,
            "timeout_seconds": 60,
        },
        "deepspeed": "zero0_fp32",
    }


@dataclass(frozen=True)
class Ended:
    """How a spawned run ended."""

    codes: list[int]
    stdout: list[str]
    stderr: list[str]

    @property
    def refusals(self) -> list[str]:
        """Return what the ranks say of wrong input."""
        mark = "longstride: error: "
        lines = "\n".join(self.stderr).splitlines()
        return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def plain_environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables, with one thread for each rank."""
    named = rank_environment(0, 1, 0)
    return {key: value for key, value in os.environ.items() if key not in named} | {"OMP_NUM_THREADS": "1"}


class Rank:
    """A process that runs worker.py, forked from one that has imported everything already."""

    def __init__(
        self,
        arguments: list[str],
        environment: dict[str, str],
        outputs: tuple[int | None, int | None] = (None, None),
        server: socket.socket | None = None,
    ) -> None:
        """Start the process.

        Args:
            arguments: of worker.py.
            environment: all variables.
            outputs: files for standard output and error; None: a file that ``end`` reads.
            server: a connection of ``start_rank_server``; by default to one that all tests share.
        """
        self._own = [output is None for output in outputs]
        self._files = [nameless_file() if output is None else os.dup(output) for output in outputs]
        self._status, status = os.pipe()
        request = json.dumps({"arguments": arguments, "environment": environment}).encode()
        socket.send_fds(server or _rank_server(), [request], [*self._files, status])
        os.close(status)
        self._status_text = b""
        self.pid = int(self._line(120.0))
        self.returncode: int | None = None

    def wait(self, seconds: float) -> int:
        """Return its exit code, negative for a signal; subprocess.TimeoutExpired if it takes longer."""
        if self.returncode is None:
            self.returncode = int(self._line(seconds))
            os.close(self._status)
        return self.returncode

    def end(self) -> tuple[str, str]:
        """Kill it, if it still runs, and return its standard output and standard error."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(60.0)
        files = zip(self._files, self._own, strict=True)
        output, errors = (os.pread(file, 1 << 26, 0).decode() if is_own else "" for file, is_own in files)
        while self._files:
            os.close(self._files.pop())
        return output, errors

    def _line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._status_text:
            ready, *_ = select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("worker.py", seconds)
            piece = os.read(self._status, 64)
            assert piece, "the server of ranks is gone"
            self._status_text += piece
        line, _, self._status_text = self._status_text.partition(b"\n")
        return line


def hear_hangups() -> None:
    """Let SIGHUP end the process again: tests started by nohup would inherit that it is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def nameless_file() -> int:
    """Return the descriptor of a file that is deleted once it is closed."""
    file, name = tempfile.mkstemp()
    Path(name).unlink()
    return file


@functools.cache
def _rank_server() -> socket.socket:
    """Return a connection to a server that ends with this process."""
    connection, server = start_rank_server(plain_environment())
    atexit.register(server.wait, 60.0)
    atexit.register(connection.close)  # which comes first
    return connection


def start_rank_server(environment: dict[str, str]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start rank_server.py; it ends when the connection is closed."""
    connection, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(ROOT / "tests/harness/processes/rank_server.py"), str(served.fileno())]
    server = subprocess.Popen(command, env=environment, pass_fds=[served.fileno()], stderr=subprocess.DEVNULL)
    served.close()
    return connection, server


def spawn(arguments: list[str], world_size: int, extra: dict[str, str] | None = None, first: bool = False) -> Ended:
    """Run worker.py as ``world_size`` ranks; wait for all, or only for the first.

    A single rank has none of a launcher's variables.
    """
    ranks = start_ranks(arguments, world_size, extra)
    try:
        for rank in ranks[:1] if first else ranks:
            rank.wait(900.0)  # blocks of two ranks compile for minutes on a busy machine
    finally:
        outputs = [rank.end() for rank in ranks]
    return Ended([rank.wait(0.0) for rank in ranks], [out for out, _ in outputs], [error for _, error in outputs])


def complete(arguments: list[str], world_size: int, extra: dict[str, str] | None = None) -> Ended:
    """Run as ``spawn`` does, and assert that every rank has done its work."""
    ended = spawn(arguments, world_size, extra)
    assert ended.codes == [0] * world_size, ended.stderr
    return ended


@dataclass(frozen=True)
class Run:
    """The arguments of a run."""

    arguments: list[str]
    world_size: int = 2
    extra: dict[str, str] = field(default_factory=dict)


def spawn_series(runs: list[Run]) -> list[Ended]:
    """Run them in order; return how each ended."""
    return [spawn(run.arguments, run.world_size, run.extra) for run in runs]


def start_ranks(arguments: list[str], world_size: int, extra: dict[str, str] | None = None) -> list[Rank]:
    """Start ``world_size`` processes that run worker.py as one run's ranks."""
    port = free_port()
    shared = plain_environment() | (extra or {})
    places = [rank_environment(rank, world_size, port) if world_size > 1 else {} for rank in range(world_size)]
    return [Rank(arguments, shared | place) for place in places]


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def files_under(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file with its size and time of change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, without what differs between equal runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNEQUAL} for line in lines]


def timeouts() -> list[timedelta]:
    """Return the time-outs of all process groups of this process and of their store."""
    import torch

    torch_groups = torch.distributed.distributed_c10d
    groups = [group._get_backend(torch.device("cpu")).options._timeout for group in torch_groups._world.pg_map]
    store: Any = torch_groups._get_default_store()
    return [*groups, store.timeout]
