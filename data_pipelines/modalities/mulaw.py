"""8-bit mu-law (ITU-T G.711): 16-bit samples to bytes and back, by tables."""

from functools import cache

import numpy as np

_BIAS = 132  # moves the borders of G.711's segments to powers of two; in units of 16 bits, 33 in its own of 14
_CLIP = 32635  # the largest magnitude that the last segment holds with the bias


def mulaw_encode(samples: np.ndarray) -> np.ndarray:
    """(n,) int16 -> (n,) uint8 of G.711, whose all-positive bits are inverted: 0 is 0xFF, full scale 0x80 and 0x00."""
    return _encoding_table()[np.asarray(samples, dtype=np.int16).view(np.uint16)]


def mulaw_decode(content: np.ndarray) -> np.ndarray:
    """(n,) uint8 of G.711 -> (n,) int16, the middle of each step; both zeros, 0xFF and 0x7F, are 0."""
    return _decoding_table()[np.asarray(content, dtype=np.uint8)]


@cache
def _encoding_table() -> np.ndarray:
    """(65536,) uint8: the byte of each int16, by its bits."""
    value = np.arange(2**16, dtype=np.uint16).view(np.int16).astype(np.int64)
    biased = np.minimum(np.abs(value), _CLIP) + _BIAS
    segment = np.searchsorted(2 ** np.arange(8, 15), biased, side="right")  # 0..7: which power of two is below
    step = biased >> (segment + 3) & 0x0F  # 16 equal ones in each segment
    return (~(np.where(value < 0, 0x80, 0) | segment << 4 | step) & 0xFF).astype(np.uint8)


@cache
def _decoding_table() -> np.ndarray:
    """(256,) int16: the value of each byte."""
    code = ~np.arange(2**8, dtype=np.int64) & 0xFF
    segment, step = code >> 4 & 0x07, code & 0x0F
    magnitude = ((2 * step + 33) << (segment + 2)) - _BIAS
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.int16)
