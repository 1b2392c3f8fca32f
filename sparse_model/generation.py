"""Autoregressive sampling. Letters: B batch, N positions, V vocabulary."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.session import Session
from longstride.sparse_model.transformer import SparseTransformer


def generate(
    model: SparseTransformer,
    prompt: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    adjust: Callable[[Tensor], Tensor] | None = None,
    session: Session | None = None,
    slide: bool = False,
) -> Generator[Tensor, Sequence[int] | None, None]:
    """Continue prompts of one length, token by token. Arguments are checked at the call, before the first token.

    Args:
        model: in evaluation mode.
        prompt: (B, N) integers on the model's device, N from 0.
        num_tokens: how many to sample.
        temperature: divides the logits; 0 takes the most likely token.
        top_k, top_p: sample among the k most likely tokens, or the fewest whose probabilities sum to p. Among equally
            likely tokens the lower ones stay.
        generator: makes the sample reproducible; a sequence has one for each context.
        adjust: maps the logits (B, V), in fp32 (fp64 for fp64), to those to sample from. It must not write to its
            argument.
        session: already holds the prompt and has room for the sample, and is continued; None: compute the prompt.
            With ``slide`` it holds what ``window_start`` leaves of the prompt.
        slide: allow prompt and sample to be longer than the model's context, and drop its older half each time that it
            is full (``window_start``). A model that carries state begins its next context instead.

    Returns:
        An iterator over (B,) int64, one token of each context at a time. It raises FloatingPointError if logits are not
        finite. ``send(rows)`` instead of ``next`` continues only these rows of the last tokens.

    Raises:
        ValueError: the sample does not fit, a setting is out of range, or the model is in training mode. One line lists
            all problems.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    wrong = [f"{name}={settings[name]}: {rule}" for name, rule in wrong_settings(temperature, top_k, top_p)]
    if problems := [*_problems(model, prompt, num_tokens, slide), *wrong]:
        raise ValueError("; ".join(problems))
    if session is not None:
        start = window_start(model.config, prompt.shape[1]) if slide else 0
        if (session.batch, session.position + start) != prompt.shape:
            raise ValueError(f"session of {session.position} tokens: must hold the prompt {tuple(prompt.shape)}")

    def choice(logits: Tensor, contexts: Sequence[int]) -> Tensor:
        generators = [generator[row] for row in contexts] if isinstance(generator, Sequence) else generator
        return choose(logits if adjust is None else adjust(logits), temperature, top_k, top_p, generators)

    return _sample(model, prompt.long(), num_tokens, choice, session)


def window_start(config: ModelConfig, length: int) -> int:
    """Return where the context begins among ``length`` tokens, if contexts slide.

    When a context is full its older half is dropped, in whole rows of the position tables, so that the remaining tokens
    keep their columns and channels. The start depends only on the number of tokens, not on how they arrived.

    A model that carries state drops whole contexts.
    """
    if config.carries:
        return length // config.context * config.context
    rows, *row = config.embedding.table_sizes(config.context) or (config.context,)
    dropped = -(-rows // 2) * math.prod(row) if rows > 1 else -(-config.context // 2)
    return 0 if length < config.context else ((length - config.context) // dropped + 1) * dropped


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | Sequence[torch.Generator] | None,
) -> Tensor:
    """Sample one token from each row of logits (B, V): (B,) int64. A sequence of generators has one for each row.

    Raises:
        FloatingPointError: logits are not finite.
    """
    if temperature == 0:
        highest, token = logits.max(-1)
        _require_finite(highest)
        return token
    logits = logits.double()
    if temperature < 1:  # the largest logit becomes 0, so that no low temperature overflows
        logits = logits - logits.amax(-1, keepdim=True)
    if temperature != 1:
        logits = logits / temperature
    if top_k is None and (top_p is None or top_p == 1):
        return _draw(logits.softmax(-1), generator).squeeze(-1)
    ranked, token = logits.sort(stable=True, dim=-1, descending=True)
    if top_k is not None:
        ranked[:, top_k:] = float("-inf")
    share = ranked.softmax(-1)
    if top_p is not None and top_p < 1:  # 1 keeps all tokens, even if the sum rounds to 1 early
        # A token stays while those before it sum to less than p; the first always stays.
        before = share.cumsum(-1) - share
        before[:, 0] = 0
        share = share.masked_fill(before >= top_p, 0.0)
    return token.gather(-1, _draw(share, generator)).squeeze(-1)


def _draw(share: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None) -> Tensor:
    """Draw one index of each row in proportion to its shares (B, V) in fp64, which need not sum to 1: (B, 1) int64.

    It is the first index at which the running sum exceeds a uniform part of the total, so an index with share 0 is
    never drawn. (torch.multinomial checks more, which takes longer than the draw.)
    """
    sums = share.cumsum(-1)
    totals = sums[:, -1]
    _require_finite(totals)
    if isinstance(generator, Sequence):
        draws = [torch.rand(1, dtype=share.dtype, device=share.device, generator=g) for g in generator]
        part = torch.cat(draws)
    else:
        part = torch.rand(len(share), dtype=share.dtype, device=share.device, generator=generator)
    return torch.searchsorted(sums, part.mul_(totals)[:, None], right=True)


def _require_finite(values: Tensor) -> None:
    """Raise FloatingPointError unless all of (B,) are finite."""
    if not all(map(math.isfinite, values.tolist())):
        raise FloatingPointError("logits are not finite")


def _sample(
    model: SparseTransformer,
    prompt: Tensor,
    num_tokens: int,
    choice: Callable[[Tensor, Sequence[int]], Tensor],
    session: Session | None,
) -> Generator[Tensor, Sequence[int] | None, None]:
    """Yield the tokens one by one."""
    batch, length = prompt.shape
    if batch == 0:
        yield from (prompt.new_empty(0) for _ in range(num_tokens))
        return
    start, carries = window_start(model.config, length), model.config.carries
    window = [prompt[:, start:]]  # the tokens in the context
    contexts = list(range(batch))  # those that continue
    if session is None:
        slides = length + num_tokens > model.config.context
        session = Session(model, batch, None if slides else length + num_tokens, back=0)
        session.read(prompt) if carries and slides else session.prefill(window[0])
    for number in range(num_tokens):
        with torch.no_grad():
            chosen = choice(session.logits, contexts)
        rows = yield chosen
        length += 1
        if number + 1 == num_tokens:
            return
        if rows is not None:
            order = torch.tensor(rows, device=chosen.device)
            contexts, session = [contexts[row] for row in rows], session.selected(order)
            window, chosen = [torch.cat(window, 1)[order]], chosen[order]
        window.append(chosen[:, None])
        dropped = window_start(model.config, length) - start
        if dropped:
            start += dropped
            window = [torch.cat(window, 1)[:, dropped:]]
            if carries:
                session.append(chosen)
                session.carry()
            else:
                session.reset()
                session.prefill(window[0])
        else:
            session.append(chosen)


def _problems(model: SparseTransformer, prompt: Tensor, num_tokens: int, slide: bool) -> Iterator[str]:
    if model.training:
        yield "the model is in training mode: call model.eval() first"
    if prompt.dim() != 2:
        yield f"prompt {tuple(prompt.shape)} must be (B, N)"
    if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        yield f"prompt is {prompt.dtype}: must be integers"
    elif prompt.numel() and not 0 <= int(prompt.min()) <= int(prompt.max()) < model.config.vocabulary:
        low, high = int(prompt.min()), int(prompt.max())
        yield f"prompt has tokens {low} to {high}: must be 0 to {model.config.vocabulary - 1}"
    if type(num_tokens) is not int or num_tokens < 0:
        yield f"num_tokens={num_tokens}: must be an integer of at least 0"
    elif prompt.dim() == 2 and not slide and prompt.shape[1] + num_tokens > model.config.context:
        length, context = prompt.shape[1] + num_tokens, model.config.context
        yield f"prompt and sample are {length} tokens: they must fit in the model's context of {context}"


def wrong_settings(temperature: object, top_k: object, top_p: object) -> Iterator[tuple[str, str]]:
    """Yield the name and the rule of each setting of ``generate`` that is out of range."""
    if not _real(temperature) or not temperature >= 0:
        yield "temperature", "must be a number from 0, which takes the most likely token; 1 is as trained"
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        yield "top_k", "must be an integer of at least 1; leave it out to sample from all"
    if top_p is not None and (not _real(top_p) or not 0 < top_p <= 1):
        yield "top_p", "must be above 0 and at most 1; leave it out to sample from all"


def _real(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; an integer too large for a float is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
