"""A batch of transformers in one pass of the network: each place gets the row of what comes after it.

Row i of the network predicts token i. So n tokens need n + 1 rows, and a full context has no row behind its last token.

Letters: B batch, n places of a row, m tokens of the longest row, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.launcher.hub.alignment import align
from longstride.launcher.hub.configuration import Specials
from longstride.sparse_model import BlockContext, MixerOutput, SparseTransformer


def all_rows(
    network: SparseTransformer,
    tokens: Tensor,
    mask: Tensor | None,
    specials: Specials,
    *,
    keep: int | Tensor = 0,
    embedded: Tensor | None = None,
    recompute: Callable[..., Any] | None = None,
    hidden: list[Tensor] | None = None,
) -> MixerOutput:
    """Logits of the token after each place, and what the network's parts give beside them.

    Args:
        network: of any mode; gradients reach it.
        tokens: (B, n) integers, n from 0; with padding on either side, and starts before the first tokens.
        mask: (B, n), zeros at padding.
        specials: of the vocabulary.
        keep: which places to project to logits: 0 for all, a number for the last ones, integers (k,) or (B, k) for
            these, or bool (B, n), which gives (k, V).
        embedded: (B, n, C) in place of the tokens' embeddings; of ``tokens`` the shape alone then counts.
        recompute: called as (block, rows, context) in place of each block.
        hidden: gets what enters each block at each place, (B, n, C), and what the last one gives, normalised.

    Returns:
        Rows (B, n, V) in fp32 at least; (B, 1, V), the first token's, where n is 0. NaN at places behind which the
        context has no row.

    Raises:
        ValueError: a wrong mask or token, or more tokens than the context holds.
    """
    context = network.config.context
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask: shape {tuple(mask.shape)}; must be that of the tokens, {tuple(tokens.shape)}"
        )
    # One look at the batch: most have tokens alone, and stand as the network takes them.
    unusual = (tokens < 0) | (tokens >= network.config.vocabulary)
    if mask is not None:
        unusual = unusual | (mask == 0)
    aligned = align(tokens, mask, specials) if bool(unusual.any()) else None
    if aligned is not None:
        tokens = aligned.tokens
        if embedded is not None:
            embedded = embedded.gather(1, aligned.places[..., None].expand(-1, -1, embedded.shape[2]))
    length = tokens.shape[1]
    if length > context:
        raise ValueError(f"{length} tokens: more than the model's context of {context}; give {context} at most")
    full = length == context

    def placed(rows: Tensor) -> Tensor:
        """The network's rows as they stand at places; zeros for a row that there is not."""
        rows = F.pad(rows, (0, 0, 0, 1)) if full else rows
        if aligned is not None:
            return aligned.at_places(rows)
        return rows[:, 1:] if length else rows

    def recorded(block: Any, rows: Tensor, of_block: BlockContext) -> Any:
        assert hidden is not None
        if aligned is None and not full and rows.dim() == h.dim():  # what is returned is read: it has a gradient
            hidden.append(rows[:, 1:] if length else rows)
            rows = torch.cat([rows[:, :1], hidden[-1]], 1) if length else rows
        else:  # reversible blocks have two streams, (2, B, n, C), whose mean leaves the last one
            hidden.append(placed(rows.mean(0).to(h.dtype) if rows.dim() > h.dim() else rows))
        return block(rows, of_block) if recompute is None else recompute(block, rows, of_block)

    # The last token of a row is a target only.
    rows = tokens if full else F.pad(tokens, (0, 1))
    real = None  # a row of n tokens has n + 1 rows of the network, of which the context may lack the last one
    if aligned is not None and bool((aligned.lengths < length).any()):
        real = torch.arange(rows.shape[1], device=rows.device) <= aligned.lengths[:, None]
    embedded = None if embedded is None else embedded[:, : rows.shape[1] - 1]
    h = network.embedding(rows, embedded=embedded, real=real)
    contexts = network.block_contexts(rows.shape[1], real=real)
    output, _ = network.residual(lambda: h, contexts, recompute if hidden is None else recorded)
    rows = network.norm(output.rows)
    missing = None  # at which places there is nothing
    if full:
        missing = tokens.new_zeros(placed(h[..., :1]).shape[:2], dtype=torch.bool)
        if aligned is None:
            missing[:, -1] = True
        else:
            missing = aligned.rows == context
    if hidden is not None:
        hidden.append(placed(rows))
        if missing is not None:
            hidden[:] = [each.masked_fill(missing[..., None], torch.nan) for each in hidden]
    wide = torch.promote_types(h.dtype, torch.float32)
    if isinstance(keep, int) and not keep:
        logits = placed(network.logits(rows).to(wide))
    else:
        logits = network.logits(_kept(placed(rows), keep)).to(wide)
        missing = None if missing is None else _kept(missing, keep)
    return output._replace(rows=logits if missing is None else logits.masked_fill(missing[..., None], torch.nan))


def _kept(rows: Tensor, keep: int | Tensor) -> Tensor:
    """Of rows (B, n, …), those at some places."""
    if isinstance(keep, int):
        return rows[:, -keep:]
    if keep.dim() < 2:
        return rows[:, keep]
    if keep.dtype == torch.bool:
        return rows[keep]
    return rows.gather(1, keep.reshape(*keep.shape, *[1] * (rows.dim() - 2)).expand(-1, -1, *rows.shape[2:]))
