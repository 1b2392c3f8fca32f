"""Bits per byte of any bytes under an exported model, the same score as `longstride evaluate`. Needs no deepspeed.

Letters: B contexts at once, N positions a context.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from longstride.data_pipelines.modalities import modality_named
from longstride.kernels import ConfigError
from longstride.launcher.config import TrainConfig
from longstride.launcher.output import counting, metrics_file
from longstride.sparse_model import SparseTransformer

MOST_POSITIONS = 1 << 16  # computed at once by default


class Piece(NamedTuple):
    """Tokens of one context."""

    owner: int  # number of the text
    tokens: np.ndarray  # (n,), n to N
    scored: int  # index of the first scored token; earlier ones are only context
    width: int  # positions to compute, n or more

    @classmethod
    def cut(cls, stream: np.ndarray, context: int, min_context: int = 0, owner: int = 0) -> Iterator[Piece]:
        """Cut a text, (n,) tokens of any dtype, like packed documents in an evaluation; yields at least one piece."""
        hop, width = context - min_context, min(context, len(stream))
        yield cls(owner, stream[:context], 0, width)
        for start in range(hop, len(stream) - min_context, hop):
            yield cls(owner, stream[start : start + context], min_context, width)


def likelihood(
    model: SparseTransformer,
    content: bytes | np.ndarray,
    *,
    min_context: int = 0,
    batch_size: int | None = None,
    unit: str | None = None,
) -> dict[str, Any]:
    """Score each byte once, in contexts cut like packed documents in an evaluation. Return the line to print.

    Args:
        model: in evaluation mode.
        content: symbols below the model's vocabulary, as bytes or (n,) integers.
        min_context: earlier bytes that each byte sees, if there are so many; contexts overlap by them.
        batch_size: contexts at once.
        unit: the name of a symbol; None: derived from the model's embedding.

    Raises:
        ConfigError: the content is empty, has symbols outside the vocabulary, or an option is out of range.
        FloatingPointError: the model's logits are not finite.
    """
    context = model.config.context
    if not len(content):
        raise ConfigError("is empty: there is nothing to score")
    stream = np.frombuffer(content, dtype=np.uint8) if isinstance(content, bytes) else content
    if isinstance(content, bytes):
        check_bytes(content, model)
    if not 0 <= min_context < context:
        raise ConfigError(f"--min-context={min_context}: must be from 0 to {context - 1}, less than the context")
    if min_context and model.config.carries:
        rule = "repeats bytes, but the model carries what came before; leave it out"
        raise ConfigError(f"--min-context={min_context}: {rule}")
    if batch_size is not None and not 1 <= batch_size <= TrainConfig.MOST_CONTEXTS:
        raise ConfigError(f"--batch={batch_size}: must be from 1 to {TrainConfig.MOST_CONTEXTS:,} contexts; such as 4")
    start = time.perf_counter()
    pieces = Piece.cut(stream, context, min_context)
    if batch_size is None:  # a small file is not padded beyond its size
        count = 1 + max(0, -(-(len(stream) - context) // (context - min_context)))
        batch_size = max(1, min(count, MOST_POSITIONS // context))
    else:  # all batches have the shape of an evaluation's
        pieces = (piece._replace(width=context) for piece in pieces)
    counter = counting.WorkCounter("scoring", len(content), "tokens")

    def nats() -> Iterator[float]:
        for _, scores in piece_nats(model, pieces, batch_size):
            counter.add(len(scores))
            yield from scores.tolist()

    mean = math.fsum(nats()) / len(content)  # rounded twice, as in an evaluation
    counter.close()
    if not math.isfinite(mean):
        raise FloatingPointError("logits are not finite")
    unit = unit or modality_named(model.config.embedding.modality).unit
    loss = metrics_file.loss_fields(mean, len(content), len(content), unit)
    return {**loss, "min_context": min_context, "seconds": time.perf_counter() - start}


def nats_by_piece(model: SparseTransformer, content: bytes, min_context: int) -> Iterator[list[float]]:
    """Yield the nats of each byte, one context at a time, cut as in ``likelihood``."""
    pieces = Piece.cut(np.frombuffer(content, dtype=np.uint8), model.config.context, min_context)
    return (nats.tolist() for _, nats in piece_nats(model, pieces, 1))


def check_bytes(content: bytes, model: SparseTransformer) -> None:
    """Raise ConfigError for bytes outside the model's vocabulary."""
    vocabulary = model.config.vocabulary
    if content and max(content) >= vocabulary:
        raise ConfigError(f"contains byte {max(content)}, but the model knows 0 to {vocabulary - 1}")


def piece_nats(model: SparseTransformer, pieces: Iterable[Piece], rows: int) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield each piece with the nats of its scored tokens, in fp32; ``rows`` pieces are computed at once.

    A model that carries state computes the pieces of an owner one after the other.
    """
    model.config.require_next_token()
    start, owner = model.embedding.start, None
    carried: tuple[torch.Tensor, ...] = ()
    for batch, tokens in batches(pieces, 1 if model.config.carries else rows):
        if model.config.carries and batch[0].owner != owner:
            owner, carried = batch[0].owner, model.new_carried(1, start.device, start.dtype)
        with torch.no_grad():
            output = model(
                torch.from_numpy(tokens).to(start.device), return_nats=True, return_extras=True, carried=carried
            )
        carried, nats = output.carried, output.rows.float().cpu().numpy()
        for piece, row in zip(batch, nats, strict=False):
            yield piece, row[piece.scored : len(piece.tokens)]


def batches(pieces: Iterable[Piece], rows: int) -> Iterator[tuple[list[Piece], np.ndarray]]:
    """Yield batches of pieces with their tokens, (B, N), padded with zeros to the widest piece and to ``rows`` rows."""
    iterator = iter(pieces)
    while batch := list(islice(iterator, rows)):
        tokens = np.zeros((rows, max(piece.width for piece in batch)), dtype=batch[0].tokens.dtype)
        for row, piece in zip(tokens, batch, strict=False):
            row[: len(piece.tokens)] = piece.tokens
        yield batch, tokens


def run_lm_eval(words: Sequence[str]) -> int:
    """Run lm_eval's own command line, where `--model longstride` is an export; return the exit code.

    lm_eval has a list of models instead of entry points, so its own command cannot find models of other packages.
    ConfigError if lm_eval is not installed, or an argument of the model or a task is wrong.
    """
    try:
        import lm_eval.models  # noqa: F401 - fills the registry, which it would skip if that had a model
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise ConfigError(f'lm-eval: needs lm_eval ({error}); pip install "longstride[lm_eval]"') from None
    if "longstride" not in model_registry:
        model_registry.register("longstride", target="longstride.launcher.generation.lm_eval_model:LongstrideLM")
    sys.argv = ["lm-eval", *words]  # for its parser
    cli_evaluate()
    return 0
