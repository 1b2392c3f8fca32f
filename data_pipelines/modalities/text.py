"""Text: the bytes of a file are the bytes of the context, whatever their encoding."""

import numpy as np

from data_pipelines.errors import DataError
from data_pipelines.modalities.modality import Modality


def decode(payload: bytes) -> np.ndarray:
    """Payload of a sample -> (n,) uint8, read-only: a view, nothing is copied."""
    return np.frombuffer(payload, dtype=np.uint8)


def encode(tokens: np.ndarray) -> bytes:
    """(n,) integers 0..255 -> the bytes of a text file. Raises DataError for another shape or range."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens of shape {tokens.shape} and type {tokens.dtype}: text is one row of integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 255:
        raise DataError(f"tokens from {tokens.min()} to {tokens.max()}: a byte is an integer from 0 to 255")
    return tokens.astype(np.uint8).tobytes()


TEXT = Modality(name="text", extension="txt", suffixes=(".md", ".py", ".rst", ".txt"), decode=decode, encode=encode)
