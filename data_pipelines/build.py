"""Files on disk to a data folder of WebDataset shards. The same input gives the same bytes, whoever builds it.

Which split a file goes to is a hash of (seed, its path under the input), so that it stays there when other files are
added; its place among the documents of the split is another such hash, so that each shard is a mixture of all folders.
"""

import hashlib
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipelines.errors import DataError
from data_pipelines.modalities import Modality, modality_named
from data_pipelines.shard_writer import SAMPLE_BYTES, ShardFile, pack
from data_pipelines.shards import (
    MANIFEST_NAME,
    Manifest,
    SplitRecord,
    load_manifest,
    verify,
)
from data_pipelines.walk import Document, WalkCounts, find_documents

SHARD_BYTES = 16 * 2**20  # payload of a shard, unless told otherwise
_KEPT = "nothing is overwritten: name another output, or remove this one first"
Progress = Callable[[int, int], None]  # (bytes written, bytes in all)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What decides the bytes of a build, beside the input."""

    modality: Modality
    suffixes: tuple[str, ...]
    exclude: tuple[str, ...]
    validation_fraction: float
    shard_bytes: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As the manifest records it."""
        return {
            "suffixes": list(self.suffixes),
            "exclude": list(self.exclude),
            "validation_fraction": self.validation_fraction,
            "shard_bytes": self.shard_bytes,
            "sample_bytes": SAMPLE_BYTES,
            "seed": self.seed,
        }


def build(
    inputs: Sequence[Path],
    output: Path,
    *,
    modality: str = "text",
    suffixes: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    validation_fraction: float = 0.05,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    progress: Progress | None = None,
) -> Manifest:
    """Write the files under ``inputs`` as shards into the folder ``output``, which appears only when whole.

    From a folder, files with one of ``suffixes`` are taken (None: the modality's own; empty: all); hidden files,
    ``__pycache__``, symlinks and files or folders named in ``exclude`` are left out. A file named in ``inputs`` is
    taken whatever its name. An identical data folder that is already there is left as it is.

    Raises DataError for an input that is missing or unreadable, where nothing or only one split is found, and for an
    output that holds anything else.
    """
    settings = _Settings(
        modality=modality_named(modality),
        suffixes=modality_named(modality).suffixes if suffixes is None else tuple(sorted(suffixes)),
        exclude=tuple(sorted(exclude)),
        validation_fraction=validation_fraction,
        shard_bytes=shard_bytes,
        seed=seed,
    )
    _check_settings(settings)
    output = Path(output).absolute()
    _check_output(output, settings)
    documents, counts = find_documents([Path(path) for path in inputs], settings.suffixes, settings.exclude)
    splits = _split(documents, settings)
    unfinished = output.parent / f".{output.name}.unfinished-{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
        manifest = _write_folder(unfinished, splits, counts, settings, progress)
        if _occupied(output):
            _check_identical(output, manifest)
            _log.info("%s: already there, and identical", output)
        else:
            unfinished.rename(output)
    except OSError as error:
        raise DataError(
            f"{error.filename or output}: {error.strerror or error}; nothing was built and nothing is left of it"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _check_settings(settings: _Settings) -> None:
    if not 0 <= settings.validation_fraction < 1:
        raise DataError(f"validation_fraction={settings.validation_fraction}: must be at least 0 and less than 1")
    if settings.shard_bytes < 1:
        raise DataError(f"shard_bytes={settings.shard_bytes}: must be at least 1")


def _occupied(output: Path) -> bool:
    return output.exists() and (not output.is_dir() or any(output.iterdir()))


def _check_output(output: Path, settings: _Settings) -> None:
    """Refuse at once what cannot become an identical build."""
    if not _occupied(output):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise DataError(f"{output}: there already, and no data folder; nothing is overwritten: name another output")
    there = _loaded(output)
    if there.modality != settings.modality.name or dict(there.made["settings"]) != settings.to_json():
        raise DataError(f"{output}: holds a data set made with other settings; {_KEPT}")


def _check_identical(output: Path, manifest: Manifest) -> None:
    if _loaded(output).fingerprint != manifest.fingerprint:
        raise DataError(f"{output}: holds a data set made from other files; {_KEPT}")
    findings = verify(output)
    if findings:
        raise DataError(f"{findings[0]}; {_KEPT}")


def _loaded(output: Path) -> Manifest:
    try:
        return load_manifest(output)
    except DataError as error:
        raise DataError(f"{error}; {_KEPT}") from error


def _split(documents: list[Document], settings: _Settings) -> dict[str, list[Document]]:
    """Train and validation documents, each in the order in which they are written."""

    def place(document: Document) -> int:
        return _hash(settings.seed, "split", document.relative)

    fraction = settings.validation_fraction
    splits: dict[str, list[Document]] = {"train": [], "validation": []}
    for document in documents:
        splits["validation" if place(document) < fraction * 2**64 else "train"].append(document)
    if fraction and len({document.relative for document in documents}) < 2:
        raise DataError(
            f"validation_fraction={fraction}: the only file, {documents[0].path}, cannot be in both splits; "
            "add files or set it to 0"
        )
    for empty, full, nearest in (("validation", "train", min), ("train", "validation", max)):
        if fraction and not splits[empty]:  # too few files for the fraction: the nearest one to it
            chosen = nearest(splits[full], key=place).relative
            splits[empty] = [document for document in documents if document.relative == chosen]
            splits[full] = [document for document in documents if document.relative != chosen]
    for members in splits.values():
        members.sort(key=lambda document: _hash(settings.seed, f"order {document.occurrence}", document.relative))
    return {name: members for name, members in splits.items() if members}


def _hash(seed: int, use: str, relative: bytes) -> int:
    """64 bits of SHA-256 over the seed, what the number is for, and a document's path."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{use}\0".encode() + relative).digest()[:8], "big")


def _write_folder(
    folder: Path,
    splits: dict[str, list[Document]],
    counts: WalkCounts,
    settings: _Settings,
    progress: Progress | None,
) -> Manifest:
    total = sum(document.size for members in splits.values() for document in members)
    done = 0
    records = {}
    for split, members in splits.items():
        shards = []
        for number, pieces in enumerate(pack(members, settings.shard_bytes)):
            with ShardFile(folder, f"{split}-{number:05d}.tar", settings.modality.extension) as shard:
                for piece in pieces:
                    shard.add(piece.read())
                    done += piece.size
                    if progress is not None:
                        progress(done, total)
            shards.append(shard.record())
        records[split] = SplitRecord(len(members), tuple(shards))
    made = {"settings": settings.to_json(), "left_out": {"empty_files": counts.empty, "symlinks": counts.symlinks}}
    manifest = Manifest(modality=settings.modality.name, splits=records, made=made)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
