"""Classes of documents: ``.cls`` texts as WebDataset has them, and ``labels.npy`` of a data folder.

``labels.npy`` is an array (documents,) int32: the class of each document of a split in order, splits by their names.
"""

import re
from collections.abc import Mapping
from io import BytesIO

import numpy as np

from longstride.data_pipelines.errors import DataError

LABEL_EXTENSION = "cls"
LABELS_NAME = "labels.npy"
MOST_TEXT_BYTES = 64  # of a class
_LARGEST = 2**31 - 1
_NUMBER = re.compile(rb"\s*(\d{1,10})\s*")


def parse_label(where: str, content: bytes) -> int:
    """Parse a class, decimal digits. Raises DataError, naming ``where``, for anything else.

    ``content`` may end after ``MOST_TEXT_BYTES`` + 1 bytes, as it is wrong then.
    """
    match = _NUMBER.fullmatch(content)
    if match is None or len(content) > MOST_TEXT_BYTES or int(match[1]) > _LARGEST:
        text = content[:MOST_TEXT_BYTES].decode("utf-8", "backslashreplace")
        rule = f"must be a class as digits, from 0 to {_LARGEST}, such as 3; correct it, or leave out --labels"
        raise DataError(f"{where}={text!r}: {rule}")
    return int(match[1])


def labels_to_bytes(labels: Mapping[str, np.ndarray]) -> bytes:
    """Return the content of ``labels.npy`` from the classes (documents,) of each split."""
    buffer = BytesIO()
    columns = [np.empty(0, dtype="<i4"), *(labels[split].astype("<i4") for split in sorted(labels))]
    np.save(buffer, np.concatenate(columns), allow_pickle=False)
    return buffer.getvalue()


_EMPTY_BYTES = len(labels_to_bytes({}))  # numpy leaves room for any length


def labels_bytes(documents: int) -> int:
    """Return the size of ``labels.npy`` for so many documents."""
    return _EMPTY_BYTES + np.dtype("<i4").itemsize * documents


def labels_from_bytes(content: bytes, documents: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Parse ``labels.npy``: the classes (documents,) int32 of each split, from the number of its documents.

    Raises DataError for anything that ``labels_to_bytes`` does not write.
    """
    total = sum(documents.values())
    if len(content) == labels_bytes(total):
        array = np.frombuffer(content, dtype="<i4", offset=_EMPTY_BYTES)
        ends = np.cumsum([documents[split] for split in sorted(documents)])[:-1]
        labels = dict(zip(sorted(documents), np.split(array, ends), strict=True))
        if labels_to_bytes(labels) == content and not (array < 0).any():
            return labels
    raise DataError(f"is not a list of {total:,} classes, one for each document")
