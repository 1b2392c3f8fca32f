"""Runs of worker.py one after another, whose ranks are forked from one process that has imported everything once.

Importing torch and DeepSpeed is most of what a tiny run costs.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.launcher.runs import ROOT, Ended, free_port, plain_environment, rank_environment

_SECONDS = 240  # of one run, on a machine that does much else


@dataclass(frozen=True)
class Run:
    """What a run is started with."""

    arguments: list[str]
    world_size: int = 2
    extra: dict[str, str] = field(default_factory=dict)


def spawn_series(runs: list[Run]) -> list[Ended]:
    """Runs them in order; returns how each ended."""
    with tempfile.TemporaryDirectory() as folder:
        work = [{"port": free_port(), "output": f"{folder}/{number}", **vars(run)} for number, run in enumerate(runs)]
        command = [sys.executable, __file__, json.dumps(work)]
        done = subprocess.run(
            command, env=plain_environment(), cwd="/", capture_output=True, text=True, timeout=_SECONDS * len(runs)
        )
        assert done.returncode == 0, done.stderr
        codes = json.loads(done.stdout)
        ended = []
        for number, own in enumerate(codes):
            texts = [
                [Path(f"{folder}/{number}.{rank}.{name}").read_text() for rank in range(len(own))]
                for name in ("out", "err")
            ]
            ended.append(Ended(own, *texts))
        return ended


def _run(work: dict) -> list[int]:
    """Forks the ranks of one run and waits for them; returns their exit codes."""
    children = []
    for rank in range(work["world_size"]):
        child = os.fork()
        if child == 0:
            _become_rank(rank, work)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _become_rank(rank: int, work: dict) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{work['output']}.{rank}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(work["extra"])
    if work["world_size"] > 1:
        os.environ.update(rank_environment(rank, work["world_size"], work["port"]))
    sys.argv = [str(ROOT / "tests/launcher/worker.py"), *work["arguments"]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    from launcher.cpu_accelerator import prepare_accelerator

    prepare_accelerator()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    print(json.dumps([_run(work) for work in json.loads(sys.argv[1])]))
