"""The universal form of a checkpoint: its state by parameter, without reference to ranks, stages or precision.

Format 1, `checkpoints/.step-00001000.universal/`, made from `step-00001000/` when a run first goes on otherwise:

    manifest.json           this, with a SHA-256 over its own content and that of the checkpoint's manifest
    fp32.safetensors        the master weights
    exp_avg.safetensors     Adam's moments; neither is there before Adam's first step
    exp_avg_sq.safetensors
    ema.safetensors         the moving average of the weights, where one is kept
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from safetensors import safe_open
from torch import Tensor

from longstride.kernels.errors import ConfigError
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.manifest import MANIFEST, FileRecord, find_damage, flush_folder, sealed, write_json
from longstride.launcher.checkpoints.saved_state import KINDS, MASTER, SavedState
from longstride.launcher.checkpoints.tensor_file import write_tensors
from longstride.launcher.config import load_json_object
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import Ranks
from longstride.sparse_model.strict import StrictModel

UNIVERSAL_VERSION = 1
_TELL_SECONDS = 10.0
_POLL_SECONDS = 0.2
_SEEN_SECONDS = 20.0


class UniversalManifest(StrictModel):
    """The content of its manifest.json."""

    format_version: int
    source_sha256: str  # of the checkpoint's manifest.json
    adam_step: float | None  # null: Adam has not begun
    numbers: dict[str, int]  # the engine's counters
    schedule: dict[str, Any]  # of the learning rate: how far it is
    loss_scale: dict[str, float] | None  # of a dynamic one
    files: dict[str, FileRecord] = Field(min_length=1)


class Universal:
    """A universal form whose manifest could be read and belongs to its checkpoint."""

    def __init__(self, folder: Path, manifest: UniversalManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that it has, of ``KINDS``."""
        return tuple(kind for kind in KINDS if _file_name(kind) in self.manifest.files)

    def flat(self, name: str, kind: str) -> Tensor:
        """One parameter's elements in a row; they stay on the disk until they are used."""
        if kind not in self._open:
            self._open[kind] = safe_open(self.folder / _file_name(kind), "pt")
        return self._open[kind].get_tensor(name).flatten()


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
    began, made = time.monotonic(), False
    for attempt in range(2):
        made |= ranks.first_works(lambda: _made(checkpoint))
        form = _seen(checkpoint)
        damage = _damage(form, ranks) if form else [f"{universal_folder(checkpoint.folder)}: is not to be seen here"]
        damage = list(dict.fromkeys(line for lines in ranks.gather_objects(damage) for line in lines))
        if form and not damage:
            return form, time.monotonic() - began if made else 0.0
        if attempt == 0 and ranks.is_first:
            for line in damage:
                print(f"longstride: made again: {line}", file=sys.stderr, flush=True)
            (universal_folder(checkpoint.folder) / MANIFEST).unlink(missing_ok=True)
    raise AgreedError("\n".join(damage))


def open_universal(checkpoint: Checkpoint) -> Universal | None:
    """The universal form that a checkpoint has; None where there is none, or one of something else."""
    folder = universal_folder(checkpoint.folder)
    try:
        content = load_json_object(folder / MANIFEST)
        if content != sealed(content) or content["format_version"] != UNIVERSAL_VERSION:
            return None
        del content["sha256"]
        manifest = UniversalManifest.model_validate(content)
    except (ConfigError, ValidationError, KeyError):
        return None
    whole = manifest.files.keys() <= {_file_name(kind) for kind in KINDS} and _file_name(MASTER) in manifest.files
    if not whole or manifest.source_sha256 != _source_sha256(checkpoint):
        return None
    return Universal(folder, manifest)


def _seen(checkpoint: Checkpoint) -> Universal | None:
    """The form that the first rank has just named; a shared file system may show it to other hosts a little later."""
    end = time.monotonic() + _SEEN_SECONDS
    while (form := open_universal(checkpoint)) is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    return form


def _made(checkpoint: Checkpoint) -> bool:
    """Makes the universal form unless it is there; returns whether it was made."""
    if open_universal(checkpoint):
        return False
    _make(checkpoint)
    return True


def _make(checkpoint: Checkpoint) -> None:
    """Writes the form beside its place and renames it there."""
    folder = universal_folder(checkpoint.folder)
    partial = folder.with_name(f"{folder.name}.partial")
    for left in (*folder.parent.glob(".step-*.universal.partial"), folder):  # of killed processes; of an old checkpoint
        shutil.rmtree(left, ignore_errors=True)
    state = SavedState(checkpoint)
    _check_space(folder.parent, state)
    partial.mkdir()
    try:
        progress = _Progress(checkpoint, len(state.kinds) * len(state.shapes))
        files = {}
        for kind in state.kinds:
            tensors = progress.over(state.tensor(name, kind) for name in state.shapes)
            files[_file_name(kind)] = write_tensors(partial / _file_name(kind), state.shapes, tensors)
        manifest = UniversalManifest(
            format_version=UNIVERSAL_VERSION,
            source_sha256=_source_sha256(checkpoint),
            adam_step=state.step,
            numbers=state.numbers,
            schedule=state.schedule,
            loss_scale=state.loss_scale,
            files=files,
        )
        write_json(partial / MANIFEST, sealed(manifest.model_dump(mode="json")))
        flush_folder(partial)
        partial.rename(folder)
        flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_space(folder: Path, state: SavedState) -> None:
    """Whether the form fits on the disk; ConfigError if not."""
    needed = 4 * len(state.kinds) * sum(shape.numel() for shape in state.shapes.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        rule = f"converting takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make room"
        raise ConfigError(f"{folder}: {rule}")


class _Progress:
    """A line now and then while many tensors are converted."""

    def __init__(self, checkpoint: Checkpoint, total: int) -> None:
        self._checkpoint, self._total, self._done = checkpoint, total, 0
        self._told = time.monotonic()

    def over(self, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same tensors, counted."""
        for tensor in tensors:
            yield tensor
            self._done += 1
            if time.monotonic() - self._told > _TELL_SECONDS:
                self._told = time.monotonic()
                share = f"{100 * self._done // self._total} %"
                print(f"longstride: converting {self._checkpoint.folder}: {share}", file=sys.stderr, flush=True)


def _damage(form: Universal, ranks: Ranks) -> list[str]:
    """What this rank finds wrong with its share of the files."""
    names = sorted(form.manifest.files)[ranks.rank :: ranks.world_size]
    return find_damage(form.folder, names, form.manifest)


def _file_name(kind: str) -> str:
    return f"{kind}.safetensors"


def _source_sha256(checkpoint: Checkpoint) -> str:
    return hashlib.sha256((checkpoint.folder / MANIFEST).read_bytes()).hexdigest()
