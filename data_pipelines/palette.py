"""Palettes: K colours. A pixel becomes one token, the index of the nearest colour.

Image GPT's "9-bit colour" (Chen et al. 2020, section 3.1) is a palette of 512 colours, found by k-means. All
arithmetic is in integers: the same pixels give the same palette and the same tokens on any machine.
"""

import heapq
import re
from functools import cached_property
from typing import Any

import numpy as np

from longstride.data_pipelines.errors import DataError

LEAST_COLOURS, MOST_COLOURS = 2, 2**16
CHANNELS = 3  # red, green, blue
_EDGE = 8  # edge of a cell of the colour cube, for look-ups
_CELLS = 256 // _EDGE  # cells along an axis
_ROUNDS = 40  # most rounds of k-means
_LEAST_GAIN = 1000  # k-means stops when a round lowers the error by less than 1/_LEAST_GAIN
_MOST_DISTANCES = 2**29  # for more distances than this, a table is faster
_DISTANCES = 2**20  # in memory at once


class Palette:
    """K different colours. ``dtype`` is the smallest integer type of torch that holds their indexes.

    Raises DataError for fewer than 2 colours, more than 65,536, or a repeated one.
    """

    FILE_NAME = "palette.ppm"  # in a data folder: a picture of one row, in which pixel k is colour k
    unit = "pixel"  # of a token

    def __init__(self, colours: np.ndarray) -> None:
        """Store ``colours``, (K, 3) uint8: red, green and blue."""
        self.colours = np.ascontiguousarray(colours, dtype=np.uint8)
        check_count(len(self))
        if len(np.unique(self.colours, axis=0)) != len(self):
            raise DataError(f"a palette of {len(self)} colours contains a colour twice")
        self.dtype = np.dtype(np.uint8 if len(self) <= 2**8 else np.int16 if len(self) <= 2**15 else np.int32)

    def __len__(self) -> int:
        return len(self.colours)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Palette) and np.array_equal(self.colours, other.colours)

    def __hash__(self) -> int:
        return hash(self.colours.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Palette, (self.colours,)  # without the table, which every process fills itself

    def tokens(self, content: np.ndarray) -> np.ndarray:
        """Map pixels, (3n,) uint8, to the nearest colours, (n,) ``dtype``; a tie goes to the lower index.

        Distances are Euclidean in red, green and blue. Raises DataError if the bytes are not whole pixels.
        """
        if content.size % CHANNELS:
            raise DataError(f"{content.size} bytes: a pixel has {CHANNELS}, red, green and blue")
        red, green, blue = content.reshape(-1, CHANNELS).astype(np.int32).T
        cells = (red // _EDGE * _CELLS + green // _EDGE) * _CELLS + blue // _EDGE
        places = (red % _EDGE * _EDGE + green % _EDGE) * _EDGE + blue % _EDGE
        table, filled = self._table
        for cell in np.unique(cells[~filled[cells]]).tolist():
            first = np.array(np.unravel_index(cell, (_CELLS,) * CHANNELS), dtype=np.int32) * _EDGE
            below, above = first - self.colours, self.colours - (first + _EDGE - 1)  # (K, 3) int32
            nearest = (np.maximum(np.maximum(below, above), 0) ** 2).sum(1)  # from the cell's nearest corner
            farthest = (np.maximum(np.abs(below), np.abs(above)) ** 2).sum(1)
            # A colour cannot be nearest if another one is closer even to the farthest corner of the cell.
            candidates = np.flatnonzero(nearest <= farthest.min())
            along = (first[:, None] + np.arange(_EDGE) - self.colours[candidates][:, :, None].astype(np.int32)) ** 2
            r, g, b = along.transpose(1, 2, 0)  # (8, candidates) each
            distances = r[:, None, None] + g[:, None] + b  # (8, 8, 8, candidates)
            table[cell], filled[cell] = candidates[distances.reshape(_EDGE**3, -1).argmin(1)], True
        return table[cells, places].astype(self.dtype)

    def content(self, tokens: np.ndarray) -> np.ndarray:
        """Map tokens, (..., n) integers from 0 to K - 1, to their colours, (..., 3n) uint8."""
        return self.colours[tokens].reshape(*tokens.shape[:-1], -1)

    def to_ppm(self) -> bytes:
        """Return a picture of one row as a binary PPM file."""
        return f"P6\n{len(self)} 1\n255\n".encode() + self.colours.tobytes()

    @classmethod
    def from_ppm(cls, content: bytes) -> "Palette":
        """Read a palette from a file that ``to_ppm`` wrote. Raises DataError for any other file."""
        head = re.match(rb"P6\n(\d{1,5}) 1\n255\n", content)
        if head is None or len(content) != head.end() + CHANNELS * int(head[1]):
            raise DataError("is not a PPM picture of one row")
        return cls(np.frombuffer(content, dtype=np.uint8, offset=head.end()).reshape(-1, CHANNELS))

    def to_text(self) -> str:
        """Return the colours as hexadecimal numbers, separated by spaces: 1a2b3c ffffff."""
        return self.colours.tobytes().hex(" ", CHANNELS)

    @classmethod
    def from_text(cls, text: Any) -> "Palette":
        """Read a palette from a text that ``to_text`` returned. Raises DataError for anything else."""
        if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{6}( [0-9a-f]{6})*", text):
            raise DataError("must be colours as hexadecimal numbers, such as 1a2b3c ffffff")
        return cls(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).reshape(-1, CHANNELS))

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Nearest palette colour for every colour of each cell, (cells, 512) uint16, and which cells are filled.

        The system only allocates memory for filled cells: pictures have few of the 16 million colours.
        """
        return np.empty((_CELLS**3, _EDGE**3), dtype=np.uint16), np.zeros(_CELLS**3, dtype=bool)


def check_count(count: int) -> None:
    """Raise DataError unless a palette may have ``count`` colours."""
    if not LEAST_COLOURS <= count <= MOST_COLOURS:
        nearest = min(max(count, LEAST_COLOURS), MOST_COLOURS)
        rule = f"must be {LEAST_COLOURS} to {MOST_COLOURS:,} colours"
        raise DataError(f"palette={count}: {rule}; nearest {nearest}, and 512 as Image GPT has it")


def make_palette(pixels: np.ndarray, count: int) -> Palette:
    """Find ``count`` colours for pixels, (M, 3) uint8, by k-means in red, green and blue (Lloyd 1982).

    The first centres come from splitting the colours into boxes, so no random numbers are needed. Centres are rounded
    in every round. Centres that coincide or lose all pixels move to the colours with the largest errors. Raises
    DataError if there are fewer different pixels.
    """
    check_count(count)
    packed, weights = np.unique(pixels.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1]), return_counts=True)
    colours = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)  # (n, 3) int64
    if len(colours) < count:
        rule = f"the pixels that were looked at have {len(colours):,} different colours"
        raise DataError(f"palette={count}: {rule}; at most {len(colours)}")
    members = _boxes(colours, weights, count)
    best, least = None, None
    for _ in range(_ROUNDS):
        totals = np.bincount(members, weights, minlength=count).astype(np.int64)  # floats hold these sums exactly
        sums = np.stack([np.bincount(members, weights * channel, minlength=count) for channel in colours.T], axis=1)
        used = totals > 0
        doubled = 2 * totals[used, None]
        centres = np.unique((2 * sums[used].astype(np.int64) + totals[used, None]) // doubled, axis=0)
        if len(centres) == 1:  # no palette
            centres = colours[np.argsort(-weights, kind="stable")[:count]]
        elif len(centres) < count:
            coarse = Palette(centres)
            errors = _errors(coarse, _members(coarse, colours), colours, weights)
            worst = np.argsort(-errors, kind="stable")  # none of them is a centre
            centres = np.unique(np.concatenate([centres, colours[worst[: count - len(centres)]]]), axis=0)
        palette = Palette(centres)
        members = _members(palette, colours)
        error = int(_errors(palette, members, colours, weights).sum())
        if least is not None and error >= least:
            break
        last = least is not None and _LEAST_GAIN * (least - error) < least
        best, least = palette, error
        if last:
            break
    assert best is not None
    return best


def _boxes(colours: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Assign colours to ``count`` boxes, (n,) int64: repeatedly split the worst box at the mean of its longest axis."""

    def box(members: np.ndarray) -> tuple[float, int, int, int, np.ndarray]:
        of_box, values = weights[members], colours[members]
        total, sums = int(of_box.sum()), of_box @ values
        spread = (of_box @ values**2) * total - sums**2  # per channel, times the total; integers
        axis = int(spread.argmax())
        return -float(spread.sum()) / total, int(members[0]), axis, int(sums[axis]) // total, members

    heap = [box(np.arange(len(colours)))]
    while len(heap) < count:
        _, _, axis, mean, members = heapq.heappop(heap)  # first members differ, so arrays are never compared
        low = colours[members, axis] <= mean
        for part in (members[low], members[~low]):
            heapq.heappush(heap, box(part))
    numbers = np.empty(len(colours), dtype=np.int64)
    for number, (*_, members) in enumerate(heap):
        numbers[members] = number
    return numbers


def _members(palette: Palette, colours: np.ndarray) -> np.ndarray:
    """Return the nearest palette colour of colours (n, 3), (n,) integers, like ``Palette.tokens``."""
    if len(colours) * len(palette) > _MOST_DISTANCES:
        return palette.tokens(colours.astype(np.uint8).reshape(-1))
    centres = palette.colours.astype(np.float32)  # fp32 adds integers below 2**24 without rounding
    lengths, doubled = (centres**2).sum(1), 2 * centres.T
    rows = max(1, _DISTANCES // len(palette))
    parts = (colours[first : first + rows].astype(np.float32) for first in range(0, len(colours), rows))
    return np.concatenate([(lengths - part @ doubled).argmin(1) for part in parts])


def _errors(palette: Palette, members: np.ndarray, colours: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the squared distance of each colour to its palette colour, times its weight, (n,) int64."""
    return weights * ((colours - palette.colours[members]) ** 2).sum(1)
