"""Loader workers that are killed or stopped at a moment of a run: what a rank of a test does to its own.

Asked for by the environment of tests/harness/processes/worker.py: LOSE_WORKER is `WHAT,WHEN,RANK,STEP,NOTE`.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

WHATS = ("killed", "stopped", "stopped before its rank is killed")
WHENS = ("computing", "waiting", "evaluating")


def lose_worker(text: str) -> None:
    """Make a rank lose its first worker while it computes a step, waits for its data, or evaluates it.

    This happens once: the file NOTE of WHAT,WHEN,RANK,STEP,NOTE, which gets the ids of the rank's workers, records it.
    """
    import longstride.launcher.training.loop as loop
    from longstride.data_pipelines.order.workers import Workers

    what, when, rank, step, path = text.split(",", 4)
    note = Path(path)
    if os.environ.get("RANK", "0") != rank:
        return

    def hit() -> None:
        pids = sorted(each.pid for each in multiprocessing.active_children() if each.pid is not None)
        with note.open("x") as file:
            file.write(" ".join(map(str, pids)))
        _lose(pids[0], what, waiting=when == "waiting")

    owner: Any = Workers if when == "waiting" else loop
    name = {"computing": "train_step", "waiting": "take", "evaluating": "evaluate_split"}[when]
    work = getattr(owner, name)
    calls = []

    def work_and_lose(*args: Any) -> Any:
        calls.append(name)
        at = len(calls) if when == "waiting" else args[0].global_steps + (when == "computing")
        if at == int(step) and not note.exists():
            hit()
        return work(*args)

    setattr(owner, name, work_and_lose)


def _lose(pid: int, what: str, waiting: bool) -> None:
    """Returns once the worker is gone or stopped; or, where the rank is to wait first, leaves the rest to a thread."""
    if waiting or what != "killed":
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def end() -> None:
        if waiting:
            _await_waiting(pid)
        if what == "killed":
            os.kill(pid, signal.SIGKILL)
            if not waiting:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        elif what != "stopped":
            os.kill(os.getpid(), signal.SIGKILL)

    if waiting:
        threading.Thread(target=end, daemon=True).start()
    else:
        end()


def _await_waiting(pid: int) -> None:
    """Wait until the main thread waits for that worker, after taking all that it sent."""
    while True:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame is not None and frame.f_code.co_name != "_wait_for_item":
            frame = frame.f_back  # type: ignore[assignment]
        worker = None if frame is None else frame.f_locals["self"]
        if worker is not None and worker.process.pid == pid and worker._received.empty():
            return
        time.sleep(0.01)
