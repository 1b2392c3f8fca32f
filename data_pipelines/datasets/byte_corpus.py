"""enwik8 and text8: one file of 10^8 bytes, divided into 90 % train, 5 % validation and 5 % test.

These are the 90, 5 and 5 million bytes of the papers. A split is one document.
"""

from dataclasses import dataclass
from pathlib import Path

from longstride.data_pipelines.datasets.dataset import (
    Archive,
    Dataset,
    DatasetContent,
    Excerpt,
    PublishedFile,
    files_in,
)
from longstride.data_pipelines.datasets.members import Member, members_of
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError

_TRAIN_PERCENT, _VALIDATION_PERCENT = 90, 5


@dataclass(frozen=True, kw_only=True)
class ByteCorpus(Dataset):
    """A dataset of one file with the dataset's name."""

    archive: Archive
    content: PublishedFile
    modality: str = "text"

    @property
    def file_names(self) -> tuple[str, ...]:
        return self.name, self.archive.name

    def find(self, path: Path, unpublished: bool) -> DatasetContent:
        member = self._member(path)
        if not unpublished:
            with OpenInput() as open_input:
                self.content.check(member, open_input)
        train = member.size * _TRAIN_PERCENT // 100
        validation = member.size * _VALIDATION_PERCENT // 100
        sizes = {"train": train, "validation": validation, "test": member.size - train - validation}
        splits, start = {}, 0
        for split, size in sizes.items():
            splits[split] = [Excerpt(member, start, size)]
            start += size
        if not all(sizes.values()):
            raise DataError(f"{member.shown}: {member.size} bytes are too few for three splits; fetch it again")
        return DatasetContent(splits, {})

    def _member(self, path: Path) -> Member:
        if path.is_file():
            members = members_of(path)
            candidates = [member for member in members if member.base_name == self.name] or members
            if len(candidates) == 1:
                return candidates[0]
            names = ", ".join(member.name for member in members[:3]) + (" …" if len(members) > 3 else "")
            raise DataError(f"{path}: holds {names or 'nothing'} instead of only {self.name}; {self.where}")
        for file in files_in(path):
            if file.name in self.file_names:
                return self._member(file)
        raise DataError(f"{path}: holds neither {self.name} nor {self.archive.name}; {self.where}")


ENWIK8 = ByteCorpus(  # the beginning of an English Wikipedia dump of 2006, as XML: http://mattmahoney.net/dc/textdata
    name="enwik8",
    archive=Archive(
        url="http://mattmahoney.net/dc/enwik8.zip",
        size=36_445_475,
        sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
    content=PublishedFile(100_000_000, "md5", "a1fa5ffddb56f4953e226637dabbb36a"),  # published with it
)
TEXT8 = ByteCorpus(  # the same Wikipedia in small letters and spaces
    name="text8",
    archive=Archive(
        url="http://mattmahoney.net/dc/text8.zip",
        size=31_344_016,
        sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    ),
    content=PublishedFile(100_000_000, "md5", "3bea1919949baf155f99411df5fada7e"),
)
