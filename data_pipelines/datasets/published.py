"""What is known of a published file, and whether a file is the one."""

from dataclasses import dataclass

from longstride.data_pipelines.datasets.members import Member
from longstride.data_pipelines.documents import Openings
from longstride.data_pipelines.errors import DataError

WAY_OUT = "fetch it again, or take it as it is with --unpublished"


@dataclass(frozen=True, slots=True)
class Known:
    """A file that everybody has, by its size and a checksum that was published with it or is known of it."""

    size: int
    algorithm: str  # as hashlib names it
    digest: str  # hexadecimal

    def check(self, member: Member, openings: Openings) -> None:
        """Raises DataError for a member that is another file."""
        if member.size != self.size:
            raise DataError(
                f"{member.shown}: {member.size:,} bytes, and the published file has {self.size:,}; {WAY_OUT}"
            )
        found = member.digest(openings, self.algorithm)
        if found != self.digest:
            name = self.algorithm.upper()
            raise DataError(f"{member.shown}: its {name} is {found}, and the published one {self.digest}; {WAY_OUT}")


@dataclass(frozen=True, slots=True)
class Archive:
    """What a dataset is distributed in."""

    url: str
    size: int  # bytes
    sha256: str  # hexadecimal

    @property
    def folder_url(self) -> str:
        """Without the name."""
        return self.url.rpartition("/")[0]

    @property
    def name(self) -> str:
        """The file's name, behind the last slash."""
        return self.url.rpartition("/")[2]
