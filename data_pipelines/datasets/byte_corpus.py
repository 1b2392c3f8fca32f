"""One row of bytes that is cut into splits: the first 90 % to train on, 5 % to validate with, 5 % to test with.

Of the published 100,000,000 bytes these are 90, 5 and 5 millions, as the papers have it. A split is one document.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstride.data_pipelines.datasets.dataset import Found, files_in
from longstride.data_pipelines.datasets.members import Member, members_of
from longstride.data_pipelines.datasets.parts import Parts, Run
from longstride.data_pipelines.datasets.published import Archive, Known
from longstride.data_pipelines.documents import Openings
from longstride.data_pipelines.errors import DataError

_TRAIN_PERCENT, _VALIDATION_PERCENT = 90, 5


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A member as it is: a source (``parts.Source``)."""

    member: Member

    @property
    def identity(self) -> tuple[Any, ...]:
        """The member's."""
        return self.member.identity

    def read(self, openings: Openings, offset: int, size: int) -> bytes:
        """Bytes as they are."""
        return self.member.read(openings, offset, size)


@dataclass(frozen=True, slots=True)
class ByteCorpus:
    """A dataset of one file: see ``Dataset``."""

    name: str  # of the file as well
    archive: Archive
    content: Known
    modality: str = "text"

    @property
    def file_names(self) -> tuple[str, ...]:
        """Of the file and of its archive."""
        return self.name, self.archive.name

    @property
    def where(self) -> str:
        """Where it is to be had."""
        return f"fetch {self.archive.url}"

    def find(self, given: Path, unpublished: bool) -> Found:
        """The splits of the file or its archive: see ``Dataset``."""
        member = self._member(given)
        if not unpublished:
            openings = Openings()
            try:
                self.content.check(member, openings)
            finally:
                openings.close()
        train = member.size * _TRAIN_PERCENT // 100
        validation = member.size * _VALIDATION_PERCENT // 100
        sizes = {"train": train, "validation": validation, "test": member.size - train - validation}
        splits, start = {}, 0
        for split, size in sizes.items():
            splits[split] = Parts([Run(_Bytes(member), start, int(size > 0), size)])
            start += size
        if not all(splits.values()):
            raise DataError(f"{member.shown}: {member.size} bytes are too few for three splits; fetch it again")
        return Found(splits, {})

    def _member(self, given: Path) -> Member:
        if given.is_file():
            found = members_of(given)
            named = [one for one in found if one.base_name == self.name]
            if len(named or found) == 1:
                return (named or found)[0]
            raise DataError(f"{given}: holds {_words(found)} instead of {self.name} alone; {self.where}")
        for files in files_in(given):
            for path in files:
                if path.name in self.file_names:
                    return self._member(path)
        raise DataError(f"{given}: holds neither {self.name} nor {self.archive.name}; {self.where}")


def _words(members: Iterable[Member]) -> str:
    names = [one.name for one in members]
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "") if names else "nothing"
