"""The manifest of a checkpoint folder, which lists each file's size and SHA-256; and the scores that rank steps.

Format 2, `checkpoints/step-00001000/`, described in docs/checkpoints.md:

    manifest.json     the manifest, with a SHA-256 over its own content
    config.json       the resolved configuration
    deepspeed/        DeepSpeed's files: weights, fp32 master weights, optimiser, schedule, loss scale
    random-00000.pt   states of the random generators; one file a rank, or a group of ranks that share contexts

A step's score is its validation loss in metrics.jsonl. Manifests repeat the scores of the run's best checkpoints, so
that a run without that file can still rank them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Container, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from longstride.data_pipelines.durable import naming, write_over
from longstride.data_pipelines.plain_files import open_plain, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.probe import ProbeRecord
from longstride.launcher.config import RunConfig, TrainConfig, load_json_object
from longstride.launcher.output import file_names, metrics_file
from longstride.sparse_model import StrictModel

FORMAT_VERSION = 2  # format 1 lacks the optional keys
MANIFEST = "manifest.json"
_SEAL = "sha256"  # over the canonical JSON of all other keys


class Score(StrictModel):
    """The validation loss of one step."""

    step: int = Field(gt=0)
    split: str
    tokens: int  # scored bytes of content, or pixels; losses over different data do not compare
    bits_per_byte: float | None  # bits per pixel for pictures with a palette; None: not finite
    context: int | None = None  # positions, if the run has stages of several lengths

    left_out_at_default = ("context",)

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Score:
        """Return the score in an evaluation's line of metrics.jsonl."""
        _, bits = metrics_file.bits_of(line)
        finite = bits if bits is not None and math.isfinite(bits) else None
        tokens, context = metrics_file.content_of(line), line.get("context")
        return cls(step=line["step"], split=line["split"], tokens=tokens, bits_per_byte=finite, context=context)

    @classmethod
    def recorded(cls, run: Path, split: str) -> list[Score]:
        """Return the scores of a split in metrics.jsonl, ordered by step."""
        lines = metrics_file.find_evaluations(run, split)
        return [cls.of_line(lines[step]) for step in sorted(lines)]

    def compares_with(self, score: Score) -> bool:
        """Whether both were measured over the same bytes, in contexts of one length."""
        return (self.split, self.tokens, self.context) == (score.split, score.tokens, score.context)

    def improves_on(self, score: Score | None, by: float) -> bool:
        """Whether it is better by more than ``by`` bits per byte.

        Any finite score improves on None and on a score that it does not compare with.
        """
        if self.bits_per_byte is None or score is None or score.bits_per_byte is None or not self.compares_with(score):
            return self.bits_per_byte is not None
        return score.bits_per_byte - self.bits_per_byte > by


class FileRecord(StrictModel):
    """The size and hash of a file."""

    bytes: int = Field(ge=0, lt=2**63)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class CheckpointManifest(StrictModel):
    """The content of manifest.json."""

    format_version: int
    step: int = Field(ge=0, lt=2**63)
    world_size: int = Field(gt=0, le=TrainConfig.MOST_PROCESSES)
    sequence_parallel: int | None = Field(default=None, gt=0)  # train.sequence_parallel
    zero_stage: int = Field(ge=0, le=3)
    precision: Literal["fp32", "fp16", "bf16"]
    stream: dict[str, Any]  # data_pipelines.order.StreamState: the next batch
    guards: dict[str, Any] | None = None  # training.guards.GuardMemory: the losses that the next one is compared with
    parameter_groups: list[list[str]]  # names in the optimiser's order; ZeRO 0 stores master weights without names
    versions: dict[str, str]
    files: dict[str, FileRecord]
    probe: ProbeRecord | None = None  # the model's loss on one context when it was saved
    plateau: dict[str, Any] | None = None  # training.plateau.PlateauMemory: the best evaluation so far
    origin: dict[str, Any] | None = None  # training.initial.InitialWeights.record: the source of the first weights
    best: list[Score] | None = None  # scores of the run's checkpoints if train.keep_best is set, best first
    content_seen: int | None = Field(default=None, ge=0)  # bytes or pixels that the steps have read; None: not counted

    left_out_at_default = ("sequence_parallel", "plateau", "origin", "best", "content_seen")

    @model_validator(mode="after")
    def _check_sharing(self) -> Self:
        if self.world_size % (self.sequence_parallel or 1):
            rule = f"must divide world_size, {self.world_size}"
            raise ConfigError.at("sequence_parallel", self.sequence_parallel, rule)
        return self


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint folder.

    Raises:
        ConfigError: it is missing, unreadable, of a newer format or damaged, or it names a file outside its folder.
    """
    path = folder / MANIFEST
    content = load_json_object(path, follow_links=False)
    version = content.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        older = ", and is older" if type(version) is int and version > FORMAT_VERSION else ""
        raise ConfigError(f"{path}: format_version={version}: this Longstride reads 1 to {FORMAT_VERSION}{older}")
    # Compare bytes, not values, so that every bit is checked.
    written = json_text(content).encode(errors="surrogatepass")
    try:
        is_as_written = read_plain(path, len(written), follow_links=False) == written
    except OSError:
        is_as_written = False
    if not is_as_written:
        raise ConfigError(f"{path}: is damaged: its content has changed since it was written")
    if content != add_digest(content):
        raise ConfigError(f"{path}: is damaged: its SHA-256 is not that of its content")
    del content[_SEAL]
    try:
        manifest = CheckpointManifest.model_validate(content)
    except ConfigError as error:
        raise ConfigError(*(f"{path}: {problem}" for problem in error.problems)) from None
    for name in manifest.files:
        # Only the canonical spelling: another could name a file twice, or lead out of the folder.
        is_plain = not name.startswith("/") and "\\" not in name and "\0" not in name and ".." not in name.split("/")
        if not is_plain or name in ("", ".", MANIFEST) or PurePosixPath(name).as_posix() != name:
            raise ConfigError(f"{path}: names {name!r}, which is not a plain path within its folder")
    return manifest


def write_manifest(folder: Path, manifest: StrictModel) -> None:
    """Write the manifest of a folder, including its own hash."""
    write_json(folder / MANIFEST, add_digest(manifest.model_dump(mode="json")))


def add_digest(content: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's content with the hash of all other keys."""
    unsealed = {key: value for key, value in content.items() if key != _SEAL}
    canonical = json.dumps(unsealed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return unsealed | {_SEAL: hashlib.sha256(canonical.encode()).hexdigest()}


def read_checkpoint_config(folder: Path) -> RunConfig:
    """Read the resolved configuration in a run or checkpoint folder; ConfigError if missing or of another version."""
    try:
        return RunConfig.model_validate(load_json_object(folder / file_names.CONFIG, follow_links=False))
    except ConfigError as error:
        prefix = f"{folder / file_names.CONFIG}: "
        lines = (line if line.startswith(str(folder)) else prefix + line for line in str(error).splitlines())
        raise ConfigError(*lines) from None


def collect_scores(run: Path, split: str, manifests: Iterable[CheckpointManifest]) -> dict[int, Score]:
    """Return the scores of a run by step, from metrics.jsonl and from its manifests, which repeat some."""
    scores = {score.step: score for manifest in manifests for score in manifest.best or () if score.split == split}
    return scores | {score.step: score for score in Score.recorded(run, split)}


def rank_scores(scores: Iterable[Score]) -> list[Score]:
    """Sort scores, best first and then earlier first, without those that are not finite.

    Scores that do not compare with the newest one come last.
    """
    finite = [score for score in scores if score.bits_per_byte is not None]
    newest = max(finite, key=lambda score: score.step, default=None)
    return sorted(
        finite,
        key=lambda score: (newest is not None and not score.compares_with(newest), score.bits_per_byte, score.step),
    )


def record_files(folder: Path, recorded: Container[str] = ()) -> dict[str, FileRecord]:
    """Flush all files except those in ``recorded`` and return their sizes and hashes, by relative path."""
    records = {}
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        name = path.relative_to(folder).as_posix()
        if name not in recorded:
            with naming(path), path.open("rb") as file:
                os.fsync(file.fileno())
                records[name] = _record(file)
    return records


def find_damage(folder: Path, names: Iterable[str], files: Mapping[str, FileRecord]) -> list[str]:
    """Return a line for each named file that differs from its record in ``files``. Keys are relative paths."""
    damage = []
    for name in names:
        path, expected = folder / name, files.get(name)
        if expected is None:
            damage.append(f"{path}: is not listed in the manifest")
            continue
        try:
            with open_plain(path, follow_links=False) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    damage.append(f"{path}: {size} bytes instead of {expected.bytes}")
                elif _record(file) != expected:
                    damage.append(f"{path}: is damaged: its SHA-256 is not the manifest's")
        except OSError as error:
            damage.append(f"{path}: cannot be read: {error.strerror}")
    return damage


def find_foreign(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """Return a line for each entry of a checkpoint folder that its manifest does not name.

    DeepSpeed would read any file whose name matches its pattern. Links are foreign too, because their target can change
    after the check.
    """
    listed = {*manifest.files, MANIFEST}
    folders = {parent.as_posix() for name in listed for parent in PurePosixPath(name).parents}
    foreign = []
    for parent, directories, files in os.walk(folder):
        for name in sorted(directories + files):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink() and relative not in manifest.files:  # a listed link fails when it is read
                foreign.append(f"{path}: is a link, which a checkpoint may not contain")
            elif relative not in (folders if name in directories else listed):
                foreign.append(f"{path}: is not listed in the manifest")
    return foreign


def find_missized(folder: Path, manifest: CheckpointManifest) -> list[str]:
    """Return the files that are missing or have another size, without reading them."""

    def size(name: str) -> int:
        try:
            return (folder / name).lstat().st_size
        except OSError:
            return -1

    return [name for name, record in manifest.files.items() if size(name) != record.bytes]


def json_text(content: object) -> str:
    """Return JSON as this module writes it."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, content: object) -> None:
    """Write JSON atomically: the path holds the old content or the new, never a part."""
    write_over(path, json_text(content).encode())


def gigabytes(count: int) -> str:
    """Format a number of bytes, in GB or MB."""
    return f"{count / 1e9:,.3g} GB" if count >= 1e9 else f"{count / 1e6:,.3g} MB"


def free_bytes(path: Path) -> int:
    """Return the free space of the disk that holds, or would hold, a path."""
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


def _record(file: BinaryIO) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    while piece := file.read(1 << 20):
        digest.update(piece)
        size += len(piece)
    return FileRecord(bytes=size, sha256=digest.hexdigest())
