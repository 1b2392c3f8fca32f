"""Rows of a batch as the network takes them: tokens alone, each row from its first place on.

A row of transformers may have padding on either side, and the start before its first token. The network has neither:
it begins every row at place 0 with a start of its own. So rows are moved to the left, and logits are brought back to
the places that transformers expects them at.

Letters: B batch, n places of a row, m tokens of the longest row, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longstride.launcher.hub.configuration import Specials


class Aligned(NamedTuple):
    """What ``align`` makes of a batch."""

    tokens: Tensor  # (B, m) int64; zeros behind the end of a shorter row
    places: Tensor  # (B, m) int64: where each of them stood; any place behind the end of a shorter row
    lengths: Tensor  # (B,) int64: tokens of each row
    # (B, n) int64: the network's row that predicts what follows each place; 0 for padding before the first token, and
    # for padding behind the last one the same as for that.
    rows: Tensor

    def at_places(self, logits: Tensor) -> Tensor:
        """The network's rows (B, m + 1, …) as they stand at places of transformers, (B, n, …)."""
        index = self.rows.reshape(*self.rows.shape, *[1] * (logits.dim() - 2))
        return logits.gather(1, index.expand(-1, -1, *logits.shape[2:]))


def align(tokens: Tensor, mask: Tensor | None, specials: Specials) -> Aligned:
    """Moves rows to the left, without starts and padding.

    Args:
        tokens: (B, n) integers, n from 0: tokens below V, and the three special ones.
        mask: (B, n), zeros at padding; its tokens do not matter. Ends and padding by their own numbers are padding
            whatever the mask says, as ``generate`` writes them behind rows that are done.
        specials: of the vocabulary.

    Raises:
        ValueError: padding between tokens of a row, a start behind its first token, or a number that is no token's.
    """
    shown = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    unknown = shown & ((tokens < 0) | (tokens > specials.padding))
    if bool(unknown.any()):
        rule = f"a token is 0 to {specials.start - 1}, or {specials.start} (start), {specials.end} (end), "
        raise ValueError(f"input_ids: {int(tokens[unknown][0])}: {rule}{specials.padding} (padding)")
    present = shown & (tokens <= specials.start)
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    counts = present.sum(1)
    first = torch.where(present, places, tokens.shape[1]).amin(1, keepdim=True) if tokens.shape[1] else counts[:, None]
    inside = places - first  # from 0 at the first token or start of a row
    if bool((present != ((inside >= 0) & (inside < counts[:, None]))).any()):
        raise ValueError("attention_mask: padding between tokens; it may stand before or behind the tokens of a row")
    starts = present & (tokens == specials.start)
    if bool((starts & (inside > 0)).any()):
        raise ValueError(f"input_ids: the start, {specials.start}, behind other tokens; it stands first or not at all")
    started = starts.any(1)
    lengths = counts - started.long()
    most = int(lengths.max()) if len(lengths) else 0
    begin = first + started[:, None].long()
    inside = torch.arange(most, device=tokens.device)
    places_of = (begin + inside).clamp(max=max(tokens.shape[1] - 1, 0))
    moved = torch.where(inside < lengths[:, None], tokens.long().gather(1, places_of), 0)
    rows = (places - begin + 1).clamp(min=0)
    return Aligned(moved, places_of, lengths, torch.minimum(rows, lengths[:, None]))
