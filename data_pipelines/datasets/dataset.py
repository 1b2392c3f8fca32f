"""What a published dataset says of itself, where its files are found, and how a missing one is fetched."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longstride.data_pipelines.datasets.members import Member, members_of
from longstride.data_pipelines.documents import Document, LeftOut, OpenInput
from longstride.data_pipelines.errors import DataError, as_data_error
from longstride.data_pipelines.modalities import Properties
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import Progress
from longstride.data_pipelines.stores import StoredFile

WAY_OUT = "fetch it again, or take it as it is with --unpublished"
DOWNLOADS = Path("downloads")
_ATTEMPTS = 4  # in a row without a byte: the user waits, and a few seconds show whether there is a network


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """Size and checksum of a published file: published beside it, or of a copy that we know to be good."""

    size: int
    algorithm: str  # as hashlib names it
    digest: str  # hexadecimal

    def check(self, member: Member, open_input: OpenInput) -> None:
        """Raises DataError for a member that is another file."""
        if member.size != self.size:
            raise DataError(
                f"{member.shown}: {member.size:,} bytes, and the published file has {self.size:,}; {WAY_OUT}"
            )
        digest = member.digest(open_input, self.algorithm)
        if digest != self.digest:
            name = self.algorithm.upper()
            raise DataError(f"{member.shown}: its {name} is {digest}, and the published one {self.digest}; {WAY_OUT}")


@dataclass(frozen=True, slots=True)
class Archive:
    """The file that a dataset is distributed in."""

    url: str
    size: int  # bytes
    sha256: str  # hexadecimal

    @property
    def name(self) -> str:
        """The file's name, behind the last slash."""
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

    name: str  # as --dataset takes it
    modality: str
    archive: Archive | None  # the file that --download fetches; None where no program may fetch it

    @property
    @abstractmethod
    def file_names(self) -> Collection[str]:
        """Names of its files and of the archives that hold them. A folder with none of them lacks the dataset."""

    @property
    def where(self) -> str:
        """How the user gets it, in a few words for messages."""
        assert self.archive is not None
        return f"fetch {self.archive.url}"

    @abstractmethod
    def find(self, given: Path, unpublished: bool) -> DatasetContent:
        """The documents of an archive, file or folder.

        Raises DataError where something is missing, damaged or in another form, and, unless ``unpublished``, where it
        differs from what was published.
        """


def default_input(dataset: Dataset) -> Path:
    """The input, and the target of a download, where the user names none."""
    return DOWNLOADS if dataset.archive is None else DOWNLOADS / dataset.archive.name


def fetched_input(dataset: Dataset, place: Path, is_given: bool, download: bool, progress: Progress | None) -> Path:
    """The input, fetched if it is missing and ``download`` is set. ``is_given``: the user named it.

    An archive is fetched to ``place`` if that has an archive's name, else into that folder. Raises DataError where the
    input is missing and cannot be fetched.
    """
    archive = dataset.archive
    how = dataset.where
    if archive is not None:
        how += f", or let --download do it (into {DOWNLOADS}, or what --input names)"
    if not is_given and not download:
        raise DataError(f"--input: must name the archive or folder of {dataset.name}; {how}")
    with as_data_error(place):
        if not (download and place.is_dir()):
            is_present = place.exists()
        elif archive is None:  # no download would help: any file is taken as the dataset
            is_present = any(place.iterdir())
        else:
            is_present = any(path.name in dataset.file_names for files in files_in(place) for path in files)
    if is_present:
        return place
    if not download:
        raise DataError(f"--input={place}: no such file or folder; {how}")
    if archive is None:
        raise DataError(f"--download: no program may fetch {dataset.name}; {dataset.where} as --input")
    target = place / archive.name if place.is_dir() or not _is_archive(place) else place
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


def files_in(given: Path) -> Iterator[list[Path]]:
    """Where the files of a dataset may lie, nearest first: a file; or a folder, then each folder in it, by name.

    Raises DataError for a folder that cannot be read.
    """
    if given.is_file():
        yield [given]
        return
    try:
        inside = sorted(given.iterdir())
        yield [path for path in inside if path.is_file()]
        for folder in inside:
            if folder.is_dir() and not folder.name.startswith("."):
                yield [path for path in sorted(folder.iterdir()) if path.is_file()]
    except OSError as error:
        raise DataError(f"{error.filename}: the folder cannot be read ({error.strerror}); allow reading") from error


def _is_archive(path: Path) -> bool:
    """By its name."""
    return path.name.endswith((".zip", ".tar", ".tar.gz", ".tgz"))


class Archives:
    """The archives of a folder. Some of them may have nothing to do with the dataset."""

    def __init__(self, published: Collection[str], given: Path) -> None:
        """``published``: names under which the dataset is distributed. ``given``: the path that the user named."""
        self._published, self._given = published, given
        self._passed_over: DataError | None = None

    def in_order(self, paths: Iterable[Path]) -> list[Path]:
        """The archives among files, published names first. A file that the user named counts whatever its name."""
        archives = [path for path in paths if path == self._given or _is_archive(path)]
        return sorted(archives, key=lambda path: path.name not in self._published)

    def members(self, path: Path) -> list[Member]:
        """See ``members_of``. Nothing of an unreadable archive, unless the user named it or its name is published."""
        try:
            return members_of(path)
        except DataError as error:
            if path == self._given or path.name in self._published:
                raise
            self._passed_over = self._passed_over or error
            return []

    def check_nothing_passed_over(self) -> None:
        """Raises DataError for an archive that could not be read. Call it where nothing was found."""
        if self._passed_over is not None:
            raise self._passed_over
