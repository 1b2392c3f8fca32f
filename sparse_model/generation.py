"""Sampling one token after another. Letters: B batch, N positions, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sparse_model.transformer import SparseTransformer

LENGTH_STEP = 64  # contexts grow in steps, so that the plans of a few lengths serve the whole sample


def generate(
    model: SparseTransformer,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Continue a prompt, token by token. What cannot be sampled is refused at once, before the first is asked for.

    Args:
        model: in evaluation mode.
        prompt: (B, N) int64, N from 0.
        num_tokens: how many to sample; prompt and sample must fit in the model's context.
        temperature: divides the logits; 0 takes the most likely token.
        top_k, top_p: sample among the k most likely, or the fewest that hold the probability p.
        generator: makes the sample reproducible.

    Returns:
        An iterator over (B,) int64, each as soon as it is known.

    Raises:
        ValueError: the sample does not fit, or a setting is out of range.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens}: must be 0 or more")
    _check(prompt.shape[1] + num_tokens, model.config.context, temperature, top_k, top_p)
    return _sample(model, prompt, num_tokens, lambda logits: choose(logits, temperature, top_k, top_p, generator))


def _sample(
    model: SparseTransformer, prompt: Tensor, num_tokens: int, choice: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    length = prompt.shape[1]
    padded = min(model.config.context, -(-(length + num_tokens) // LENGTH_STEP) * LENGTH_STEP)
    tokens = prompt.new_zeros(prompt.shape[0], padded)
    tokens[:, :length] = prompt
    for position in range(length, length + num_tokens):
        # Row i reads tokens before i alone, so what stands behind the known ones does not matter.
        end = min(padded, -(-(position + 1) // LENGTH_STEP) * LENGTH_STEP)
        with torch.no_grad():
            chosen = choice(model(tokens[:, :end])[:, position].float())
        tokens[:, position] = chosen
        yield chosen


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token from each row of logits (B, V): (B,) int64."""
    if temperature == 0:
        return logits.argmax(-1)
    ranked, token = (logits / temperature).sort(-1, descending=True)
    if top_k is not None:
        ranked[:, top_k:] = float("-inf")
    probability = ranked.softmax(-1)
    if top_p is not None:
        # A token stays while those before it hold less than p: the first always does.
        probability = probability.masked_fill(probability.cumsum(-1) - probability >= top_p, 0.0)
    return token.gather(-1, torch.multinomial(probability, 1, generator=generator)).squeeze(-1)


def _check(length: int, context: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if length > context:
        raise ValueError(f"prompt and sample are {length} tokens: they must fit in the model's context of {context}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be 0 or more, and finite")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
