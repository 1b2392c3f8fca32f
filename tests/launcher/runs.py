"""Runs for the tests of this room: a tiny configuration, and its ranks spawned directly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNEQUAL = ("seconds", "tokens_per_second")  # of two equal runs


def configuration(data: Path, output: Path) -> dict[str, Any]:
    """A run of eight steps that takes a second, dropout included."""
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


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def plain_environment() -> dict[str, str]:
    """This process's environment without a launcher's variables, one thread a rank."""
    named = rank_environment(0, 1, 0)
    return {key: value for key, value in os.environ.items() if key not in named} | {"OMP_NUM_THREADS": "1"}


def spawn(arguments: list[str], world_size: int, extra: dict[str, str] | None = None, first: bool = False) -> Ended:
    """Runs worker.py as so many ranks (1: without any launcher's variables); waits for all, or for the first alone."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        environment = plain_environment() | (extra or {})
        if world_size > 1:
            environment |= rank_environment(rank, world_size, port)
        command = [sys.executable, str(ROOT / "tests/launcher/worker.py"), *arguments]
        ranks.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
            )
        )
    try:
        outputs = [rank.communicate(timeout=120) for rank in (ranks[:1] if first else ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return Ended([rank.returncode for rank in ranks], [out for out, _ in outputs], [error for _, error in outputs])


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def files_under(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and time of change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without what differs between equal runs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in UNEQUAL} for line in lines]
