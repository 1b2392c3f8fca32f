"""Lines of metrics.jsonl, incidents and manifests as runs write them, for tests of their readers."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longstride.launcher.checkpoints.manifest import FORMAT_VERSION, CheckpointManifest, record_files, write_manifest
from longstride.launcher.training.guards import Incident


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


def incident(**changes: Any) -> Incident:
    """Return the incident of step 5 of two processes, which was skipped, with some fields changed."""
    stream = {"fingerprint": "f", "seed": 0, "epoch": 0, "step": 4, "global_batch": 8}
    content: dict[str, Any] = {
        "step": 5, "guard": "non_finite", "outcome": "skip", "reason": "the loss is nan", "loss_nats": "nan",
        "rank_nats": [3.5, "-inf"], "tokens": 512, "grad_norm": None, "loss_scale": 1.0, "learning_rate": 0.1,
        "world_size": 2, "origin": {"step": 0, "stream": stream | {"step": 0}}, "stream": stream,
        "stream_after": stream | {"step": 5}, "sample_ids": [1, 2, 3], "sample_ids_crc32": 17,
    }  # fmt: skip
    return Incident(**content | changes)


def manifest_of(folder: Path | None, **changes: Any) -> CheckpointManifest:
    """Return the manifest of a checkpoint of one process, with the files of a folder; write it there."""
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION, "step": 4, "world_size": 1, "zero_stage": 0, "precision": "fp32",
        "stream": {}, "parameter_groups": [], "versions": {}, "files": {},
    }  # fmt: skip
    manifest = CheckpointManifest.model_validate(content | changes)
    if folder is not None:
        manifest = manifest.model_copy(update={"files": record_files(folder)})
        write_manifest(folder, manifest)
    return manifest
