"""Bits per byte of any bytes under an exported model: the score of `longstride evaluate`. Needs no deepspeed.

Letters: B contexts at once, N positions a context.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from longstride.data_pipelines.modalities import modality_named
from longstride.kernels import ConfigError
from longstride.launcher.output import metrics_file
from longstride.sparse_model import SparseTransformer

_MOST_POSITIONS = 1 << 16  # computed at once by default


def likelihood(
    model: SparseTransformer,
    content: bytes | np.ndarray,
    *,
    min_context: int = 0,
    batch_size: int | None = None,
    unit: str | None = None,
) -> dict[str, Any]:
    """Scores each byte once, in contexts cut as an evaluation cuts packed documents. Returns the line to print.

    Args:
        model: in evaluation mode.
        content: of symbols below the model's vocabulary; those that are no bytes as (n,) integers.
        min_context: earlier bytes that each byte sees, where there are so many; contexts overlap by them.
        batch_size: contexts at once.
        unit: what a symbol stands for; None: what the model's positions tell.

    Raises:
        ConfigError: there are no bytes, some are not the model's, or an option is out of range.
        FloatingPointError: the model's logits are no numbers.
    """
    context = model.config.context
    if not len(content):
        raise ConfigError("holds no bytes: there is nothing to score")
    stream = np.frombuffer(content, dtype=np.uint8) if isinstance(content, bytes) else content
    if isinstance(content, bytes):
        check_bytes(content, model)
    if not 0 <= min_context < context:
        raise ConfigError(f"--min-context={min_context}: must be from 0 to {context - 1}, less than the context")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"--batch={batch_size}: must be at least 1")
    start = time.perf_counter()
    device = model.embedding.start.device

    def nats() -> Iterator[float]:
        for tokens, scored in _batches(stream, context, min_context, batch_size):
            with torch.no_grad():
                batch = model(torch.from_numpy(tokens).to(device), return_nats=True).float().cpu().numpy()
            yield from batch[scored].tolist()

    mean = math.fsum(nats()) / len(content)  # exact but for two roundings, as an evaluation's
    if not math.isfinite(mean):
        raise FloatingPointError("logits that are no numbers")
    return {
        "loss_nats": mean,
        **metrics_file.bits_fields(mean, unit or modality_named(model.config.embedding.modality).unit),
        "tokens": len(content),
        "min_context": min_context,
        "seconds": time.perf_counter() - start,
    }


def check_bytes(content: bytes, model: SparseTransformer) -> None:
    """Raise ConfigError for bytes that are no tokens of the model."""
    vocabulary = model.config.vocabulary
    if content and max(content) >= vocabulary:
        raise ConfigError(f"holds byte {max(content)}, and the model knows 0 to {vocabulary - 1}")


def _batches(
    stream: np.ndarray, context: int, min_context: int, batch_size: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens (B, N) of the stream's type, 0 beyond its end, and which of them are scored, (B, N) bool."""
    hop = context - min_context
    count = 1 + max(0, -(-(len(stream) - context) // hop))
    # All batches have one shape, and a small file is not padded beyond its size.
    rows = batch_size or max(1, min(count, _MOST_POSITIONS // context))
    width = min(context, len(stream)) if batch_size is None else context
    for first in range(0, count, rows):
        tokens, scored = np.zeros((rows, width), dtype=stream.dtype), np.zeros((rows, width), dtype=bool)
        for row, number in enumerate(range(first, min(first + rows, count))):
            piece = stream[number * hop : number * hop + context]
            tokens[row, : len(piece)] = piece
            scored[row, min_context if number else 0 : len(piece)] = True
        yield tokens, scored
