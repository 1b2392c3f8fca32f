"""The range coder: what it codes it decodes, at the cost of the probabilities, whatever they are."""

import numpy as np
import pytest

from longstride.launcher.compression.coding import TOTAL, DamagedError, RangeDecoder, RangeEncoder, intervals


def coded(edges: np.ndarray, symbols: list[int]) -> bytes:
    encoder = RangeEncoder()
    for row, symbol in zip(edges, symbols, strict=True):
        encoder.encode(int(row[symbol]), int(row[symbol + 1]))
    return encoder.finish()


@pytest.mark.parametrize("scale", [0, 1, 8, 50, 2000])
@pytest.mark.parametrize("length", [0, 1, 7, 400])
def test_symbols_come_back_at_their_cost(scale: int, length: int) -> None:
    random = np.random.default_rng(length + scale)
    edges = intervals(random.normal(size=(max(length, 1), 256)) * scale)[:length]
    likely = np.diff(edges, axis=1).argmax(axis=1) if length else []
    for unlikely in (0.0, 0.2, 1.0):
        symbols = [int(random.integers(256)) if random.random() < unlikely else int(best) for best in likely]
        code = coded(edges, symbols)
        decoder = RangeDecoder(code)
        assert [decoder.decode(row) for row in edges] == symbols
        decoder.check_end()
        sizes = [int(row[symbol + 1] - row[symbol]) for row, symbol in zip(edges, symbols, strict=True)]
        bits = sum(np.log2(TOTAL / size) for size in sizes)
        assert bits - 1 <= 8 * len(code) <= bits + 16 + 2.3e-5 * length


def test_carries_run_through_bytes_that_are_out() -> None:
    """Symbols whose ranges hold one point and begin below it: bytes of 255 go out until the end carries into them."""
    rows = np.repeat(intervals(np.zeros((1, 256))), 30, axis=0)
    follow = RangeDecoder(b"\x02" + bytes(60))
    symbols = [follow.decode(row) for row in rows[:-2]] + [255, 255]  # the last two lie beyond the point
    code = coded(rows, symbols)
    decoder = RangeDecoder(code)
    assert [decoder.decode(row) for row in rows] == symbols
    decoder.check_end()
    assert code[:16] == b"\x02" + bytes(15)


@pytest.mark.parametrize("scale", [0, 1, 30, 1e6])
def test_intervals_fill_the_total_and_lose_next_to_nothing(scale: float) -> None:
    logits = np.random.default_rng(0).normal(size=(50, 256)).astype(np.float32) * scale
    edges = intervals(logits)
    sizes = np.diff(edges, axis=1)
    assert (edges[:, 0] == 0).all() and (edges[:, -1] == TOTAL).all() and (sizes >= 1).all()
    wide = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    bits = (np.log(np.exp(wide).sum(axis=1, keepdims=True)) - wide) / np.log(2)
    assert (np.log2(TOTAL / sizes) <= bits + 4e-10).all()


def test_logits_that_are_no_numbers_are_told() -> None:
    with pytest.raises(FloatingPointError):
        intervals(np.array([[0.0, np.nan]]))


def test_what_no_encoder_wrote_is_told() -> None:
    edges = intervals(np.zeros((1, 3)))  # three intervals that leave a rest of the range
    code = coded(np.repeat(edges, 50, axis=0), [1] * 50)
    for damaged in (code[:-1], code + b"x", b"\xff" * len(code)):
        decoder = RangeDecoder(damaged)
        with pytest.raises(DamagedError):
            for _ in range(50):
                decoder.decode(edges[0])
            decoder.check_end()
