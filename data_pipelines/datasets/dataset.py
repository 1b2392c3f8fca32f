"""The interface of a published dataset, the search for its files, and the download of missing ones.

Documents are excerpts of larger files. CIFAR-10 and the downsampled ImageNet are distributed in planes: rows of fixed
size, each with all red bytes of a picture, then all green, then all blue ones. Content is in the order of the image
modality: row by row, pixel by pixel, in a pixel red, green, blue.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from longstride.data_pipelines.datasets.members import Member, members_of, whole_file
from longstride.data_pipelines.documents import Document, LeftOut, OpenInput
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.modalities import CHANNELS, Modality, Properties
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import Progress
from longstride.data_pipelines.stores import StoredFile

WAY_OUT = "fetch it again, or accept it as it is with --unpublished"
DOWNLOADS = Path("downloads")
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
_ATTEMPTS = 4  # attempts in a row without a byte: the user is waiting, and a few seconds suffice


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """Size and checksum of a published file: published with it, or from a verified copy."""

    size: int
    algorithm: str  # name in hashlib
    digest: str  # hexadecimal

    def check(self, member: Member, open_input: OpenInput) -> None:
        """Raise DataError for a member that differs from the published file."""
        problem = None
        if member.size != self.size:
            problem = f"{member.size:,} bytes, but the published file has {self.size:,}"
        elif (digest := member.digest(open_input, self.algorithm)) != self.digest:
            problem = f"its {self.algorithm.upper()} is {digest}, but the published one is {self.digest}"
        if problem is not None:
            raise DataError(f"{member.shown}: {problem}; {WAY_OUT}")


@dataclass(frozen=True, slots=True)
class Archive:
    """The file that a dataset is distributed in."""

    url: str
    size: int  # bytes
    sha256: str  # hexadecimal

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class DatasetContent:
    """The documents of a dataset, in the order in which they are written."""

    splits: Mapping[str, Sequence[Document]]
    properties: Properties
    left_out: LeftOut = field(default_factory=LeftOut)


@dataclass(frozen=True, kw_only=True)
class Dataset(ABC):
    """A dataset in the form in which it is distributed."""

    name: str  # value of --dataset
    modality: str
    archive: Archive | None  # the file that --download fetches; None if no program may fetch it
    has_labels: bool = False  # whether its documents have classes; each is an ``Excerpt`` of a ``LabelledSource``

    @property
    @abstractmethod
    def file_names(self) -> Collection[str]:
        """Names of the files and of their archives. A folder with none of them lacks the dataset."""

    @property
    def where(self) -> str:
        """How to get the dataset, in a few words for messages."""
        assert self.archive is not None
        return f"fetch {self.archive.url}"

    @abstractmethod
    def find(self, path: Path, unpublished: bool) -> DatasetContent:
        """Find the documents in an archive, file or folder.

        Raises DataError if something is missing, damaged or in another format, and, unless ``unpublished``, if it
        differs from the published files.
        """


def default_input(dataset: Dataset) -> Path:
    """Return the default input, which is also the default target of a download."""
    return DOWNLOADS if dataset.archive is None else DOWNLOADS / dataset.archive.name


def fetch_input(dataset: Dataset, place: Path, is_given: bool, download: bool, progress: Progress | None) -> Path:
    """Return the input, fetched if it is missing and ``download`` is set. ``is_given``: the user named ``place``.

    An archive is fetched to ``place`` if that has the suffix of an archive, else into that folder. Raises DataError if
    the input is missing and cannot be fetched.
    """
    archive = dataset.archive
    how = dataset.where
    if archive is not None:
        how += f", or let --download do it (into {DOWNLOADS}, or what --input names)"
    if not is_given and not download:
        raise DataError(f"--input: must name the archive or folder of {dataset.name}; {how}")
    with as_data_error(place):
        is_present = place.exists()
        if download and place.is_dir() and archive is not None:  # a folder of other files may lack the dataset
            is_present = any(path.name in dataset.file_names for path in files_in(place))
    if is_present:
        return place
    if not download:
        raise DataError(f"--input={place}: no such file or folder; {how}")
    if archive is None:
        raise DataError(f"--download: {dataset.name} may not be fetched by a program; {dataset.where} as --input")
    is_file = place.name.endswith(ARCHIVE_SUFFIXES) and not place.is_dir()
    target = place if is_file else place / archive.name
    from longstride.data_pipelines.stores import remote  # only a download needs it

    remote.fetch_file(
        archive.url.rpartition("/")[0],
        StoredFile(archive.name, archive.size, archive.sha256),
        target,
        RemoteSettings(attempts=_ATTEMPTS),
        advance=lambda done: progress(done, archive.size) if progress is not None else None,
        way_out=f"or fetch {archive.url} by hand and name it with --input",
    )
    return target


def files_in(root: Path) -> list[Path]:
    """List a file, or the files of a folder and then of each folder in it, by name. Raises DataError on failure."""
    with as_data_error(what=None):
        inside = [root] if root.is_file() else sorted(root.iterdir())
        folders = [path for path in inside if path.is_dir() and not path.name.startswith(".")]
        below = [path for folder in folders for path in sorted(folder.iterdir())]
        return [path for path in (*inside, *below) if path.is_file()]


def find_members(
    root: Path,
    names: Collection[str],
    published: Collection[str],
    is_complete: Callable[[Mapping[str, Member]], bool],
    suffixes: tuple[str, ...] = ARCHIVE_SUFFIXES,
) -> dict[str, Member]:
    """Find files by their names: unpacked ones first, then those in archives; nearer ones first.

    Args:
        root: an archive, which may have any name, or a folder.
        published: names of the dataset's archives, which are opened first.
        is_complete: whether no other archive need be opened.
        suffixes: of archives in a folder.

    Raises:
        DataError: an archive cannot be read, and is ``root``, has a published name, or nothing is found.
    """
    files = files_in(root)
    members: dict[str, Member] = {}
    for path in files:
        if path.name in names and path.name not in members:
            members[path.name] = whole_file(path)
    archives = [path for path in files if path.name not in names and (path == root or path.name.endswith(suffixes))]
    problem = None
    for path in sorted(archives, key=lambda path: path.name not in published):
        if is_complete(members):
            break
        try:
            contents = members_of(path)
        except DataError as error:
            if path == root or path.name in published:
                raise
            problem = problem or error  # it need not belong to the dataset
            continue
        for member in contents:
            if member.base_name in names:
                members.setdefault(member.base_name, member)
    if problem is not None and not members:
        raise problem
    return members


class Source(Protocol):
    """The content of a file of a dataset, as one sequence of bytes. It can be pickled."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """See ``Document.identity``."""

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        """Read content bytes ``[offset, offset + size)``. Sequential reads are cheap. Raises DataError on failure."""


class LabelledSource(Source, Protocol):
    """The content of a file whose documents have classes."""

    def label(self, open_input: OpenInput, offset: int) -> int:
        """Return the class of the document that begins at a content byte. Raises DataError on failure."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A document: ``size`` bytes of a source from ``start`` on."""

    source: Source
    start: int
    size: int

    @property
    def identity(self) -> tuple[Any, ...]:
        return (*self.source.identity, self.start, self.size)

    def label(self, open_input: OpenInput) -> int:
        return cast("LabelledSource", self.source).label(open_input, self.start)

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        return self.source.read(open_input, self.start + offset, size)


def excerpts(source: Source, count: int, size: int) -> list[Excerpt]:
    """Return the documents of one size that a source begins with."""
    return [Excerpt(source, number * size, size) for number in range(count)]


@dataclass(frozen=True)
class PlaneRows:
    """The square pictures in the rows of a member: a ``Source``."""

    member: Member
    edge: int  # pixels
    offset: int = 0  # of the first row in the member
    labels: int = 0  # number of classes if a row begins with a byte for its class; 0: no such byte

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.member.identity

    @property
    def picture_bytes(self) -> int:
        return CHANNELS * self.edge**2

    def rows(self, open_input: OpenInput, first: int, stop: int) -> np.ndarray:
        """Read pictures ``[first, stop)``, (n, 3 x edge x edge) uint8 in planes. Raises DataError on failure."""
        row_bytes = self.picture_bytes + bool(self.labels)
        raw = self.member.read(open_input, self.offset + first * row_bytes, (stop - first) * row_bytes)
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row_bytes)
        if not self.labels:
            return rows
        if rows[:, 0].max() >= self.labels:
            raise DataError(f"{self.member.shown}: a label is {rows[:, 0].max()}; must be less than {self.labels}")
        return rows[:, 1:]

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        first, stop = offset // self.picture_bytes, -(-(offset + size) // self.picture_bytes)
        rows = self.rows(open_input, first, stop).reshape(-1, CHANNELS, self.edge, self.edge)
        skipped = offset - first * self.picture_bytes
        return rows.transpose(0, 2, 3, 1).tobytes()[skipped : skipped + size]

    def label(self, open_input: OpenInput, offset: int) -> int:
        place = self.offset + offset // self.picture_bytes * (1 + self.picture_bytes)
        (label,) = self.member.read(open_input, place, 1)
        return label


def picture_properties(edge: int) -> dict[str, int]:
    """Return the properties of square pictures in the image modality."""
    return {"height": edge, "width": edge, "channels": CHANNELS, "resized": 0}
