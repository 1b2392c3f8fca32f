"""Runs for large campaigns: a process that has everything imported forks the ranks of each, in a second.

A case is a line of JSON on standard input with these keys:

- `arguments`, `world_size`, `port`, and `folder` for the ranks' output.
- `chunk_rows`, or null: of a model that works in chunks.
- `traced` {rank, work, last}, or null: operations on files are logged to `folder`/operations, for the rank's first
  `save`, for one in the `background`, or while it does `prepare` its folder. The rank is killed at operation `last`, or
  after all.
- `failing` {rank, steps, bytes, folder, stop}, or null: in the saves of these steps the rank can write no longer file,
  and null for `bytes` removes the folder. In step `stop` it gets SIGTERM.
- `fault` {rank, folder, kind, number}, or null: of tests/hostile/generators/faults.py, from the start on; rank null is
  all.
- `spoil`, as in worker.py.

The answer is a line: the exit codes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[3])

from longstride.launcher.output import settle_libraries  # noqa: E402

settle_libraries(os.environ)  # standard output carries the answers

from longstride.launcher.engine.device import prepare_accelerator  # noqa: E402

prepare_accelerator()

import longstride.launcher.checkpoints.saving as saving  # noqa: E402
import longstride.launcher.train as entry  # noqa: E402
import longstride.launcher.training as training  # noqa: E402
import longstride.launcher.training.loop as loop  # noqa: E402
import tests.harness.processes.preloaded  # noqa: E402, F401
from longstride.launcher.ranks import leave  # noqa: E402
from tests.harness.processes.worker import replacing, spoil, work_in_chunks  # noqa: E402
from tests.harness.runs import rank_environment  # noqa: E402
from tests.hostile.generators import faults  # noqa: E402

ALONE_SECONDS = 10.0  # that ranks may go on after one has died, until a launcher would end them


def trace(work: str, last: int, log: Path) -> None:
    """Trace the first call of a piece of work, and kill this process during or after it."""
    owner, name = (training, "prepare_folder") if work == "prepare" else (saving.Saver, "save")

    @replacing(owner, name)
    def traced(original: Any, *arguments: Any) -> None:
        faults.arm("/", "kill before", last, log, every_thread=work == "background")
        original(*arguments)
        if work != "background":
            faults.disarm()
            os.kill(os.getpid(), signal.SIGKILL)

    if work == "background":
        finish_and(lambda: os.kill(os.getpid(), signal.SIGKILL))


def finish_and(then: Callable[[], object]) -> None:
    """Do something after the end of each save in the background."""

    @replacing(saving.Saver, "finish")
    def finish_and_go_on(finish: Any, self: Any) -> None:
        is_under_way = self._pending is not None
        finish(self)
        if is_under_way:
            then()


def fail_saves(rank: int, steps: list[int], most_bytes: int | None, folder: Path) -> None:
    """Make the saves of some steps fail on this rank as on a full disk: EFBIG needs no separate disk."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    finish_and(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, unlimited))  # what a thread writes comes after save

    @replacing(saving.Saver, "save")
    def limited(save: Any, self: Any, *arguments: Any) -> None:
        self.finish()
        fails = self._engine.global_steps in steps and self._ranks.rank == rank
        if fails and most_bytes is None:
            shutil.rmtree(folder)
        elif fails:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
        save(self, *arguments)


def signal_in_step(step: int) -> None:
    """Send SIGTERM to this rank while it computes a step."""

    @replacing(loop, "train_step")
    def signalled(train_step: Any, engine: Any, *arguments: Any) -> Any:
        if engine.global_steps + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(engine, *arguments)


def run_rank(case: dict[str, Any], rank: int) -> NoReturn:
    """Run one rank in a forked process."""
    folder, world_size = Path(case["folder"]), case["world_size"]
    os.environ.update(rank_environment(rank, world_size, case["port"]))
    for name, stream in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if case["chunk_rows"]:
        work_in_chunks(case["chunk_rows"])
    traced = case["traced"]
    if traced and traced["rank"] == rank:
        trace(traced["work"], traced["last"], folder / "operations")
    if case["spoil"]:
        spoil(case["spoil"])
    if failing := case["failing"]:
        fail_saves(failing["rank"], failing["steps"], failing["bytes"], Path(failing["folder"]))
        if failing["stop"]:
            signal_in_step(failing["stop"])
    if (fault := case["fault"]) and fault["rank"] in (None, rank):
        faults.arm(fault["folder"], fault["kind"], fault["number"], folder / "operations")
    try:
        code = entry.main(case["arguments"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


def run(case: dict[str, Any]) -> list[int]:
    """Return the exit codes of a case's ranks: negative for a signal."""
    (Path(case["folder"]) / "operations").unlink(missing_ok=True)
    pids = []
    for rank in range(case["world_size"]):
        pid = os.fork()
        if pid == 0:
            run_rank(case, rank)
        pids.append(pid)
    codes: dict[int, int] = {}
    end = time.monotonic() + 120
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                end = min(end, time.monotonic() + ALONE_SECONDS)
        elif time.monotonic() > end:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + 120
        else:
            time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
