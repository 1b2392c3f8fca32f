"""What a run writes where a guard acts: `<run>/guards/step-00000123.json`, and everything that a replay needs.

Numbers that are no finite ones are the texts "nan", "inf" and "-inf", which JSON has no numbers for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import write_json
from longstride.launcher.config import GuardPolicy, load_json_object
from longstride.launcher.output import file_names
from longstride.launcher.training.guards import Verdict
from longstride.sparse_model import StrictModel

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?\.json")
Number = float | str


class Origin(StrictModel):
    """Where the steps before an incident began: at the beginning, a resume or a rewind."""

    step: int = Field(ge=0)  # of the checkpoint; 0: none
    stream: dict[str, Any]  # data_pipelines.StreamState: the first batch behind it


class Incident(StrictModel):
    """One step that a guard did not let pass."""

    step: int = Field(gt=0)
    guard: str
    outcome: GuardPolicy
    reason: str
    loss_nats: Number
    rank_nats: list[Number]  # sums over the bytes of each rank
    tokens: int  # bytes of all ranks
    grad_norm: Number | None  # None: no finite number, or not asked for
    loss_scale: float
    learning_rate: float
    world_size: int = Field(gt=0)
    origin: Origin
    stream: dict[str, Any]  # before the batch
    stream_after: dict[str, Any]
    rewound_to: int | None = None  # the checkpoint's step
    sample_ids: list[int]  # of the whole global batch, in order
    sample_ids_crc32: int


def as_number(value: float) -> Number:
    """A float as JSON can say it; ``float`` takes it back."""
    return value if math.isfinite(value) else str(value)


def write_incident(run: Path, incident: Incident) -> Path:
    """Writes the file of an incident beside those of the same step; returns its path."""
    folder = run / file_names.GUARDS
    folder.mkdir(exist_ok=True)
    stem = f"step-{incident.step:08d}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    write_json(path, incident.model_dump(mode="json"))
    return path


def read_incidents(run: Path) -> dict[Path, Incident]:
    """The incidents of a run; of each step the newest first.

    Raises:
        ConfigError: a file is damaged.
    """
    paths = (run / file_names.GUARDS).glob("*.json")
    found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 1)), reverse=True)
    incidents = {}
    for _, path in found:
        try:
            incidents[path] = Incident.model_validate(load_json_object(path))
        except ConfigError as error:
            raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from None
    return incidents


def make_incident(line: Mapping[str, Any], verdict: Verdict, **rest: Any) -> Incident:
    """The incident of a guarded step's line of metrics.jsonl, the verdict on it, and what neither holds."""
    names = ("step", "rank_nats", "tokens", "grad_norm", "loss_scale", "learning_rate", "sample_ids_crc32")
    return Incident(
        guard=verdict.guard,
        outcome=verdict.outcome,
        reason=verdict.reason,
        loss_nats=as_number(sum(map(float, line["rank_nats"])) / line["tokens"]),
        **{name: line[name] for name in names},
        **rest,
    )
