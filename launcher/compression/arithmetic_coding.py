"""Arithmetic coding by a range coder: symbols to bytes and back, at the cost of their probabilities.

A symbol has an interval of the integers 0 to 2**40. The coder keeps a range of 2**56 to 2**64 numbers and narrows it to
each symbol's share, which loses at most 2.2e-5 bits by rounding; all of it is integers, so that both ways agree to the
bit. Letters: B rows, V symbols.
"""

from __future__ import annotations

import numpy as np

TOTAL_BITS = 40  # of the integers that all symbols of a step share: the most that one symbol can cost
TOTAL = 1 << TOTAL_BITS
_STATE_BITS = 64
_MASK = (1 << _STATE_BITS) - 1
_LEAST_RANGE = 1 << (_STATE_BITS - 8)
_BEYOND = 7  # bytes of the state that an encoder leaves out at the end: they are zeros


class DamagedError(ValueError):
    """The coded bytes are not what an encoder made."""


def intervals(logits: np.ndarray) -> np.ndarray:
    """Where each symbol's interval begins, and the last one ends: (B, V) logits -> (B, V + 1) int64, 0 to 2**40.

    Each symbol has 1 for itself, so that none is impossible, and the rest by its share of the softmax in fp64, rounded
    down: at V = 256 it has all but 2**-32 of its probability. What rounding leaves goes to the most likely one.

    Raises:
        FloatingPointError: a row holds no numbers.
    """
    rows, symbols = logits.shape
    assert symbols < TOTAL >> 8
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    if not np.isfinite(shares).all():
        raise FloatingPointError("logits that are no numbers")
    sizes = 1 + np.floor(shares * (TOTAL - symbols)).astype(np.int64)
    sizes[np.arange(rows), wide.argmax(axis=1)] += TOTAL - sizes.sum(axis=1)
    edges = np.zeros((rows, symbols + 1), dtype=np.int64)
    np.cumsum(sizes, axis=1, out=edges[:, 1:])
    return edges


class Encoder:
    """Takes intervals, gives bytes."""

    def __init__(self) -> None:
        self._low, self._range = 0, _MASK
        self._out = bytearray()

    def encode(self, start: int, end: int) -> None:
        """Add a symbol of the interval [start, end)."""
        unit = self._range >> TOTAL_BITS
        self._move(self._low + unit * start)
        self._range = unit * (end - start)
        while self._range < _LEAST_RANGE:
            self._out.append(self._low >> (_STATE_BITS - 8))
            self._low = self._low << 8 & _MASK
            self._range <<= 8

    def finish(self) -> bytes:
        """All bytes."""
        # A range of 2**56 holds a number whose last seven bytes are zeros, which a decoder reads there by itself.
        self._move(-(-self._low // _LEAST_RANGE) * _LEAST_RANGE)
        self._out.append(self._low >> (_STATE_BITS - 8))
        return bytes(self._out)

    def _move(self, low: int) -> None:
        """The range begins at ``low``; a carry goes into the bytes that are out already."""
        if low > _MASK:
            place = len(self._out) - 1
            while self._out[place] == 0xFF:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
        self._low = low & _MASK


class Decoder:
    """Takes bytes, tells symbols."""

    def __init__(self, coded: bytes) -> None:
        self._coded, self._place = coded, _STATE_BITS // 8
        self._range = _MASK
        self._code = int.from_bytes(coded[:8].ljust(8, b"\0"), "big")  # above the range's beginning

    def decode(self, edges: np.ndarray) -> int:
        """The next symbol, of (V + 1,) edges as ``intervals`` has them.

        Raises:
            DamagedError: an encoder would not have written that.
        """
        unit = self._range >> TOTAL_BITS
        value = self._code // unit
        if value >= TOTAL or self._place > len(self._coded) + _BEYOND:
            raise DamagedError
        symbol = int(edges.searchsorted(value, side="right")) - 1
        start, end = int(edges[symbol]), int(edges[symbol + 1])
        self._code -= unit * start
        self._range = unit * (end - start)
        while self._range < _LEAST_RANGE:
            following = self._coded[self._place] if self._place < len(self._coded) else 0
            self._code = self._code << 8 | following
            self._range <<= 8
            self._place += 1
        return symbol

    def check_end(self) -> None:
        """Raise DamagedError where bytes are left, or were missing, after the last symbol."""
        if self._place != len(self._coded) + _BEYOND:
            raise DamagedError
