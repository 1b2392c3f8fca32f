"""A data folder on disk: WebDataset tar shards, an index beside each, and one manifest over all.

    manifest.json           what there is, its checksums, how it was made, and the fingerprint of all that
    train-00000.tar         plain tar (ustar), one member a sample: train-00000-0000000.txt, train-00000-0000001.txt ...
    train-00000.index.npy   where each sample lies, its length and CRC-32: 24 bytes a sample
    validation-00000.tar    ...

A sample is a file of the input, or a part of a long one. Its key names split, shard and place, so that a member of
another shard is never mistaken for it.
"""

import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from data_pipelines.errors import DataError
from data_pipelines.modalities import modality_named

FORMAT = "longstride-shards"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
BLOCK_BYTES = 512  # of a tar file: one header, and what payloads are padded to
INDEX_DTYPE = np.dtype(
    [
        ("member", "<u8"),  # offset of the member's header in the shard
        ("payload", "<u8"),  # offset of its first payload byte
        ("length", "<u4"),  # payload bytes
        ("crc32", "<u4"),  # of the payload
    ]
)
_SHARD_NAME = re.compile(r"[a-z]+-\d{5,}\.tar")
_REBUILD = "build the folder again or fetch it again"


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What the manifest says about one shard."""

    name: str
    samples: int
    payload_bytes: int
    file_bytes: int
    sha256: str
    index_sha256: str

    @property
    def index_name(self) -> str:
        """File name of the shard's index."""
        return index_name(self.name)

    def key(self, number: int) -> str:
        """The key of sample ``number`` of this shard: its member's name without the extension."""
        return sample_key(self.name, number)


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """What the manifest says about one split; shards in canonical order."""

    documents: int  # files of the input
    shards: tuple[ShardRecord, ...]

    @property
    def samples(self) -> int:
        """Members over all shards; at least one a document."""
        return sum(shard.samples for shard in self.shards)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes over all shards."""
        return sum(shard.payload_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a data folder's ``manifest.json``."""

    modality: str
    splits: Mapping[str, SplitRecord]
    made: Mapping[str, Any]  # the build's settings and what it left out; no times and no machine's paths

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over the canonical JSON of everything else in the manifest."""
        return _sha256(json.dumps(self._content(), sort_keys=True, separators=(",", ":")).encode())

    def _content(self) -> dict[str, Any]:
        splits = {
            name: {"documents": split.documents, "shards": [asdict(shard) for shard in split.shards]}
            for name, split in self.splits.items()
        }
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "modality": self.modality,
            "made": dict(self.made),
            "splits": splits,
        }

    def to_json(self) -> str:
        """The text of ``manifest.json``."""
        return json.dumps({**self._content(), "fingerprint": self.fingerprint}, indent=2, sort_keys=True) + "\n"


def index_name(shard_name: str) -> str:
    """File name of the index that lies beside a shard."""
    return shard_name.removesuffix(".tar") + ".index.npy"


def sample_key(shard_name: str, number: int) -> str:
    """WebDataset key of sample ``number`` of a shard."""
    return f"{shard_name.removesuffix('.tar')}-{number:07d}"


def member_bytes(length: int) -> int:
    """Bytes that a payload of ``length`` bytes takes in a shard, its header and padding included."""
    return BLOCK_BYTES + -(-length // BLOCK_BYTES) * BLOCK_BYTES


def index_to_bytes(index: np.ndarray) -> bytes:
    """(samples,) INDEX_DTYPE -> the content of an index file."""
    buffer = BytesIO()
    np.save(buffer, index.astype(INDEX_DTYPE, copy=False), allow_pickle=False)
    return buffer.getvalue()


def load_manifest(folder: Path) -> Manifest:
    """The manifest of a data folder, once the folder is found to hold the files it lists, in their sizes.

    Raises DataError, naming the file, for a folder that is missing, empty, of a newer version, edited or incomplete.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder / MANIFEST_NAME)
    for split in manifest.splits.values():
        for shard in split.shards:
            check_shard_file(folder, shard)
    return manifest


def check_data_folder(folder: Path) -> None:
    """Raises DataError for a folder that is missing or holds no manifest."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; build one with `longstride data build`")
    if not (folder / MANIFEST_NAME).is_file():
        what = "lacks" if any(folder.iterdir()) else "the folder is empty: it lacks"
        raise DataError(f"{folder}: {what} {MANIFEST_NAME}, so it is no data folder; `longstride data build` makes one")


def check_shard_file(folder: Path, shard: ShardRecord) -> None:
    """Raises DataError unless the shard and its index are there and the shard has its size."""
    for name in (shard.name, shard.index_name):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: missing, yet {MANIFEST_NAME} lists it; {_REBUILD}")
    size = (folder / shard.name).stat().st_size
    if size != shard.file_bytes:
        raise DataError(
            f"{folder / shard.name}: {size} bytes, yet {MANIFEST_NAME} says {shard.file_bytes}: "
            f"the shard is cut short or belongs to another set; {_REBUILD}"
        )


def load_index(folder: Path, shard: ShardRecord) -> np.ndarray:
    """The index of a shard: (samples,) INDEX_DTYPE. Raises DataError where it is missing or not what was built."""
    path = folder / shard.index_name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: the index cannot be read ({error.strerror}); {_REBUILD}") from error
    if _sha256(content) != shard.index_sha256:
        raise DataError(f"{path}: the index is damaged (its SHA-256 is not the manifest's); {_REBUILD}")
    index = np.load(BytesIO(content), allow_pickle=False)
    if index.dtype != INDEX_DTYPE or len(index) != shard.samples or int(index["length"].sum()) != shard.payload_bytes:
        raise DataError(
            f"{path}: the index does not hold the {shard.samples} samples that the manifest says; {_REBUILD}"
        )
    return index


def verify(folder: Path) -> list[str]:
    """Read a whole data folder: one line for each damage found, none where all is as it was built.

    Sizes, SHA-256 of shards and indexes, the tar structure against the index, and the CRC-32 of each sample.
    """
    folder = Path(folder)
    try:
        manifest = _read_manifest(folder / MANIFEST_NAME)
    except DataError as error:
        return [str(error)]
    findings = []
    known = set()
    for split in manifest.splits.values():
        for shard in split.shards:
            known |= {shard.name, shard.index_name}
            findings += _verify_shard(folder, shard, modality_named(manifest.modality).extension)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".tar", ".npy") and path.name not in known:
            findings.append(f"{path}: {MANIFEST_NAME} does not list it; remove it")
    return findings


def _verify_shard(folder: Path, shard: ShardRecord, extension: str) -> list[str]:
    path = folder / shard.name
    try:
        check_shard_file(folder, shard)
        index = load_index(folder, shard)
    except DataError as error:
        return [str(error)]
    findings = []
    try:
        if _file_sha256(path) != shard.sha256:
            findings.append(f"{path}: its SHA-256 is not the manifest's; {_REBUILD}")
        findings += _verify_samples(path, shard, index, extension)
    except (OSError, tarfile.TarError) as error:
        findings.append(f"{path}: cannot be read as a tar file ({error}); {_REBUILD}")
    return findings


def _verify_samples(path: Path, shard: ShardRecord, index: np.ndarray, extension: str) -> list[str]:
    findings = []
    with tarfile.open(path, "r:") as archive:
        found = {member.name: member for member in archive}
        for number, (member_offset, payload_offset, length, crc32) in enumerate(index.tolist()):
            name = f"{shard.key(number)}.{extension}"
            member = found.pop(name, None)
            if member is None or not member.isreg():
                findings.append(f"{path}: sample {name} is missing; {_REBUILD}")
            elif (member.offset, member.offset_data, member.size) != (member_offset, payload_offset, length):
                findings.append(f"{path}: sample {name} is not where the index says; {_REBUILD}")
            elif zlib.crc32(archive.extractfile(member).read()) != crc32:  # type: ignore[union-attr]
                findings.append(f"{path}: sample {name} is damaged (CRC-32); {_REBUILD}")
    return findings + [f"{path}: member {name} is not in the index; {_REBUILD}" for name in found]


def _read_manifest(path: Path) -> Manifest:
    return _parse_manifest(path, _read_manifest_json(path))


def _read_manifest_json(path: Path) -> dict[str, Any]:
    check_data_folder(path.parent)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {_REBUILD}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f'{path}: not a manifest of this kind (it must say "format": "{FORMAT}"); {_REBUILD}')
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version={version!r}, and this version reads {FORMAT_VERSION}; update Longstride or rebuild"
        )
    return content


def _parse_manifest(path: Path, content: dict[str, Any]) -> Manifest:
    try:
        splits = {
            name: SplitRecord(split["documents"], tuple(ShardRecord(**shard) for shard in split["shards"]))
            for name, split in content["splits"].items()
        }
        manifest = Manifest(modality=content["modality"], splits=splits, made=content["made"])
        fingerprint = manifest.fingerprint
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path}: incomplete or misspelt ({error}); {_REBUILD}") from error
    if fingerprint != content.get("fingerprint"):
        raise DataError(f"{path}: edited since it was built (its content does not give its fingerprint); {_REBUILD}")
    modality_named(manifest.modality)
    for split in splits.values():
        for shard in split.shards:
            if not _SHARD_NAME.fullmatch(shard.name):
                raise DataError(f"{path}: {shard.name!r} is no shard name; {_REBUILD}")
    return manifest


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
