"""Arithmetic coding of bytes by a model's probabilities, context by context.

The content is cut into contexts of the model's length, the last one shorter. A batch of contexts shares one session,
which advances byte by byte in both directions. Nothing is before a context but what the model carries to it. Encoder
and decoder compute the same shapes from the same bytes, in one loop, by one thread and under the same settings. One
machine therefore computes the same bits both ways. ``computed_crc32`` predicts whether another machine does, and checks
within the code detect if it does not.

The range coder gives a symbol an interval of the integers 0 to 2**40. It keeps a range of 2**56 to 2**64 numbers and
narrows it to each symbol's share, which loses at most 2.2e-5 bits by rounding. It only uses integers, so that both
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
_MOST_CACHE_BYTES = 1 << 30  # of keys and values of a batch
TOTAL_BITS = 40  # of the integers that symbols share, and the most that one symbol can cost
TOTAL = 1 << TOTAL_BITS
_STATE_BITS = 64
_MASK = (1 << _STATE_BITS) - 1
_LEAST_RANGE = 1 << (_STATE_BITS - 8)
_UNWRITTEN = 7  # zero bytes of the state that an encoder omits at the end
_SYMBOLS_PER_CHECK, _CHECK_BITS = 4096, 16
# Positions for ``computed_crc32``: so many, or this share of a longer context, which bounds its share of the work.
_PROBED_POSITIONS, _PROBED_SHARE = 64, 32
_SUBNORMAL = 1e-40  # in fp32

# Maps a place in the content, and the edges there, (V + 1,) int64, to the byte.
NextByte = Callable[[int, np.ndarray], int]


class DamagedError(ValueError):
    """No encoder writes such bytes."""


def rows_for(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
    """Return how many contexts share a batch, for content of ``size`` bytes.

    If the model carries state, one: each context continues the one before it.
    """
    if config.carries:
        return 1
    widths = [block.mixer.head_widths(config) for block in config.blocks() if block.mixer is not None]
    values = sum(
        (head.kept_heads or config.heads) * (head.query_key + head.value) + head.extra_cached for head in widths
    )
    position_bytes = values * dtype.itemsize
    fitting = _MOST_CACHE_BYTES // (position_bytes * min(max(size, 1), config.context))
    return max(1, min(fitting, MOST_ROWS, -(-size // config.context)))


def encode(
    model: SparseTransformer, content: bytes, rows: int, counted: Callable[[int], None] = lambda _: None
) -> tuple[bytes, float]:
    """Return the content's code, and its bits under the model's probabilities.

    ``counted`` is called repeatedly with the number of finished bytes. FloatingPointError if logits are not finite.
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
    """Return the content of a code; see ``encode``. A code without checks has format 1.

    DamagedError if no content of that size has this code, FloatingPointError if logits are not finite.
    """
    decoder, content, checks = RangeDecoder(code), bytearray(), _Checks()

    def next_byte(place: int, edges: np.ndarray) -> int:
        symbol = decoder.decode(edges)
        if symbol > 255:
            raise DamagedError
        if place >= len(content):  # grown step by step, because a damaged size could be huge
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
    """The CRC-32 of the symbols so far, which encoder and decoder compare in the code every 4,096 symbols."""

    def __init__(self) -> None:
        self._count = self._crc32 = 0

    def edges_after(self, symbol: int) -> np.ndarray | None:
        """Add a symbol; return the edges of three intervals if a check is due, else None.

        The second interval, which must follow in the code, has the last 16 bits of the CRC-32 as its position.
        """
        self._crc32 = zlib.crc32(bytes([symbol]), self._crc32)
        self._count += 1
        if self._count % _SYMBOLS_PER_CHECK:
            return None
        unit = TOTAL >> _CHECK_BITS
        start = self._crc32 % (1 << _CHECK_BITS) * unit
        return np.array([0, start, start + unit, TOTAL])


def computed_crc32(model: SparseTransformer, size: int, rows: int) -> int:
    """Return the CRC-32 of edges that this machine computes with the shapes of the coding, for fixed tokens.

    Uses the first positions of all rows: 64, or 1/32 of the context if that is more. DamagedError if no encoder has so
    many rows, FloatingPointError if logits are not finite.
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
    """Call ``next_byte`` for every place of the content, position by position, with the model's edges there."""
    if not size:
        return
    context, done, carries = model.config.context, 0, model.config.carries
    with _coding_session(model, size, rows) as session:
        for first in range(0, size, rows * context):
            session.carry() if carries and first else session.reset()
            # Rows and positions beyond the content are computed on zeros, so that both directions have the same shapes.
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
                if position + 1 < longest or (carries and first + context < size):
                    session.append(tokens.to(session.logits.device))


@contextmanager
def _coding_session(model: SparseTransformer, size: int, rows: int) -> Iterator[Session]:
    """Open a session for content of ``size`` bytes, under fixed settings.

    These are one thread, no autocast and no flushing of subnormal numbers. All are restored afterwards.
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
    """Return the edges of the symbols' intervals: (B, V) logits -> (B, V + 1) int64, from 0 to 2**40.

    Each symbol gets 1, so that none is impossible, plus its softmax share of the remaining numbers in fp64, rounded
    down. At V = 256 it has all but 2**-32 of its probability. The rounding remainder goes to the most likely symbol.
    FloatingPointError if a row has values that are not finite.
    """
    rows, symbols = logits.shape
    assert symbols < TOTAL >> 8
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares = weights / weights.sum(axis=1, keepdims=True)
    if not np.isfinite(shares).all():
        raise FloatingPointError("logits are not finite")
    sizes = 1 + np.floor(shares * (TOTAL - symbols)).astype(np.int64)
    sizes[np.arange(rows), wide.argmax(axis=1)] += TOTAL - sizes.sum(axis=1)
    edges = np.zeros((rows, symbols + 1), dtype=np.int64)
    np.cumsum(sizes, axis=1, out=edges[:, 1:])
    return edges


class RangeEncoder:
    """Encodes intervals as bytes."""

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
        """Return all bytes of the code."""
        # A range of 2**56 has a number with seven zero bytes at the end. A decoder reads zeros after the end.
        self._move(-(-self._low // _LEAST_RANGE) * _LEAST_RANGE)
        self._out.append(self._low >> (_STATE_BITS - 8))
        return bytes(self._out)

    def _move(self, low: int) -> None:
        """Let the range begin at ``low``; a carry goes into bytes that are already written."""
        if low > _MASK:
            place = len(self._out) - 1
            while self._out[place] == 0xFF:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
        self._low = low & _MASK


class RangeDecoder:
    """Decodes bytes to symbols."""

    def __init__(self, coded: bytes) -> None:
        self._coded, self._place = coded, _STATE_BITS // 8
        self._range = _MASK
        self._code = int.from_bytes(coded[:8].ljust(8, b"\0"), "big")  # relative to the range's beginning

    def decode(self, edges: np.ndarray) -> int:
        """Return the next symbol, given (V + 1,) edges from ``intervals``; DamagedError for impossible bytes."""
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
        """Raise DamagedError if bytes remain, or were missing, after the last symbol."""
        if self._place != len(self._coded) + _UNWRITTEN:
            raise DamagedError
