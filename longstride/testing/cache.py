"""Checks of cached generation: a session computes the rows of a full forward pass.

Letters: B batch, N positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longstride.sparse_model import ModelConfig, Session, SparseTransformer
from longstride.testing.comparisons import require, require_close, require_equal
from longstride.testing.subjects import awake, bound_of, require_method, tokens_of


def _generating(config: ModelConfig) -> SparseTransformer:
    """Return a model that can generate. Raises UndeclaredError if a mixer has no ``new_state``."""
    model = awake(config)
    require_method(model, "new_state")
    return model


def _logits(model: SparseTransformer, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        output = model(tokens)
    assert isinstance(output, Tensor)
    return output


def _step(session: Session, tokens: Tensor, last: int) -> Tensor:
    """Append tokens up to a position; return the logits before each, (B, n, V)."""
    rows = []
    for token in tokens[:, session.position : last].T:
        rows.append(session.logits)
        session.append(token)
    return torch.stack(rows, 1)


def steps(config: ModelConfig) -> None:
    """Check that steps after prefixes of several lengths give the rows of a forward pass."""
    model = _generating(config)
    tokens = tokens_of(config)
    expected = _logits(model, tokens)
    for first in (0, 1, 17 * config.context // 40):
        session = Session(model, len(tokens))
        session.prefill(tokens[:, :first])
        rows = _step(session, tokens, config.context)
        require_close(f"steps behind a beginning of {first}", rows, expected[:, first:], bound_of(config))


def several(config: ModelConfig) -> None:
    """Check ``Session.extend``: several tokens at once give the rows of single steps."""
    model = _generating(config)
    tokens, context = tokens_of(config), config.context
    expected = _logits(model, tokens)
    third = context // 3
    for prefix, reads_logits, counts, keep in (
        (0, False, (third, 1, context - third - 1), 0),
        (0, True, (third, context - third), 3),
        (third, True, (third, 1), 0),
    ):
        session = Session(model, len(tokens))
        session.prefill(tokens[:, :prefix])
        for count in counts:
            if reads_logits:
                assert session.logits is not None
            first, last = session.position + 1, session.position + count + 1
            rows = session.extend(tokens[:, first - 1 : last - 1], keep)
            require(rows.shape[1] == (keep or count), f"extend gave {rows.shape[1]} rows, not {keep or count}")
            target = expected[:, first:last][:, -(keep - (last > context)) :] if keep else expected[:, first:last]
            require_close(f"{count} tokens behind {first - 1}", rows[:, : target.shape[1]], target, bound_of(config))
        if last <= context - 1:
            require_close("the next row", session.logits, expected[:, last - 1], bound_of(config))


def copies(config: ModelConfig) -> None:
    """Check ``State.take``: rearranged or selected contexts continue like their originals."""
    model = _generating(config)
    tokens, first = tokens_of(config), config.context // 4
    last = first + 3
    for order, is_rearranged in (([1, 1], True), ([1, 0], True), ([1], False), ([1, 0, 1], False)):
        session = Session(model, len(tokens))
        _step(session, tokens, first)
        if is_rearranged:
            session.rearrange(torch.tensor(order))
        else:
            session = session.selected(torch.tensor(order))
        _step(session, tokens[order], last)
        require_close(
            f"contexts {order}", session.logits, _logits(model, tokens[order, : last + 1])[:, last], bound_of(config)
        )


def truncation(config: ModelConfig) -> None:
    """Check ``State.truncate``: later rows have the same bits as if the removed tokens had never been there.

    Sessions begin with a prefill or with steps, and are cut to several lengths, with and without a limit ``back``.
    """
    model = _generating(config)
    tokens, removed, context = tokens_of(config), tokens_of(config, 2), config.context
    prefix, cut_to, many = context // 3, context // 6, 3 * context // 4 - 1
    for prefilled, length, back in ((prefix, many, 8), (prefix, cut_to, None), (0, many // 2, None), (0, 0, 0)):
        plain, cut = Session(model, 2, back=0), Session(model, 2, back=back)
        plain.prefill(tokens[:, : min(prefilled, length)])
        cut.prefill(tokens[:, :prefilled])
        if length > prefilled:
            _step(plain, tokens, length)
            _step(cut, tokens, length)
        _step(cut, removed, min(cut.position + 8, context))
        assert cut.position == context or cut.logits is not None
        cut.truncate(length)
        last = min(length + 10, context)
        computed, expected = _step(cut, tokens, last), _step(plain, tokens, last)
        what = f"steps behind truncate({length})"
        if length < prefilled:  # a prefill of another length is rounded differently
            require_close(what, computed, expected, bound_of(config))
        else:
            require_equal(what, computed, expected)


def repetition(config: ModelConfig) -> None:
    """Check that computing a row twice, as after an interruption, changes nothing."""
    model = _generating(config)
    tokens = tokens_of(config)
    once, twice = Session(model, 2), Session(model, 2)
    for token in tokens[:, : config.context // 2].T:
        first, twice._logits = twice.logits, None
        require_equal("a row that is computed again", twice.logits, first)
        require_equal("a row behind one that was computed again", once.logits, first)
        once.append(token)
        twice.append(token)


def autocast(config: ModelConfig) -> None:
    """Check that steps under autocast to bf16 are as accurate as a forward pass under it."""
    model = _generating(config)
    tokens, first = tokens_of(config), config.context // 3
    exact = _logits(model, tokens)[:, first:]
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = _logits(model, tokens)[:, first:].double()
        session = Session(model, len(tokens))
        session.prefill(tokens[:, :first])
        rows = _step(session, tokens, config.context).double()
    errors: Sequence[float] = [float(x.square().mean().sqrt()) for x in (rows - expected, expected - exact)]
    rule = "steps are off from a forward pass by {:.3g}, which is off by {:.3g} itself".format(*errors)
    require(errors[0] <= 2 * errors[1], rule)


CACHE_PROPERTIES: dict[str, Callable[[ModelConfig], None]] = {
    "cached steps": steps,
    "several at once": several,
    "copied caches": copies,
    "truncation": truncation,
    "repeated rows": repetition,
    "cached autocast": autocast,
}
