"""The universal form of a checkpoint: its state by parameter, independent of ranks, ZeRO stage and precision.

Format 1, `checkpoints/.step-00001000.universal/`, made from `step-00001000/` for the first run in another layout:

    manifest.json           the manifest, with a SHA-256 over its own content and that of the checkpoint's manifest
    fp32.safetensors        master weights
    exp_avg.safetensors     Adam's moments; there are no moments before the first step
    exp_avg_sq.safetensors
    momentum_buffer.safetensors         Muon's momentum
    row_var.safetensors                 Adafactor's means for matrices, with col_var.safetensors
    variance.safetensors                Adafactor's second moment for vectors
    ema.safetensors         the moving average of the weights, if there is one
    buffers.safetensors     the model's buffers, if it has any
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    add_digest,
    check_space,
    find_damage,
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
    """The content of manifest.json."""

    format_version: int
    source_sha256: str  # of the checkpoint's manifest.json
    adam_step: float | None  # null: Adam has not begun
    numbers: dict[str, int]  # the engine's counters, see ``COUNTERS``
    schedule: dict[str, int]  # position in the learning-rate schedule
    loss_scale: dict[str, float] | None  # null: not dynamic
    files: dict[str, FileRecord] = Field(min_length=1)


class Universal:
    """A universal form with a valid manifest that belongs to its checkpoint."""

    def __init__(self, folder: Path, manifest: UniversalManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that it has, a subset of ``KINDS``."""
        return tuple(kind for kind in KINDS if _file_name(kind) in self.manifest.files)

    def has(self, name: str, kind: str) -> bool:
        """Whether a parameter has a tensor of a kind."""
        return kind in self.kinds and name in self._file(kind).keys()  # noqa: SIM118, no mapping

    def flat(self, name: str, kind: str) -> Tensor:
        """Return one parameter's elements as a flat tensor, which stays on the disk until it is used."""
        return self._file(kind).get_tensor(name).flatten()

    def buffers(self) -> dict[str, Tensor]:
        """Return the model's buffers by name, fp32."""
        return load_file(self.folder / _BUFFERS) if _BUFFERS in self.manifest.files else {}

    def _file(self, kind: str) -> Any:
        if kind not in self._open:
            self._open[kind] = safe_open(self.folder / _file_name(kind), "pt")
        return self._open[kind]


def universal_folder(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's universal form."""
    return checkpoint.with_name(f".{checkpoint.name}.universal")


def ready_universal(checkpoint: Checkpoint, ranks: Ranks) -> tuple[Universal, float]:
    """Return a verified checkpoint's universal form, verified, and the seconds it took to make (0: it existed).

    The first rank makes it while the others wait; every rank verifies a share. All ranks must call, and no other
    process may be writing to this run.

    Raises:
        AgreedError: on every rank, if it cannot be made.
    """
    began, is_new = time.monotonic(), False
    for attempt in range(2):
        is_new |= ranks.run_on_first(lambda: _make_if_missing(checkpoint))
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
                say(f"converted again: {line}")
            (universal_folder(checkpoint.folder) / MANIFEST).unlink(missing_ok=True)
    raise AgreedError("\n".join(damage))


def open_universal(checkpoint: Checkpoint) -> Universal | None:
    """Open a checkpoint's universal form; None if there is none, or it belongs to another checkpoint."""
    folder = universal_folder(checkpoint.folder)
    try:
        content = load_json_object(folder / MANIFEST, follow_links=False)
        if content != add_digest(content) or content["format_version"] != UNIVERSAL_VERSION:
            return None
        del content["sha256"]
        manifest = UniversalManifest.model_validate(content)
    except (ConfigError, ValidationError, KeyError):
        return None
    is_valid = (
        manifest.files.keys() <= {_BUFFERS, *map(_file_name, KINDS)}
        and _file_name(MASTER) in manifest.files
        and sorted(manifest.numbers) == sorted(COUNTERS)
        and sorted(manifest.schedule) == sorted(SCHEDULE)
        and manifest.numbers["global_steps"] == checkpoint.manifest.step
        and manifest.source_sha256 == checkpoint.manifest_digest()
    )
    return Universal(folder, manifest) if is_valid else None


def _make_if_missing(checkpoint: Checkpoint) -> bool:
    """Make the universal form if there is none; return whether it was made."""
    if open_universal(checkpoint):
        return False
    folder = universal_folder(checkpoint.folder)
    unfinished = folder.with_name(f"{folder.name}.partial")
    # Leftovers of killed processes, and the form of an older checkpoint of this step.
    for stale in (*folder.parent.glob(".step-*.universal.partial"), folder):
        shutil.rmtree(stale, ignore_errors=True)
    state = SavedState(checkpoint)
    needed = 4 * sum(shape.numel() for kind in state.kinds for shape in state.shapes_of(kind).values())
    check_space(folder.parent, needed, str(folder.parent), "converting takes")
    unfinished.mkdir()
    try:
        files = {}

        def write(name: str, shapes: Mapping[str, Sequence[int]], tensors: Iterable[Tensor]) -> None:
            size, sha256 = write_tensors(unfinished / name, shapes, tensors)
            files[name] = FileRecord(bytes=size, sha256=sha256)

        tensors = _all_tensors(state, checkpoint)
        for kind in state.kinds:
            shapes = state.shapes_of(kind)
            write(_file_name(kind), shapes, islice(tensors, len(shapes)))
        if buffers := state.buffers:
            write(_BUFFERS, {name: buffer.shape for name, buffer in buffers.items()}, buffers.values())
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
    """Yield all tensors, kind after kind, and report the progress every ten seconds."""
    names, reported = [(kind, name) for kind in state.kinds for name in state.shapes_of(kind)], time.monotonic()
    for done, (kind, name) in enumerate(names):
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            say(f"converting {checkpoint.folder}: {100 * done // len(names)} %")
        yield state.tensor(name, kind)


def _file_name(kind: str) -> str:
    return f"{kind}.safetensors"
