"""Run a batch of transformers through the network in one pass.

Each place gets the logits of the token after it. Row i of the network predicts token i, so n tokens need n + 1 rows. A
full context has no row after its last token.

A row of transformers may have padding on either side, and a start before its first token. The network begins every row
at place 0 with a start of its own. Rows are therefore moved to the left, and logits are moved back to their places.

If the objective is not causal, row i of the network has token i: there is no start, and n tokens need n rows.

Letters: B batch, n places of a row, m tokens of the longest row, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.launcher.hub.configuration import Specials
from longstride.sparse_model import MixerOutput, SparseTransformer


class Aligned(NamedTuple):
    """A batch whose rows begin at place 0, without starts and padding."""

    tokens: Tensor  # (B, m) int64; zeros after the end of a shorter row
    places: Tensor  # (B, m) int64: original place of each; arbitrary after the end of a row
    lengths: list[int]  # tokens of each row
    started: Tensor  # (B,) bool: whether a start is before them
    # (B, n) int64: the network's row for each place, which predicts the token after it, or if not causal the token. It
    # is 0 for padding before the first token, and that of the last token for padding after it.
    rows: Tensor
    is_plain: bool  # only tokens: nothing was moved
    shift: int  # 1 if causal, else 0: the network's rows before that of the first token

    def at_places(self, logits: Tensor) -> Tensor:
        """Move the network's rows (B, m + shift, …) to the places of transformers, (B, n, …); (B, 1, …) if n is 0."""
        if self.is_plain:
            return logits[:, self.shift :] if self.tokens.shape[1] else logits
        index = self.rows.reshape(*self.rows.shape, *[1] * (logits.dim() - 2))
        return logits.gather(1, index.expand(-1, -1, *logits.shape[2:]))


def align(tokens: Tensor, mask: Tensor | None, vocabulary: int, causal: bool = True) -> Aligned:
    """Move rows to the left, without starts and padding.

    Args:
        tokens: (B, n) integers, n ≥ 0: tokens below V and the three special ones.
        mask: (B, n), zeros at padding, where tokens are ignored. The numbers of the end and of padding are padding
            whatever the mask says, since ``generate`` writes them after finished rows.
        vocabulary: V.
        causal: whether the first special token is a start. Otherwise it is the mask, which stands like any token.

    Raises:
        ValueError: padding between tokens of a row, a start after its first token, or an invalid number.
    """
    specials, count, shift = Specials.of(vocabulary), tokens.shape[1], int(causal)
    places = torch.arange(count, device=tokens.device).expand_as(tokens)
    visible = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    # Most batches only have tokens. Check this with one wait for the device.
    if not bool((~visible | (tokens < 0) | (tokens > specials.start - shift)).any()):
        started = tokens.new_zeros(len(tokens), dtype=torch.bool)
        return Aligned(tokens.long(), places, [count] * len(tokens), started, places + shift, True, shift)
    unknown = visible & ((tokens < 0) | (tokens > specials.padding))
    if bool(unknown.any()):
        first_name = "start" if causal else "mask"
        rule = f"a token is 0 to {specials.start - 1}, or {specials.start} ({first_name}), {specials.end} (end), "
        raise ValueError(f"input_ids: {int(tokens[unknown][0])}: {rule}{specials.padding} (padding)")
    present = visible & (tokens <= specials.start)
    counts = present.sum(1)
    first = torch.where(present, places, count).amin(1, keepdim=True)
    offset = places - first  # 0 at the first token or start of a row
    if bool((present != ((offset >= 0) & (offset < counts[:, None]))).any()):
        raise ValueError("attention_mask: padding between tokens; it must be before or after the tokens of a row")
    starts = present & (tokens == specials.start) & causal
    if bool((starts & (offset > 0)).any()):
        raise ValueError(f"input_ids: the start, {specials.start}, after other tokens; it must be first or absent")
    started = starts.any(1)
    lengths = counts - started.long()
    sizes = lengths.tolist()
    begin = first + started[:, None].long()
    offset = torch.arange(max(sizes), device=tokens.device)
    places_of = (begin + offset).clamp(max=count - 1)
    aligned = torch.where(offset < lengths[:, None], tokens.long().gather(1, places_of), 0)
    last = lengths - 1 + shift
    rows = torch.minimum(places - begin + shift, last[:, None]).clamp(min=0)
    return Aligned(aligned, places_of, sizes, started, rows, False, shift)


def all_rows(
    network: SparseTransformer,
    tokens: Tensor,
    mask: Tensor | None,
    *,
    keep: int | Tensor = 0,
    embedded: Tensor | None = None,
    recompute: Callable[..., Any] | None = None,
    hidden: list[Tensor] | None = None,
    project: bool = True,
) -> MixerOutput:
    """Return the logits of the token after each place, and the other outputs of the network's parts.

    If the objective is not causal, they are those of the token at each place.

    Args:
        network: in any mode; gradients reach it.
        tokens: (B, n) integers, n ≥ 0, with padding on either side and starts before the first tokens.
        mask: (B, n), zeros at padding.
        keep: places to project to logits: 0 for all, a number for the last ones, integers (k,) or (B, k) for these, or
            bool (B, n), which gives (k, V).
        embedded: (B, n, C), replaces the tokens' embeddings; only the shape of ``tokens`` then matters.
        recompute: called as (block, rows, context) instead of each block.
        hidden: receives the input of each block at each place, (B, n, C), and the normalised output of the last.
        project: whether to return logits. Otherwise the rows are the normalised output, (B, n, C); not if causal.

    Returns:
        Rows (B, n, V), at least fp32; (B, 1, V) for the first token if n is 0. NaN at places after which the context
        has no row.

    Raises:
        ValueError: a wrong mask or token, or more tokens than the context holds.
    """
    context = network.config.context
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask: shape {tuple(mask.shape)}; must be that of the tokens, {tuple(tokens.shape)}"
        )
    causal = network.config.objective.causal
    aligned = align(tokens, mask, network.config.vocabulary, causal)
    tokens, shift = aligned.tokens, aligned.shift
    if embedded is not None and not aligned.is_plain:
        embedded = embedded.gather(1, aligned.places[..., None].expand(-1, -1, embedded.shape[2]))
    length = tokens.shape[1]
    if length > context:
        raise ValueError(f"{length} tokens: more than the model's context of {context}; give {context} at most")
    if not length and not causal:
        raise ValueError("input_ids: no tokens; give at least one")
    full = causal and length == context  # without a row after the last token

    def to_places(rows: Tensor) -> Tensor:
        """Move the network's rows to places; a missing row becomes zeros."""
        return aligned.at_places(F.pad(rows, (0, 0, 0, 1)) if full else rows)

    def record(block: Any, rows: Tensor, *inputs: Any) -> Any:
        assert hidden is not None
        if aligned.is_plain and not full and rows.dim() == h.dim():
            # The block reads the recorded tensor, which therefore gets a gradient.
            hidden.append(to_places(rows))
            rows = torch.cat([rows[:, :shift], hidden[-1]], 1) if length else rows
        else:  # reversible blocks have two streams, (2, B, n, C), with their mean as output
            hidden.append(to_places(rows.mean(0).to(h.dtype) if rows.dim() > h.dim() else rows))
        return block(rows, *inputs) if recompute is None else recompute(block, rows, *inputs)

    # The last token of a full row is only a target.
    rows = tokens if full else F.pad(tokens, (0, shift))
    real = None  # if causal, a context of n tokens has n + 1 rows of the network, or n if it is full
    if min(aligned.lengths) < length:
        lengths = torch.tensor(aligned.lengths, device=rows.device)
        real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None] + shift
    embedded = None if embedded is None else embedded[:, : rows.shape[1] - 1]
    h = network.embedding(rows, embedded=embedded, real=real)
    contexts = network.block_contexts(rows, real=real)
    output, _ = network.residual(lambda: h, contexts, recompute if hidden is None else record)
    rows = network.norm(output.rows)
    missing = aligned.rows == context if full else None  # places without a row
    if hidden is not None:
        hidden.append(to_places(rows))
        if missing is not None:
            hidden[:] = [rows.masked_fill(missing[..., None], torch.nan) for rows in hidden]
    if not project:
        return output._replace(rows=to_places(rows))
    wide = torch.promote_types(h.dtype, torch.float32)
    if isinstance(keep, int) and not keep:
        logits = to_places(network.logits(rows).to(wide))
    else:
        logits = network.logits(_select(to_places(rows), keep)).to(wide)
        missing = None if missing is None else _select(missing, keep)
    return output._replace(rows=logits if missing is None else logits.masked_fill(missing[..., None], torch.nan))


def _select(rows: Tensor, keep: int | Tensor) -> Tensor:
    """Return rows (B, n, …) at the places of ``keep``; see ``all_rows``."""
    if isinstance(keep, int):
        return rows[:, -keep:]
    if keep.dim() < 2:
        return rows[:, keep]
    if keep.dtype == torch.bool:
        return rows[keep]
    return rows.gather(1, keep.reshape(*keep.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:]))
