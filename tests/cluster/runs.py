"""A run that goes on until it is told to stop."""

from __future__ import annotations

import time
from pathlib import Path

# More steps than any test waits for, and no evaluation in between.
ENDLESS = ["train.steps=100000", "train.checkpoint_every=0", "train.evaluate_every=0"]


def wait_for_steps(run: Path, count: int, log: Path, timeout_seconds: float = 240) -> None:
    """Waits until a run has written so many lines."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + timeout_seconds
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "nothing was written"
        time.sleep(0.3)
