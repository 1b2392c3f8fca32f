"""A file's bytes coded by a model's probabilities, context by context, and decoded again.

The content is cut into contexts of the model's length, the last one shorter, each with nothing before it. Some stand
side by side in one session, which steps from byte to byte in both directions: encoder and decoder compute the same
shapes from the same bytes in one loop, by one thread, so that they see the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from longstride.launcher.compression.arithmetic_coding import TOTAL, DamagedError, Decoder, Encoder, intervals
from longstride.sparse_model import ModelConfig, Session, SparseTransformer

MOST_ROWS = 32
_MOST_CACHE_BYTES = 1 << 30  # of keys and values of all contexts side by side

# What a byte's place in the content and its step's edges, (V + 1,) int64, say: which byte it is.
Known = Callable[[int, np.ndarray], int]


def rows_for(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
    """How many contexts of so many bytes of content are to stand side by side."""
    width = config.layers * (config.query_key_width + config.width) * dtype.itemsize
    fitting = _MOST_CACHE_BYTES // (width * min(max(size, 1), config.context))
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
    encoder, shares = Encoder(), []

    def known(place: int, edges: np.ndarray) -> int:
        symbol = content[place]
        start, end = int(edges[symbol]), int(edges[symbol + 1])
        encoder.encode(start, end)
        shares.append(end - start)
        return symbol

    _step(model, len(content), rows, known, counted)
    bits = math.fsum(math.log2(TOTAL) - math.log2(share) for share in shares)
    return encoder.finish() if content else b"", bits


def decode(
    model: SparseTransformer, code: bytes, size: int, rows: int, counted: Callable[[int], None] = lambda _: None
) -> bytes:
    """The content of a code; arguments as for ``encode``.

    Raises:
        DamagedError: no content of so many bytes has this code.
        FloatingPointError: the model's logits are no numbers.
    """
    decoder, content = Decoder(code), bytearray()

    def known(place: int, edges: np.ndarray) -> int:
        symbol = decoder.decode(edges)
        if symbol > 255:
            raise DamagedError
        if place >= len(content):  # a size is not to be believed before there is code for it
            content.extend(bytes(place + 1 - len(content)))
        content[place] = symbol
        return symbol

    if not 1 <= rows <= MOST_ROWS:
        raise DamagedError
    _step(model, size, rows, known, counted)
    if size:
        decoder.check_end()
    return bytes(content)


def _step(model: SparseTransformer, size: int, rows: int, known: Known, counted: Callable[[int], None]) -> None:
    """Asks for every byte of the content, position by position, each once all before it in its context are known."""
    if not size:
        return
    context, device = model.config.context, model.embedding.start.device
    done = 0
    with _one_thread():
        session = Session(model, rows, min(size, context))
        for first in range(0, size, rows * context):
            session.reset()
            # Rows beyond the content, and what the last context has too few, are computed on zeros like any other.
            places = first + context * np.arange(rows)
            longest = min(context, size - first)
            for position in range(longest):
                edges = intervals(session.logits.cpu().numpy())
                tokens = torch.zeros(rows, dtype=torch.int64)
                for row, place in enumerate((places + position).tolist()):
                    if place < size:
                        tokens[row] = known(place, edges[row])
                done += int((places + position < size).sum())
                counted(done)
                if position + 1 < longest:
                    session.append(tokens.to(device))


@contextmanager
def _one_thread() -> Iterator[None]:
    """How many threads share a matrix product may decide about its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
