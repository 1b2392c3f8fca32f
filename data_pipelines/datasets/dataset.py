"""What a published dataset has to say about itself."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from longstride.data_pipelines.datasets.members import Member, members_of
from longstride.data_pipelines.datasets.published import Archive
from longstride.data_pipelines.documents import Document, WalkCounts
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Properties


@dataclass(frozen=True, slots=True)
class Found:
    """The documents of a dataset, in the order in which they are written."""

    splits: Mapping[str, Sequence[Document]]
    properties: Properties
    counts: WalkCounts = field(default_factory=WalkCounts)  # what was left out


class Dataset(Protocol):
    """A dataset in the form in which it is distributed."""

    @property
    def name(self) -> str:
        """As --dataset takes it."""

    @property
    def modality(self) -> str:
        """What kind of data it is."""

    @property
    def archive(self) -> Archive | None:
        """What --download fetches; None where no program may."""

    @property
    def file_names(self) -> Collection[str]:
        """Of its files and of the archives that hold them: a folder with none of these names lacks the dataset."""

    @property
    def where(self) -> str:
        """What a person does to have it, in a few words for messages: "fetch URL"."""

    def find(self, given: Path, unpublished: bool) -> Found:
        """The documents of an archive, file or folder that is there.

        Raises DataError where something is missing, damaged or in another form, and, unless ``unpublished``, where it
        is not what was published.
        """


def files_in(given: Path) -> Iterator[list[Path]]:
    """Where the files of a dataset may lie, nearest first: a file; a folder, then each folder in it, by name.

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


def is_archive(path: Path) -> bool:
    """By its name."""
    return path.name.endswith((".zip", ".tar", ".tar.gz", ".tgz"))


class Archives:
    """The archives of a folder, of which some may have nothing to do with a dataset."""

    def __init__(self, published: Collection[str], given: Path) -> None:
        """``published``: names under which the dataset is distributed. ``given``: what a person named."""
        self._published, self._given = published, given
        self._passed_over: DataError | None = None

    def in_order(self, paths: Iterable[Path]) -> list[Path]:
        """The archives among files, published names first; a file that was named is one whatever its name."""
        archives = [path for path in paths if path == self._given or is_archive(path)]
        return sorted(archives, key=lambda path: path.name not in self._published)

    def members(self, path: Path) -> list[Member]:
        """See ``members_of``; nothing of one that cannot be read, unless it was named or has a published name."""
        try:
            return members_of(path)
        except DataError as error:
            if path == self._given or path.name in self._published:
                raise
            self._passed_over = self._passed_over or error
            return []

    def check_nothing_passed_over(self) -> None:
        """Raises DataError for an archive that could not be read: to be called where nothing was found."""
        if self._passed_over is not None:
            raise self._passed_over
