"""Pictures in rows of fixed size, as CIFAR-10 and the downsampled ImageNet are distributed.

A row holds all red bytes of a picture, then all green and all blue ones. Content is the order of the image modality:
row after row, in a row pixel after pixel, in a pixel red, green, blue.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from longstride.data_pipelines.datasets.members import Member
from longstride.data_pipelines.documents import Openings
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import CHANNELS


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """The pictures of a member: a source (``parts.Source``)."""

    member: Member
    offset: int  # of the first row in the member
    edge: int  # pixels, of a square picture
    labels: int = 0  # so many kinds, one byte of it before each picture; 0: no such byte

    @property
    def identity(self) -> tuple[Any, ...]:
        """The member's."""
        return self.member.identity

    def read(self, openings: Openings, offset: int, size: int) -> bytes:
        """Content bytes: see ``Source``. Raises DataError for a label that cannot be: the rows are then no rows."""
        first, stop = offset // self._content_bytes, -(-(offset + size) // self._content_bytes)
        raw = self.member.read(openings, self.offset + first * self._row_bytes, (stop - first) * self._row_bytes)
        rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, self._row_bytes)
        if self.labels:
            if rows[:, 0].max() >= self.labels:
                raise DataError(f"{self.member.shown}: a label is {rows[:, 0].max()}, not under {self.labels}")
            rows = rows[:, 1:]
        skipped = offset - first * self._content_bytes
        return interleaved(rows, self.edge)[skipped : skipped + size]

    @property
    def _content_bytes(self) -> int:
        return CHANNELS * self.edge**2

    @property
    def _row_bytes(self) -> int:
        return self._content_bytes + bool(self.labels)


def interleaved(rows: np.ndarray, edge: int) -> bytes:
    """(n, 3 x edge x edge) uint8 in planes -> the bytes of n pictures, pixel after pixel."""
    return rows.reshape(-1, CHANNELS, edge, edge).transpose(0, 2, 3, 1).tobytes()


def picture_properties(edge: int) -> dict[str, int]:
    """Those of the image modality."""
    return {"height": edge, "width": edge, "channels": CHANNELS, "resized": 0}
