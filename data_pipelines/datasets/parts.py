"""Documents that are parts of larger files: made one at a time, so that a million of them are a few numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from longstride.data_pipelines.documents import Openings
from longstride.data_pipelines.modalities import Modality, Properties


class Source(Protocol):
    """The content of a whole file of a dataset, as one row of bytes. It can be pickled."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """As ``Document`` has it."""

    def read(self, openings: Openings, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``; reading on is cheap. Raises DataError where they cannot be had."""


@dataclass(frozen=True, slots=True)
class Part:
    """A document: ``size`` bytes of a source from ``start`` on."""

    source: Source
    start: int
    size: int

    @property
    def identity(self) -> tuple[Any, ...]:
        """The source's, and which part of it."""
        return (*self.source.identity, self.start, self.size)

    def read(self, openings: Openings, modality: Modality, properties: Properties, offset: int, size: int) -> bytes:
        """A piece of the content: see ``Document``."""
        return self.source.read(openings, self.start + offset, size)


@dataclass(frozen=True, slots=True)
class Run:
    """Documents of one size that follow each other in a source."""

    source: Source
    first: int  # content bytes before them
    count: int
    size: int  # bytes of each


class Parts(Sequence[Part]):
    """The documents of runs, in their order."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = [run for run in runs if run.count]

    def __len__(self) -> int:
        return sum(run.count for run in self.runs)

    def __iter__(self) -> Iterator[Part]:
        for run in self.runs:
            for number in range(run.count):
                yield Part(run.source, run.first + number * run.size, run.size)

    @overload
    def __getitem__(self, place: int) -> Part: ...

    @overload
    def __getitem__(self, place: slice) -> "Parts": ...

    def __getitem__(self, place: "int | slice") -> "Part | Parts":
        """One document, or those of a slice without a step."""
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            assert step == 1, "documents are taken in their order"
            return self._between(start, max(start, stop))
        (found,) = self._between(range(len(self))[place], range(len(self))[place] + 1)
        return found

    def _between(self, start: int, stop: int) -> "Parts":
        found, before = [], 0
        for run in self.runs:
            low, high = max(start - before, 0), min(stop - before, run.count)
            if low < high:
                found.append(Run(run.source, run.first + low * run.size, high - low, run.size))
            before += run.count
        return Parts(found)
