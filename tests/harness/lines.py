"""Lines of metrics.jsonl as runs write them, for tests of its readers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def step_line(step: int, bits: float | None = 1.0, split: str = "train", **more: Any) -> dict[str, Any]:
    """Return the line of a training step, with the keys that every version has written."""
    return {
        "step": step, "split": split, **losses(bits), "learning_rate": 0.01, "loss_scale": 1.0, "grad_norm": 1.0,
        "skipped_steps": 0, "sample_ids_crc32": step, "epoch": 0, **more,
    }  # fmt: skip


def evaluation_line(step: int, bits: float | None = 1.0, split: str = "validation", **more: Any) -> dict[str, Any]:
    """Return the line of an evaluation, with the keys that every version has written."""
    return {"step": step, "split": split, **losses(bits), "tokens": 64, "seconds": 0.5, **more}


def losses(bits: float | None) -> dict[str, float | None]:
    """Return the same loss in nats and in bits."""
    return {"loss_nats": None if bits is None else bits * math.log(2), "bits_per_byte": bits}


def write_metrics(run: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write the metrics.jsonl of a run folder."""
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
