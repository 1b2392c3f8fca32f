"""What a data folder says of itself: ``manifest.json``, its records and its fingerprint.

    {"format": "longstride-shards", "format_version": 2, "modality": "text", "properties": {},
     "made": how it was built, "splits": {"train": {"documents": 12, "shards": [a line a shard, ...]}, ...},
     "fingerprint": SHA-256 of all that}

Sets of a hundred thousand shards are meant: nothing here copies the records or asks the disk about them.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.settings import REBUILD

FORMAT = "longstride-shards"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
_SHARD_NAME = re.compile(r"[a-z]+-\d{5,}\.tar")


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What the manifest says about one shard."""

    name: str
    samples: int
    documents: int  # that end in this shard
    content_bytes: int  # of contexts: payloads without the headers of their file formats
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

    def to_json(self) -> dict[str, Any]:
        """The shard's line of the manifest."""
        return {name: getattr(self, name) for name in self.__slots__}


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
    def content_bytes(self) -> int:
        """Content bytes over all shards."""
        return sum(shard.content_bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """The content of a data folder's ``manifest.json``."""

    modality: str
    properties: Mapping[str, int]  # of every document, as the modality means them: height, width, rate ...
    splits: Mapping[str, SplitRecord]
    made: Mapping[str, Any]  # the build's settings and what it left out; no times and no machine's paths

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over everything else in the manifest: its head and then each shard's line."""
        digest = hashlib.sha256(_canonical(self._head()))
        for name in sorted(self.splits):
            digest.update(f"\n{name}".encode())
            for shard in self.splits[name].shards:
                digest.update(b"\n" + _canonical(shard.to_json()))
        return digest.hexdigest()

    def shards(self) -> Iterator[ShardRecord]:
        """The shards of all splits."""
        for split in self.splits.values():
            yield from split.shards

    def to_json(self) -> str:
        """The text of ``manifest.json``: a line a shard, so that a person can read and compare it."""
        lines = json.dumps({**self._head(), "fingerprint": self.fingerprint}, indent=2).splitlines()[:-1]
        lines[-1] += ","
        lines.append('  "splits": {')
        for name, split in self.splits.items():
            lines += [f"    {json.dumps(name)}: {{", f'      "documents": {split.documents},', '      "shards": [']
            lines += [f"        {json.dumps(shard.to_json())}," for shard in split.shards]
            lines[-1] = lines[-1].rstrip(",")
            lines += ["      ]", "    },"]
        lines[-1] = lines[-1].rstrip(",")
        return "\n".join([*lines, "  }", "}"]) + "\n"

    def _head(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "modality": self.modality,
            "properties": dict(self.properties),
            "made": dict(self.made),
            "documents": {name: split.documents for name, split in self.splits.items()},
        }


def index_name(shard_name: str) -> str:
    """File name of the index that lies beside a shard."""
    return shard_name.removesuffix(".tar") + ".index.npy"


def sample_key(shard_name: str, number: int) -> str:
    """WebDataset key of sample ``number`` of a shard."""
    return f"{shard_name.removesuffix('.tar')}-{number:07d}"


def parse_manifest(path: str, content: bytes) -> Manifest:
    """The manifest in a file's content; ``path`` is for messages.

    Raises DataError, naming the file, for one that is damaged, of another version, or edited.
    """
    whole = _parse_json(path, content)
    try:
        splits = {
            name: SplitRecord(split["documents"], tuple(ShardRecord(**shard) for shard in split["shards"]))
            for name, split in whole["splits"].items()
        }
        manifest = Manifest(whole["modality"], whole["properties"], splits, whole["made"])
        fingerprint = manifest.fingerprint
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: incomplete or misspelt ({error}); {REBUILD}") from error
    if fingerprint != whole.get("fingerprint"):
        raise DataError(f"{path}: edited since it was built (its content does not give its fingerprint); {REBUILD}")
    modality_named(manifest.modality)
    for shard in manifest.shards():
        if not _SHARD_NAME.fullmatch(shard.name):
            raise DataError(f"{path}: {shard.name!r} is no shard name; {REBUILD}")
    return manifest


def _parse_json(path: str, content: bytes) -> dict[str, Any]:
    try:
        whole = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {REBUILD}") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise DataError(f'{path}: not a manifest of this kind (it must say "format": "{FORMAT}"); {REBUILD}')
    version = whole.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format_version={version!r}, and this version reads {FORMAT_VERSION}; update Longstride or rebuild"
        )
    return whole


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
