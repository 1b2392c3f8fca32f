"""The end of the data as the validation split: the last documents, and the end of the one where it begins.

A corpus of one file has no other way. Where validation begins follows from the documents' sizes and its share of the
bytes. A text is cut before a character, a sound before a frame; pictures are not cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import overload

from longstride.data_pipelines.documents import DocumentPart, OpenInput, WholeDocument
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties

_OTHERWISE = "add files, or set it to 0 to train without evaluations"


@dataclass(frozen=True)
class Stretch(Sequence[WholeDocument | DocumentPart]):
    """Neighbouring documents of a sequence, some of them in part. They are made one at a time, as there may be many."""

    documents: Sequence[WholeDocument]
    start: int
    stop: int
    parts: Mapping[int, DocumentPart]  # by the places of their documents

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[WholeDocument | DocumentPart]:
        for place, document in islice(enumerate(self.documents), self.start, self.stop):
            yield self.parts.get(place, document)

    @overload
    def __getitem__(self, place: int) -> WholeDocument | DocumentPart: ...

    @overload
    def __getitem__(self, place: slice) -> list[WholeDocument | DocumentPart]: ...

    def __getitem__(self, place: int | slice) -> WholeDocument | DocumentPart | list[WholeDocument | DocumentPart]:
        chosen = range(self.start, self.stop)[place]
        return list(self)[place] if isinstance(chosen, range) else self.parts.get(chosen) or self.documents[chosen]


def hold_out_end(
    documents: Sequence[WholeDocument], fraction: float, modality: Modality, properties: Properties
) -> dict[str, Stretch]:
    """The train and the validation split, in the documents' order. The second has this share of the bytes.

    Of documents that are not cut, which have one size, it has this share, but at least one.

    Raises DataError where one of the splits would be empty, and for a document that cannot be read.
    """
    count = len(documents)
    if not modality.divisible:
        if count == 1:
            rule = f"the only file, {documents[0].source}, cannot be in both splits, and {modality.words} are not cut"
            raise DataError(f"validation_fraction={fraction}: {rule}; {_OTHERWISE}")
        number = count - min(max(1, round(count * fraction)), count - 1)
        return {"train": Stretch(documents, 0, number, {}), "validation": Stretch(documents, number, count, {})}
    total = sum(document.size for document in documents)
    first = total - round(total * fraction)  # byte of the validation split, in the documents end to end
    if first == total:
        raise _holds_out(fraction, "none", total)
    ends = accumulate(document.size for document in documents)
    number, document, end = next(
        (number, *each) for number, each in enumerate(zip(documents, ends, strict=True)) if each[1] > first
    )
    place = first - (end - document.size)
    if place and modality.cut_reach:
        with OpenInput() as open_input:
            start = place - min(place, modality.cut_reach)
            content = document.read(open_input, modality, properties, start, place + 1 - start)
        place = start + modality.cut(content, place - start)
    if number == place == 0:
        raise _holds_out(fraction, "all", total)
    sides = DocumentPart(document, 0, place), DocumentPart(document, place, document.size - place)
    train, validation = ({number: side} if place else {} for side in sides)
    return {
        "train": Stretch(documents, 0, number + bool(place), train),
        "validation": Stretch(documents, number, count, validation),
    }


def _holds_out(fraction: float, what: str, total: int) -> DataError:
    rule = f"holds out {what} of {total:,} byte{'' if total == 1 else 's'}"
    return DataError(f"validation_fraction={fraction}: {rule}; {_OTHERWISE}")
