"""The universal form of a checkpoint: its state by parameter, whatever the ranks, stage and precision that saved it.

Format 1, `checkpoints/.step-00001000.universal/`, made from `step-00001000/` for the first run in another layout:

    manifest.json           this, with a SHA-256 over its own content and that of the checkpoint's manifest
    fp32.safetensors        the master weights
    exp_avg.safetensors     Adam's moments; no moments are there before the first step
    exp_avg_sq.safetensors
    momentum_buffer.safetensors         of Muon
    row_var.safetensors                 of Adafactor, for matrices; beside it col_var
    variance.safetensors                of Adafactor, for vectors
    ema.safetensors         the moving average of the weights, where one is kept
    buffers.safetensors     what the model's parts keep beside weights, where they do
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longstride.data_pipelines.durable import flush_folder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.manifest import (
    MANIFEST,
    FileRecord,
    check_space,
    find_damage,
    sealed,
    write_manifest,
)
from longstride.launcher.checkpoints.saved_state import COUNTERS, KINDS, MASTER, SCHEDULE, SavedState
from longstride.launcher.config import load_json_object
from longstride.launcher.models import write_tensors
from longstride.launcher.output import AgreedError, say
from longstride.launcher.ranks import Ranks, wait_until_visible
from longstride.sparse_model import StrictModel

UNIVERSAL_VERSION = 1
_REPORT_SECONDS = 10.0
_BUFFERS = "buffers.safetensors"


class UniversalManifest(StrictModel):
    """The content of its manifest.json."""

    format_version: int
    source_sha256: str  # of the checkpoint's manifest.json
    adam_step: float | None  # null: Adam has not begun
    numbers: dict[str, int]  # the engine's counters, ``COUNTERS``
    schedule: dict[str, int]  # of the learning rate: how far it is
    loss_scale: dict[str, float] | None  # of a dynamic one
    files: dict[str, FileRecord] = Field(min_length=1)


class Universal:
    """A universal form whose manifest could be read and belongs to its checkpoint."""

    def __init__(self, folder: Path, manifest: UniversalManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that it has, some of ``KINDS``."""
        return tuple(kind for kind in KINDS if _file_name(kind) in self.manifest.files)

    def has(self, name: str, kind: str) -> bool:
        """Whether there is a tensor of a kind for a parameter."""
        return kind in self.kinds and name in self._file(kind).keys()  # noqa: SIM118, no mapping

    def flat(self, name: str, kind: str) -> Tensor:
        """One parameter's elements as a flat tensor; they stay on the disk until they are used."""
        return self._file(kind).get_tensor(name).flatten()

    def buffers(self) -> dict[str, Tensor]:
        """What the model's parts keep beside their weights, by name, fp32."""
        return load_file(self.folder / _BUFFERS) if _BUFFERS in self.manifest.files else {}

    def _file(self, kind: str) -> Any:
        if kind not in self._open:
            self._open[kind] = safe_open(self.folder / _file_name(kind), "pt")
        return self._open[kind]


def universal_folder(checkpoint: Path) -> Path:
    """Where the universal form of a checkpoint folder lies."""
    return checkpoint.with_name(f".{checkpoint.name}.universal")


def ready_universal(checkpoint: Checkpoint, ranks: Ranks) -> tuple[Universal, float]:
    """The universal form of a verified checkpoint, verified, and the seconds that making it took (0: it was there).

    The first rank makes it while the others wait; all of them verify a share. All ranks must call, and nothing else may
    be writing to this run.

    Raises:
        AgreedError: on every rank, where it cannot be made.
    """
    began, is_new = time.monotonic(), False
    for attempt in range(2):
        is_new |= ranks.first_works(lambda: _make_unless_there(checkpoint))
        # A shared file system may show other hosts a little later what the first rank has just renamed.
        form = wait_until_visible(partial(open_universal, checkpoint), time.monotonic())
        if form:
            names = sorted(form.manifest.files)[ranks.rank :: ranks.world_size]
            damage = find_damage(form.folder, names, form.manifest.files)
        else:
            damage = [f"{universal_folder(checkpoint.folder)}: is not to be seen here"]
        damage = list(dict.fromkeys(line for lines in ranks.gather_objects(damage) for line in lines))
        if form and not damage:
            return form, time.monotonic() - began if is_new else 0.0
        if attempt == 0 and ranks.is_first:
            for line in damage:
                say(f"made again: {line}")
            (universal_folder(checkpoint.folder) / MANIFEST).unlink(missing_ok=True)
    raise AgreedError("\n".join(damage))


def open_universal(checkpoint: Checkpoint) -> Universal | None:
    """The universal form that a checkpoint has; None where there is none, or one of something else."""
    folder = universal_folder(checkpoint.folder)
    try:
        content = load_json_object(folder / MANIFEST, follow_links=False)
        if content != sealed(content) or content["format_version"] != UNIVERSAL_VERSION:
            return None
        del content["sha256"]
        manifest = UniversalManifest.model_validate(content)
    except (ConfigError, ValidationError, KeyError):
        return None
    whole = manifest.files.keys() <= {_BUFFERS, *map(_file_name, KINDS)} and _file_name(MASTER) in manifest.files
    whole = whole and sorted(manifest.numbers) == sorted(COUNTERS) and sorted(manifest.schedule) == sorted(SCHEDULE)
    whole = whole and manifest.numbers["global_steps"] == checkpoint.manifest.step
    if not whole or manifest.source_sha256 != checkpoint.manifest_digest():
        return None
    return Universal(folder, manifest)


def _make_unless_there(checkpoint: Checkpoint) -> bool:
    """Makes the universal form where there is none; returns whether it did."""
    if open_universal(checkpoint):
        return False
    folder = universal_folder(checkpoint.folder)
    unfinished = folder.with_name(f"{folder.name}.partial")
    for left in (*folder.parent.glob(".step-*.universal.partial"), folder):  # of killed processes; of an old checkpoint
        shutil.rmtree(left, ignore_errors=True)
    state = SavedState(checkpoint)
    needed = 4 * sum(shape.numel() for kind in state.kinds for shape in state.shapes_of(kind).values())
    check_space(folder.parent, needed, str(folder.parent), "converting takes")
    unfinished.mkdir()
    try:
        tensors, files = _all_tensors(state, checkpoint), {}
        for kind in state.kinds:
            shapes = state.shapes_of(kind)
            size, sha256 = write_tensors(unfinished / _file_name(kind), shapes, islice(tensors, len(shapes)))
            files[_file_name(kind)] = FileRecord(bytes=size, sha256=sha256)
        if buffers := state.buffers:
            shapes = {name: buffer.shape for name, buffer in buffers.items()}
            size, sha256 = write_tensors(unfinished / _BUFFERS, shapes, buffers.values())
            files[_BUFFERS] = FileRecord(bytes=size, sha256=sha256)
        manifest = UniversalManifest(
            format_version=UNIVERSAL_VERSION,
            source_sha256=checkpoint.manifest_digest(),
            adam_step=state.adam_step,
            numbers=state.numbers,
            schedule=state.schedule,
            loss_scale=state.loss_scale,
            files=files,
        )
        write_manifest(unfinished, manifest)
        flush_folder(unfinished)
        unfinished.rename(folder)
        flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return True


def _all_tensors(state: SavedState, checkpoint: Checkpoint) -> Iterator[Tensor]:
    """All tensors, kind after kind, with a line now and then that says how many have been taken."""
    every, reported = [(kind, name) for kind in state.kinds for name in state.shapes_of(kind)], time.monotonic()
    for done, (kind, name) in enumerate(every):
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            say(f"converting {checkpoint.folder}: {100 * done // len(every)} %")
        yield state.tensor(name, kind)


def _file_name(kind: str) -> str:
    return f"{kind}.safetensors"
