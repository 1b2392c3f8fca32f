"""What a checkpoint folder says about itself: every file with size and SHA-256, and the place in the run.

Format 1, `checkpoints/step-00001000/`:

    manifest.json     this, with a SHA-256 over its own content
    config.json       the resolved configuration of the run
    deepspeed/        as DeepSpeed wrote it: weights, fp32 master weights, optimiser, schedule, loss scale
    random-00000.pt   one a rank: the states of its random generators
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from kernels.errors import ConfigError
from launcher.config import RunConfig
from launcher.folders import CONFIG
from launcher.json_file import load_json_object
from sparse_model.strict import StrictModel

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_OWN_HASH = "sha256"  # over the canonical JSON of all other keys
_READ_BYTES = 1 << 20


class FileRecord(StrictModel):
    """One file as it was written."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(StrictModel):
    """The content of manifest.json."""

    format_version: int
    step: int = Field(ge=0)
    world_size: int = Field(gt=0)
    zero_stage: int = Field(ge=0, le=3)
    precision: str
    stream: dict[str, Any]  # data_pipelines.StreamState: the next batch
    parameter_groups: list[list[str]]  # names in the optimiser's order: ZeRO 0 stores its master weights nameless
    versions: dict[str, str]
    files: dict[str, FileRecord]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        ConfigError: none, not readable, of a newer format, damaged, or naming a file outside its folder.
    """
    content = load_json_object(folder / MANIFEST)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ConfigError(f"{folder / MANIFEST}: format_version={version}: this Longstride reads {FORMAT_VERSION}")
    if content.pop(_OWN_HASH, None) != _content_sha256(content):
        raise ConfigError(f"{folder / MANIFEST}: damaged, its SHA-256 is not its content's")
    try:
        manifest = Manifest.model_validate(content)
    except ConfigError as error:
        raise ConfigError(*(f"{folder / MANIFEST}: {problem}" for problem in error.problems)) from None
    for name in manifest.files:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise ConfigError(f"{folder / MANIFEST}: names {name}, which is outside its folder")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a checkpoint folder, its own hash included."""
    write_json(folder / MANIFEST, sealed(manifest.model_dump(mode="json")))


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """A manifest's content with the hash of all the rest."""
    rest = {key: value for key, value in content.items() if key != _OWN_HASH}
    return rest | {_OWN_HASH: _content_sha256(rest)}


def read_checkpoint_config(folder: Path) -> RunConfig:
    """The resolved configuration that a run or checkpoint folder holds.

    Raises:
        ConfigError: none, or not one of this version's.
    """
    try:
        return RunConfig.model_validate(load_json_object(folder / CONFIG))
    except ConfigError as error:
        lines = str(error).splitlines()
        prefix = f"{folder / CONFIG}: "
        raise ConfigError(*(line if line.startswith(str(folder)) else prefix + line for line in lines)) from None


def record_files(folder: Path, share: int, shares: int) -> dict[str, FileRecord]:
    """Sizes and hashes of every ``shares``-th file from ``share``, each flushed to the disk first."""
    records = {}
    for path in _files_of(folder)[share::shares]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        records[path.relative_to(folder).as_posix()] = _record(path)
    return records


def find_damage(folder: Path, names: Sequence[str], manifest: Manifest) -> list[str]:
    """One line for each of these files that is not as it was written."""
    damage = []
    for name in names:
        path, expected = folder / name, manifest.files.get(name)
        if expected is None:
            damage.append(f"{path}: the manifest does not name it")
            continue
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                damage.append(f"{path}: {size} bytes instead of {expected.bytes}")
            elif _record(path).sha256 != expected.sha256:
                damage.append(f"{path}: damaged, its SHA-256 is not the manifest's")
        except OSError as error:
            damage.append(f"{path}: cannot be read: {error.strerror}")
    return damage


def write_json(path: Path, content: object) -> None:
    """Writes JSON so that the path holds the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def flush_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, a rename included."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _content_sha256(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _record(path: Path) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileRecord(bytes=size, sha256=digest.hexdigest())
