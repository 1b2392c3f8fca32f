"""Bytes to a code by a model's probabilities, and back: arithmetic coding, context by context.

The content is cut into contexts of the model's length, the last one shorter, each with nothing before it. Some stand
side by side in one session, which steps from byte to byte in both directions: encoder and decoder compute the same
shapes from the same bytes in one loop, by one thread, under the same settings. So one machine computes the same bits
both ways. ``computed_crc32`` says whether another machine does, and checks within the code find out where it does not.

The range coder gives a symbol an interval of the integers 0 to 2**40. It keeps a range of 2**56 to 2**64 numbers and
narrows it to each symbol's share, which loses at most 2.2e-5 bits by rounding; all of it is integers, so that both
directions agree to the bit. Letters: B rows, V symbols.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from longstride.sparse_model import ModelConfig, Session, SparseTransformer

MOST_ROWS = 32
_MOST_CACHE_BYTES = 1 << 30  # of keys and values of all contexts side by side
TOTAL_BITS = 40  # of the integers that all symbols of a step share: the most that one symbol can cost
TOTAL = 1 << TOTAL_BITS
_STATE_BITS = 64
_MASK = (1 << _STATE_BITS) - 1
_LEAST_RANGE = 1 << (_STATE_BITS - 8)
_UNWRITTEN = 7  # bytes of the state that an encoder leaves out at the end: they are zeros
_SYMBOLS_PER_CHECK, _CHECK_BITS = 4096, 16
# Positions of a fingerprint: so many, or this share of a longer context, which bounds its share of the work.
_PROBED_POSITIONS, _PROBED_SHARE = 64, 32
_SUBNORMAL = 1e-40  # in fp32

# The byte at a place in the content: takes the place, and its step's edges, (V + 1,) int64.
NextByte = Callable[[int, np.ndarray], int]


class DamagedError(ValueError):
    """The coded bytes are not what an encoder made."""


def rows_for(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
    """How many contexts stand side by side, for content of ``size`` bytes."""
    widths = [block.mixer.head_widths(config) for block in config.blocks() if block.mixer is not None]
    values = sum((each.kept_heads or config.heads) * (each.query_key + each.value) for each in widths)
    kept = values * dtype.itemsize  # of a position
    fitting = _MOST_CACHE_BYTES // (kept * min(max(size, 1), config.context))
    return max(1, min(fitting, MOST_ROWS, -(-size // config.context)))


def encode(
    model: SparseTransformer, content: bytes, rows: int, counted: Callable[[int], None] = lambda _: None
) -> tuple[bytes, float]:
    """The content's code, and the bits that the model's probabilities ask for.

    Args:
        model: in evaluation mode.
        content: of symbols below the model's vocabulary.
        rows: contexts side by side.
        counted: called with how many bytes are done, again and again.

    Raises:
        FloatingPointError: the model's logits are no numbers.
    """
    encoder, shares, checks = RangeEncoder(), [], _Checks()

    def next_byte(place: int, edges: np.ndarray) -> int:
        symbol = content[place]
        start, end = int(edges[symbol]), int(edges[symbol + 1])
        encoder.encode(start, end)
        shares.append(end - start)
        if (check := checks.edges_after(symbol)) is not None:
            encoder.encode(int(check[1]), int(check[2]))
        return symbol

    _step(model, len(content), rows, next_byte, counted)
    bits = math.fsum(math.log2(TOTAL) - math.log2(share) for share in shares)
    return encoder.finish() if content else b"", bits


def decode(
    model: SparseTransformer,
    code: bytes,
    size: int,
    rows: int,
    counted: Callable[[int], None] = lambda _: None,
    *,
    has_checks: bool = True,
) -> bytes:
    """The content of a code; arguments as for ``encode``. A code without checks is of format 1.

    Raises:
        DamagedError: no content of so many bytes has this code.
        FloatingPointError: the model's logits are no numbers.
    """
    decoder, content, checks = RangeDecoder(code), bytearray(), _Checks()

    def next_byte(place: int, edges: np.ndarray) -> int:
        symbol = decoder.decode(edges)
        if symbol > 255:
            raise DamagedError
        if place >= len(content):  # grown as code is read: a damaged size could be any
            content.extend(bytes(place + 1 - len(content)))
        content[place] = symbol
        check = checks.edges_after(symbol) if has_checks else None
        if check is not None and decoder.decode(check) != 1:
            raise DamagedError
        return symbol

    _step(model, size, rows, next_byte, counted)
    if size:
        decoder.check_end()
    return bytes(content)


class _Checks:
    """What encoder and decoder know of the symbols so far, compared every 4,096 symbols within the code."""

    def __init__(self) -> None:
        self._count = self._crc32 = 0

    def edges_after(self, symbol: int) -> np.ndarray | None:
        """Add a symbol; return the edges of three intervals, the second of which must follow it in the code.

        None where no check is due. The second interval stands for the last 16 bits of the CRC-32 of all symbols.
        """
        self._crc32 = zlib.crc32(bytes([symbol]), self._crc32)
        self._count += 1
        if self._count % _SYMBOLS_PER_CHECK:
            return None
        unit = TOTAL >> _CHECK_BITS
        start = self._crc32 % (1 << _CHECK_BITS) * unit
        return np.array([0, start, start + unit, TOTAL])


def computed_crc32(model: SparseTransformer, size: int, rows: int) -> int:
    """The CRC-32 of edges that this machine computes in the shapes that coding has, for the same tokens everywhere.

    They are those of the first positions of all rows: 64, or 1/32 of the context where that is more.

    Raises:
        DamagedError: no encoder has so many rows.
        FloatingPointError: the model's logits are no numbers.
    """
    longest = min(size, model.config.context)
    crc32 = 0
    if not size:
        return crc32
    with _coding_session(model, size, rows) as session:
        for position in range(min(longest, max(_PROBED_POSITIONS, longest // _PROBED_SHARE))):
            if position:
                tokens = (31 * position + 7 * torch.arange(rows)) % model.config.vocabulary
                session.append(tokens.to(session.logits.device))
            edges = intervals(session.logits.cpu().numpy())
            crc32 = zlib.crc32(edges.astype("<i8").tobytes(), crc32)
    return crc32


def _step(model: SparseTransformer, size: int, rows: int, next_byte: NextByte, counted: Callable[[int], None]) -> None:
    """Calls ``next_byte`` for every place of the content, position by position, with the model's edges there."""
    if not size:
        return
    context, done = model.config.context, 0
    with _coding_session(model, size, rows) as session:
        for first in range(0, size, rows * context):
            session.reset()
            # Rows and positions beyond the content are computed too, on zeros: both directions have the same shapes.
            places = first + context * np.arange(rows)
            longest = min(context, size - first)
            for position in range(longest):
                edges = intervals(session.logits.cpu().numpy())
                tokens = torch.zeros(rows, dtype=torch.int64)
                for row, place in enumerate((places + position).tolist()):
                    if place < size:
                        tokens[row] = next_byte(place, edges[row])
                done += int((places + position < size).sum())
                counted(done)
                if position + 1 < longest:
                    session.append(tokens.to(session.logits.device))


@contextmanager
def _coding_session(model: SparseTransformer, size: int, rows: int) -> Iterator[Session]:
    """The session of a content of ``size`` bytes, under settings that nothing else in the process decides.

    That is one thread, no autocast, and subnormal numbers as they are. All is set back afterwards.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise DamagedError
    threads = torch.get_num_threads()
    flushes_subnormal = not torch.tensor(_SUBNORMAL).mul(1)
    torch.set_num_threads(1)  # the number of threads that share a matrix product may change its last bits
    torch.set_flush_denormal(False)
    try:
        with torch.autocast(model.embedding.start.device.type, enabled=False):
            yield Session(model, rows, min(size, model.config.context), back=0)
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(bool(flushes_subnormal))


def intervals(logits: np.ndarray) -> np.ndarray:
    """The edges of the symbols' intervals: (B, V) logits -> (B, V + 1) int64, from 0 to 2**40.

    Each symbol gets 1, so that none is impossible, and its share of the rest by the softmax in fp64, rounded down: at
    V = 256 it has all but 2**-32 of its probability. What rounding leaves goes to the most likely symbol.

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


class RangeEncoder:
    """Intervals to bytes."""

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
        """All bytes of the code."""
        # A range of 2**56 holds a number whose last seven bytes are zeros. A decoder reads zeros after the end.
        self._move(-(-self._low // _LEAST_RANGE) * _LEAST_RANGE)
        self._out.append(self._low >> (_STATE_BITS - 8))
        return bytes(self._out)

    def _move(self, low: int) -> None:
        """Let the range begin at ``low``; a carry goes into the bytes that are written already."""
        if low > _MASK:
            place = len(self._out) - 1
            while self._out[place] == 0xFF:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
        self._low = low & _MASK


class RangeDecoder:
    """Bytes to symbols."""

    def __init__(self, coded: bytes) -> None:
        self._coded, self._place = coded, _STATE_BITS // 8
        self._range = _MASK
        self._code = int.from_bytes(coded[:8].ljust(8, b"\0"), "big")  # from the range's beginning

    def decode(self, edges: np.ndarray) -> int:
        """The next symbol, of (V + 1,) edges as ``intervals`` has them.

        Raises:
            DamagedError: no encoder writes that.
        """
        unit = self._range >> TOTAL_BITS
        value = self._code // unit
        if value >= TOTAL or self._place > len(self._coded) + _UNWRITTEN:
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
        if self._place != len(self._coded) + _UNWRITTEN:
            raise DamagedError
