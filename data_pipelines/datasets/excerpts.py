"""Documents that are excerpts of larger files: made one at a time, so that a million of them cost a few numbers.

CIFAR-10 and the downsampled ImageNet are distributed in planes: rows of fixed size, each with all red bytes of a
picture, then all green, then all blue ones. Content is in the order of the image modality: row after row, in a row
pixel after pixel, in a pixel red, green, blue.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np

from longstride.data_pipelines.datasets.members import Member
from longstride.data_pipelines.documents import OpenInput
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import CHANNELS, Modality, Properties


class Source(Protocol):
    """The content of a whole file of a dataset, as one row of bytes. It can be pickled."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """See ``Document``."""

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``. Reading on is cheap. Raises DataError where that fails."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A document: ``size`` bytes of a source from ``start`` on."""

    source: Source
    start: int
    size: int

    @property
    def identity(self) -> tuple[Any, ...]:
        return (*self.source.identity, self.start, self.size)

    def read(self, open_input: OpenInput, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        return self.source.read(open_input, self.start + offset, size)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Documents of one size that follow each other in a source."""

    source: Source
    first: int  # content bytes before them
    count: int
    size: int  # bytes of each


class Excerpts(Sequence[Excerpt]):
    """The documents of stretches, in order."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = [stretch for stretch in stretches if stretch.count]

    def __len__(self) -> int:
        return sum(stretch.count for stretch in self.stretches)

    def __iter__(self) -> Iterator[Excerpt]:
        for stretch in self.stretches:
            for number in range(stretch.count):
                yield Excerpt(stretch.source, stretch.first + number * stretch.size, stretch.size)

    @overload
    def __getitem__(self, place: int) -> Excerpt: ...

    @overload
    def __getitem__(self, place: slice) -> "Excerpts": ...

    def __getitem__(self, place: "int | slice") -> "Excerpt | Excerpts":
        """One document, or those of a slice without a step."""
        chosen = range(len(self))[place]
        between = chosen if isinstance(chosen, range) else range(chosen, chosen + 1)
        assert between.step == 1, "documents are taken in order"
        kept, before = [], 0
        for stretch in self.stretches:
            low, high = max(between.start - before, 0), min(between.stop - before, stretch.count)
            if low < high:
                first = stretch.first + low * stretch.size
                kept.append(Stretch(stretch.source, first, high - low, stretch.size))
            before += stretch.count
        excerpts = Excerpts(kept)
        return excerpts if isinstance(place, slice) else next(iter(excerpts))


@dataclass(frozen=True)
class Planes(ABC):
    """The pictures of a member: a ``Source``."""

    member: Member
    edge: int  # pixels, of a square picture

    @property
    def identity(self) -> tuple[Any, ...]:
        """The member's."""
        return self.member.identity

    @abstractmethod
    def rows(self, open_input: OpenInput, first: int, stop: int) -> np.ndarray:
        """Pictures ``[first, stop)``: (n, 3 x edge x edge) uint8, in planes. Raises DataError where they are none."""

    def read(self, open_input: OpenInput, offset: int, size: int) -> bytes:
        """See ``Source``."""
        picture_bytes = CHANNELS * self.edge**2
        first, stop = offset // picture_bytes, -(-(offset + size) // picture_bytes)
        rows = self.rows(open_input, first, stop).reshape(-1, CHANNELS, self.edge, self.edge)
        skipped = offset - first * picture_bytes
        return rows.transpose(0, 2, 3, 1).tobytes()[skipped : skipped + size]


@dataclass(frozen=True)
class PlaneRows(Planes):
    """Rows of pictures as they lie in the member."""

    offset: int  # of the first row in the member
    labels: int = 0  # number of classes: a row begins with a byte of its class; 0: no such byte

    def rows(self, open_input: OpenInput, first: int, stop: int) -> np.ndarray:
        """See ``Planes``."""
        row_bytes = CHANNELS * self.edge**2 + bool(self.labels)
        raw = self.member.read(open_input, self.offset + first * row_bytes, (stop - first) * row_bytes)
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, row_bytes)
        if not self.labels:
            return rows
        if rows[:, 0].max() >= self.labels:  # then they are no rows
            raise DataError(f"{self.member.shown}: a label is {rows[:, 0].max()}, not under {self.labels}")
        return rows[:, 1:]


def picture_properties(edge: int) -> dict[str, int]:
    """Properties of square pictures in the image modality."""
    return {"height": edge, "width": edge, "channels": CHANNELS, "resized": 0}
