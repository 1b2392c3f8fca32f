"""What a checkpoint folder says about itself: every file with size and SHA-256, and the place in the run.

Format 2, `checkpoints/step-00001000/`, told in full in docs/checkpoints.md:

    manifest.json     this, with a SHA-256 over its own content
    config.json       the resolved configuration of the run
    deepspeed/        as DeepSpeed wrote it: weights, fp32 master weights, optimiser, schedule, loss scale
    random-00000.pt   one a rank: the states of its random generators
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from pydantic import Field

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, load_json_object
from longstride.launcher.output import file_names
from longstride.sparse_model import StrictModel

FORMAT_VERSION = 2  # 1 knew none of the keys that may be left out
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
    guards: dict[str, Any] | None = None  # guards.GuardMemory: the losses that the next one is held against
    parameter_groups: list[list[str]]  # names in the optimiser's order: ZeRO 0 stores its master weights nameless
    versions: dict[str, str]
    files: dict[str, FileRecord]
    probe: dict[str, Any] | None = None  # what the model gave on one context when it was saved


class Listing(Protocol):
    """Whatever names files with their sizes and hashes."""

    @property
    def files(self) -> dict[str, FileRecord]:
        """By the path below its folder."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        ConfigError: none, not readable, of a newer format, damaged, or naming a file outside its folder.
    """
    path = folder / MANIFEST
    content = load_json_object(path)
    version = content.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        older = ", and is older" if type(version) is int and version > FORMAT_VERSION else ""
        raise ConfigError(f"{path}: format_version={version}: this Longstride reads 1 to {FORMAT_VERSION}{older}")
    # Byte for byte, so that no bit of it is outside of a check.
    if path.read_text(encoding="utf-8") != json_text(content):
        raise ConfigError(f"{path}: damaged, not as it was written")
    if content.pop(_OWN_HASH, None) != _content_sha256(content):
        raise ConfigError(f"{path}: damaged, its SHA-256 is not its content's")
    try:
        manifest = Manifest.model_validate(content)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from None
    for name in manifest.files:
        if not _is_inside(name):
            raise ConfigError(f"{path}: names {name!r}, which is no plain path within its folder")
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
        return RunConfig.model_validate(load_json_object(folder / file_names.CONFIG))
    except ConfigError as error:
        lines = str(error).splitlines()
        prefix = f"{folder / file_names.CONFIG}: "
        raise ConfigError(*(line if line.startswith(str(folder)) else prefix + line for line in lines)) from None


def record_files(folder: Path, share: int, shares: int, known: Container[str] = ()) -> dict[str, FileRecord]:
    """Sizes and hashes of every ``shares``-th file from ``share``, flushed to the disk first; not of ``known`` ones."""
    records = {}
    files = {path.relative_to(folder).as_posix(): path for path in _files_of(folder)}
    for name in [name for name in files if name not in known][share::shares]:
        with files[name].open("rb") as file:
            os.fsync(file.fileno())
        records[name] = _record(files[name])
    return records


def find_damage(folder: Path, names: Sequence[str], manifest: Listing) -> list[str]:
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


def find_foreign(folder: Path, manifest: Manifest) -> list[str]:
    """One line for whatever lies in a checkpoint folder without being named: DeepSpeed reads what matches a pattern.

    Links are foreign too, wherever they lead: what is behind one can change after it was checked.
    """
    named = {*manifest.files, MANIFEST}
    folders = {parent.as_posix() for name in named for parent in PurePosixPath(name).parents}
    foreign = []
    for parent, directories, files in os.walk(folder):
        for name in sorted(directories + files):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink():
                foreign.append(f"{path}: a link, which a checkpoint has none of")
            elif relative not in (folders if name in directories else named):
                foreign.append(f"{path}: the manifest does not name it")
    return foreign


def missized(folder: Path, manifest: Manifest) -> list[str]:
    """The files that are not there at their size: what can be told without reading them."""

    def size(name: str) -> int:
        try:
            return (folder / name).stat().st_size
        except OSError:
            return -1

    return [name for name, record in manifest.files.items() if size(name) != record.bytes]


def json_text(content: object) -> str:
    """JSON as this module writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: object) -> None:
    """Writes JSON so that the path holds the old content or the new, never a part."""
    write_text(path, json_text(content))


def write_text(path: Path, text: str) -> None:
    """Writes a text so that the path holds the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
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


def _is_inside(name: str) -> bool:
    """Whether a name is a path below the folder, in the one way to write it: as it is, it cannot stand twice."""
    plain = name and not name.startswith("/") and "\\" not in name and "\0" not in name and name != MANIFEST
    return bool(plain) and ".." not in name.split("/") and PurePosixPath(name).as_posix() == name and name != "."


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
