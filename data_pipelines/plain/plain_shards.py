"""A split of plain WebDataset shards: tar files made by anybody, without a manifest and without an index.

WebDataset ends a shard early at a broken header, and passes over links and over files without an extension, all
without an error. Nothing here lists what a shard should hold, so its headers are walked before it is read: what would
be lost that way is told. A flipped bit of a payload cannot be noticed, nor a shard that is no longer there.
"""

import glob
import hashlib
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, modality_named
from longstride.data_pipelines.shards import BLOCK_BYTES, member_bytes

_WHOLE = 2**40  # more bytes than a document has: as many come back as there are
_PROBED_SHARDS = 8  # read from to learn what share of a tar is content
_PROBED_SAMPLES, _PROBED_BYTES = 16, 2**20  # of each of them
_DRY_ROUNDS = 100  # times that all shards may be passed without content: a reader's turns come in a random order
_HIDDEN = re.compile(r"(.*/)?\.[^/]*$|__[^/]*__($|/)")  # members that WebDataset passes over on purpose
_REPAIR = "write the shard again or fetch it again"


@dataclass(frozen=True, slots=True)
class PlainShard:
    """A tar file."""

    path: Path
    size: int  # bytes of the file


@dataclass(frozen=True, slots=True)
class Turn:
    """One reading of a shard."""

    number: int  # of the turn, in the endless sequence of all epochs
    shard: PlainShard
    passed_bytes: int = 0  # of the tar, before the first sample that is wanted


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """The content of one sample."""

    content: np.ndarray  # (n,) uint8
    turn: int
    sample: int  # its number within the shard
    tar_bytes: int  # what all members of the sample take up in the shard


class PlainSplit:
    """The shards of one split, in the order of their names.

    ``extension`` names the member of a sample that holds its content; None takes the first that there is of the
    modality's own extension and its suffixes. Raises DataError where there are no shards or no samples, and where the
    first sample is none of the modality's.
    """

    def __init__(self, location: str | Path, name: str, modality: str, extension: str | None) -> None:
        self.location, self.name = str(location), name
        self.modality: Modality = modality_named(modality)
        self._endings = _endings(self.modality, extension)
        self.shards = find_shards(location, name)
        self.properties: dict[str, int] = self._settle()
        self.document_bytes = self.modality.document_bytes(self.properties)

    @property
    def fingerprint(self) -> str:
        """Of the shards' names and sizes and of what is read of them: hexadecimal. Their content is not looked at."""
        named = "".join(f"{shard.path.name}\0{shard.size}\0" for shard in self.shards)
        what = f"{self.name}/{self.modality.name}/{','.join(self._endings)}/{sorted(self.properties.items())}"
        return hashlib.sha256(f"{what}/{named}".encode()).hexdigest()

    def documents(self, turns: Iterable[Turn]) -> Iterator[Document]:
        """The documents of each turn, empty ones left out.

        Raises DataError, naming shard and sample, for what cannot be read, and where turn after turn holds nothing.
        """
        dry = 0
        for turn in turns:
            dry += 1
            passed = 0
            for number, sample in enumerate(read_samples(turn.shard.path)):
                tar_bytes = _tar_bytes(sample)
                passed += tar_bytes
                if passed <= turn.passed_bytes:
                    continue
                content = self._content(turn.shard.path, sample)
                if content.size:
                    dry = 0
                    yield Document(content, turn.number, number, tar_bytes)
            if dry > _DRY_ROUNDS * len(self.shards):
                raise DataError(f"{self.location}: the samples of split {self.name!r} hold no bytes; add data")

    def probe(self) -> tuple[list[int], int]:
        """Content bytes of some documents, from shards that lie apart, and the bytes of the tars that they take up."""
        found: list[int] = []
        tar_bytes = 0
        for shard in self.shards[:: -(-len(self.shards) // _PROBED_SHARDS)]:
            samples = read_samples(shard.path, walk=False)
            taken = 0
            for number, sample in enumerate(samples):
                if number == _PROBED_SAMPLES or taken >= _PROBED_BYTES:
                    break
                taken += _tar_bytes(sample)
                found.append(len(self._content(shard.path, sample)))
            else:  # the whole shard, with what stands behind its last sample
                taken = shard.size
            tar_bytes += taken
        return found, tar_bytes

    def _settle(self) -> dict[str, int]:
        """The properties of the split, by its first sample."""
        for shard in self.shards:
            for sample in read_samples(shard.path):
                member, payload = self._member(shard.path, sample)
                return self.modality.settle(member, BytesIO(payload), {})
        shards = "1 shard" if len(self.shards) == 1 else f"{len(self.shards)} shards"
        raise DataError(f"{self.location}: split {self.name!r} has {shards} and no sample in them; add samples")

    def _content(self, shard: Path, sample: dict[str, Any]) -> np.ndarray:
        member, payload = self._member(shard, sample)
        content = self.modality.open(member, BytesIO(payload), self.properties).read(0, _WHOLE)
        if self.document_bytes is not None and len(content) != self.document_bytes:
            raise DataError(
                f"{member}: {len(content)} bytes of content; must be {self.document_bytes}, as of the first "
                f"{self.modality.name} of the split: bring all to one size"
            )
        return np.frombuffer(content, dtype=np.uint8)

    def _member(self, shard: Path, sample: dict[str, Any]) -> tuple[Path, bytes]:
        """What the content of a sample is called in messages, and its payload."""
        ending = next((each for each in self._endings if each in sample), None)
        if ending is None:
            held = ", ".join(f".{each}" for each in sample if not each.startswith("__"))
            wanted = " or ".join(f".{each}" for each in self._endings)
            raise DataError(
                f"{shard}: sample {sample['__key__']} has no member {wanted} but {held}; "
                "a sample's name ends at its first dot; name the member that holds the content in extension"
            )
        return shard / f"{sample['__key__']}.{ending}", sample[ending]


def find_shards(location: str | Path, split: str) -> list[PlainShard]:
    """``location/split/*.tar``, else ``location/split*.tar``, by name. Raises DataError where there are none."""
    if "://" in str(location):
        raise DataError(
            f"{location}: order=streaming reads folders on this machine; fetch the shards first, or take "
            "order=exact with a folder made by `longstride data build`, which may be remote"
        )
    folder = Path(location)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; name the one that holds the shards of split {split!r}")
    inside = [path for path in (folder / split).glob("*.tar") if not path.name.startswith(".")]
    paths = sorted(path for path in inside or folder.glob(f"{glob.escape(split)}*.tar") if path.is_file())
    if not paths:
        raise DataError(
            f"{folder}: no shards of split {split!r}: looked for {split}/*.tar and {split}*.tar "
            f"(such as {split}-000.tar; uncompressed)"
        )
    shards = [PlainShard(path, path.stat().st_size) for path in paths]
    for shard in shards:
        if not shard.size:
            raise DataError(f"{shard.path}: is empty, not even a tar's end stands in it; {_REPAIR} or remove it")
    return shards


def read_samples(shard: Path, walk: bool = True) -> Iterator[dict[str, Any]]:
    """The samples of a tar file as WebDataset groups them: ``__key__``, and the payload of each member by extension.

    Raises DataError, naming the shard, where WebDataset fails, and, unless ``walk`` is off, before the first sample
    where it would fall silent.
    """
    try:
        with shard.open("rb") as file:
            if walk:
                _check_headers(shard, file)
                file.seek(0)
            yield from group_by_keys(tar_file_expander([{"url": str(shard), "stream": file}]))
    except DataError:
        raise
    except Exception as error:  # WebDataset hands on whatever goes wrong, with what it was doing added to it
        what = " ".join(str(error.args[0] if error.args else error).partition(" @ ")[0].split())
        reason = error.strerror if isinstance(error, OSError) else what or type(error).__name__
        raise DataError(f"{shard}: cannot be read as a WebDataset shard ({reason}); {_REPAIR}") from error


def _check_headers(shard: Path, file: BinaryIO) -> None:
    """Walks the headers, and holds that nothing follows them but the zeros that end a tar."""
    last = "the beginning"
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # else every member is kept
            last = f"member {member.name}"
            if member.issym() or member.islnk():
                raise DataError(f"{shard}: {last} is a link, which WebDataset passes over; store the file itself")
            if member.isreg() and not _HIDDEN.match(member.name) and base_plus_ext(member.name)[0] is None:
                raise DataError(
                    f"{shard}: {last} has no extension, so WebDataset passes over it; name it KEY.EXTENSION"
                )
        end = archive.offset
    file.seek(end)
    block = file.read(BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise DataError(f"{shard}: stops behind {last} without the zeros that end a tar: it is cut short; {_REPAIR}")
    while block:
        if block.strip(b"\0"):
            raise DataError(
                f"{shard}: goes on behind {last} with no header of a member (damage, or tars laid end to end), and "
                f"WebDataset would leave out the rest; {_REPAIR}"
            )
        block = file.read(2**16)


def _tar_bytes(sample: dict[str, Any]) -> int:
    return sum(member_bytes(len(payload)) for name, payload in sample.items() if not name.startswith("__"))


def _endings(modality: Modality, extension: str | None) -> tuple[str, ...]:
    if extension is None:
        return tuple(dict.fromkeys(each.lstrip(".").lower() for each in (modality.extension, *modality.suffixes)))
    ending = extension.lstrip(".").lower()  # WebDataset lowers what stands in the tar
    if not ending or "/" in ending:
        raise DataError(f"extension={extension!r}: must be what follows a member's first dot, such as txt")
    return (ending,)
