"""A palette: K colours, and pictures as one token a pixel, the number of the colour that is nearest to it.

Image GPT's "9-bit colour" (Chen et al. 2020, section 3.1) is a palette of 512 colours, found by k-means. All of the
arithmetic here is in whole numbers: the same pixels give the same palette, and the same tokens, on any machine.
"""

import heapq
import re
from functools import cached_property
from typing import Any

import numpy as np

from longstride.data_pipelines.errors import DataError

LEAST_COLOURS, MOST_COLOURS = 2, 2**16
CHANNELS = 3  # red, green, blue
_EDGE = 8  # of a cell: the cube of colours is looked up cell by cell
_CELLS = 256 // _EDGE
_ROUNDS = 40  # of k-means, at most
_LEAST_GAIN = 1000  # a round that lowers the error by less than one part of so many is the last
_MOST_DISTANCES = 2**29  # computed one by one; beyond, looking up is quicker
_DISTANCES = 2**20  # in memory at once


class Palette:
    """K colours, each another one. ``dtype`` is the smallest type of torch's that holds their numbers.

    Raises DataError where there are fewer than 2, or more than 65,536.
    """

    FILE_NAME = "palette.ppm"  # in a data folder: a picture of one row, in which pixel k is colour k
    unit = "pixel"  # what a token stands for

    def __init__(self, colours: np.ndarray) -> None:
        """``colours``: (K, 3) uint8, red, green and blue."""
        self.colours = np.ascontiguousarray(colours, dtype=np.uint8)
        check_count(len(self))
        if len(np.unique(self.colours, axis=0)) != len(self):
            raise DataError(f"a palette of {len(self)} colours has one of them twice")
        self.dtype = np.dtype(np.uint8 if len(self) <= 2**8 else np.int16 if len(self) <= 2**15 else np.int32)

    def __len__(self) -> int:
        return len(self.colours)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Palette) and np.array_equal(self.colours, other.colours)

    def __hash__(self) -> int:
        return hash(self.colours.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Palette, (self.colours,)  # without the table, which another process fills by itself

    def tokens(self, content: np.ndarray) -> np.ndarray:
        """(3n,) uint8, red, green and blue in turn -> (n,) ``dtype``: the nearest colours; the lower of two as near.

        Distances are Euclidean in red, green and blue. Raises DataError for bytes that are no whole pixels.
        """
        if content.size % CHANNELS:
            raise DataError(f"{content.size} bytes: a pixel has {CHANNELS}, red, green and blue")
        red, green, blue = content.reshape(-1, CHANNELS).astype(np.int32).T
        cells = (red // _EDGE * _CELLS + green // _EDGE) * _CELLS + blue // _EDGE
        places = (red % _EDGE * _EDGE + green % _EDGE) * _EDGE + blue % _EDGE
        table, filled = self._table
        for cell in np.unique(cells[~filled[cells]]).tolist():
            table[cell] = self._nearest_in(cell)
            filled[cell] = True
        return table[cells, places].astype(self.dtype)

    def content(self, tokens: np.ndarray) -> np.ndarray:
        """(…, n) integers 0 to K - 1 -> (…, 3n) uint8: their colours."""
        return self.colours[tokens].reshape(*tokens.shape[:-1], -1)

    def to_ppm(self) -> bytes:
        """A picture of one row, as a binary PPM file."""
        return f"P6\n{len(self)} 1\n255\n".encode() + self.colours.tobytes()

    @classmethod
    def from_ppm(cls, content: bytes) -> "Palette":
        """The palette in a file that ``to_ppm`` wrote. Raises DataError for any other file."""
        head = re.match(rb"P6\n(\d{1,5}) 1\n255\n", content)
        if head is None or len(content) != head.end() + CHANNELS * int(head[1]):
            raise DataError("is no PPM picture of one row")
        return cls(np.frombuffer(content, dtype=np.uint8, offset=head.end()).reshape(-1, CHANNELS))

    def to_text(self) -> str:
        """The colours as hexadecimal numbers, one after another: 1a2b3c ffffff."""
        return self.colours.tobytes().hex(" ", CHANNELS)

    @classmethod
    def from_text(cls, text: Any) -> "Palette":
        """The palette in a text that ``to_text`` gave. Raises DataError for anything else."""
        if not isinstance(text, str) or not re.fullmatch(r"[0-9a-f]{6}( [0-9a-f]{6})*", text):
            raise DataError("must be colours as hexadecimal numbers, such as 1a2b3c ffffff")
        return cls(np.frombuffer(bytes.fromhex(text), dtype=np.uint8).reshape(-1, CHANNELS))

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each cell the nearest colour of every colour in it, (cells, 512) uint16, and whether it is filled.

        The system takes memory for cells that are filled alone: pictures have few of the 16 million colours.
        """
        return np.empty((_CELLS**3, _EDGE**3), dtype=np.uint16), np.zeros(_CELLS**3, dtype=bool)

    def _nearest_in(self, cell: int) -> np.ndarray:
        """(512,) integers: the number of the nearest colour for every colour of a cell, red slowest."""
        first = np.array(np.unravel_index(cell, (_CELLS,) * CHANNELS), dtype=np.int32) * _EDGE
        below, above = first - self.colours, self.colours - (first + _EDGE - 1)  # (K, 3) int32
        nearest = (np.maximum(np.maximum(below, above), 0) ** 2).sum(1)  # from the cell's nearest corner
        farthest = (np.maximum(np.abs(below), np.abs(above)) ** 2).sum(1)
        # A colour that is further from all of the cell than another one from any of it is nearest to nothing there.
        candidates = np.flatnonzero(nearest <= farthest.min())
        along = (first[:, None] + np.arange(_EDGE) - self.colours[candidates][:, :, None].astype(np.int32)) ** 2
        red, green, blue = along.transpose(1, 2, 0)  # (8, candidates) each
        distances = red[:, None, None] + green[:, None] + blue  # (8, 8, 8, candidates)
        return candidates[distances.reshape(_EDGE**3, -1).argmin(1)]


def check_count(count: int) -> None:
    """Raises DataError unless a palette may have so many colours."""
    if not LEAST_COLOURS <= count <= MOST_COLOURS:
        nearest = min(max(count, LEAST_COLOURS), MOST_COLOURS)
        rule = f"must be {LEAST_COLOURS} to {MOST_COLOURS:,} colours"
        raise DataError(f"palette={count}: {rule}; nearest {nearest}, and 512 as Image GPT has it")


def make_palette(pixels: np.ndarray, count: int) -> Palette:
    """``count`` colours for pixels (M, 3) uint8 by k-means in red, green and blue (Lloyd 1982).

    It begins with a cut of the colours into boxes, and so needs no random numbers. Centres are rounded in every round;
    those that fall together or lose all pixels move to the pixels that are represented worst. Raises DataError where
    there are fewer different pixels.
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
        kept = totals > 0
        doubled = 2 * totals[kept, None]
        centres = np.unique((2 * sums[kept].astype(np.int64) + totals[kept, None]) // doubled, axis=0)
        if len(centres) < count:
            centres = _filled_up(centres, colours, weights, count)
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
    """(n,) the number of each colour's box, of ``count``: the worst box is cut at its mean along its longest axis."""

    def box(members: np.ndarray) -> tuple[float, int, int, int, np.ndarray]:
        of_box, values = weights[members], colours[members]
        total, sums = int(of_box.sum()), of_box @ values
        spread = (of_box @ values**2) * total - sums**2  # of each channel, times the total; whole numbers
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


def _filled_up(centres: np.ndarray, colours: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """(count, 3): the centres, and those of the colours that they represent worst."""
    if len(centres) < LEAST_COLOURS:
        return colours[np.argsort(-weights, kind="stable")[:count]]
    palette = Palette(centres)
    errors = _errors(palette, _members(palette, colours), colours, weights)
    worst = np.argsort(-errors, kind="stable")  # none of them is a centre
    return np.unique(np.concatenate([centres, colours[worst[: count - len(centres)]]]), axis=0)


def _members(palette: Palette, colours: np.ndarray) -> np.ndarray:
    """(n,) integers: as ``Palette.tokens``, of colours (n, 3)."""
    if len(colours) * len(palette) > _MOST_DISTANCES:
        return palette.tokens(colours.astype(np.uint8).reshape(-1))
    centres = palette.colours.astype(np.float32)  # whole numbers below 2**24, which fp32 adds without rounding
    lengths, doubled = (centres**2).sum(1), 2 * centres.T
    rows = max(1, _DISTANCES // len(palette))
    parts = (colours[first : first + rows].astype(np.float32) for first in range(0, len(colours), rows))
    return np.concatenate([(lengths - part @ doubled).argmin(1) for part in parts])


def _errors(palette: Palette, members: np.ndarray, colours: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(n,) int64: each colour's squared distance to its own in the palette, times its weight."""
    return weights * ((colours - palette.colours[members]) ** 2).sum(1)
