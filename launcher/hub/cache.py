"""``past_key_values`` of transformers: sessions that it hands from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from longstride.launcher.hub.configuration import Specials
from longstride.launcher.hub.rows import all_rows
from longstride.sparse_model import Session


class SessionCache:
    """``past_key_values``: a session, which transformers hands from step to step."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def get_seq_length(self, layer: int = 0) -> int:
        """How many tokens it holds."""
        return self.session.position

    def reorder_cache(self, order: Tensor) -> None:
        """For beam search: context i goes on from what was context ``order[i]``."""
        self.session.rearrange(order)

    def extend(self, tokens: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        """Takes tokens behind those that it holds; logits of what comes after each of the last ``keep``, (B, n, V).

        Args:
            tokens: (B, n) integers.
            mask: (B, N), ones, for all tokens that it then holds.
            keep: how many logits are asked for; 0 for all.

        Raises:
            ValueError: padding, or no room.
        """
        if mask is not None and not bool(mask.all()):
            raise ValueError("attention_mask: has zeros; a cache takes no padding: give contexts of one length")
        session, count = self.session, tokens.shape[1]
        if session.position == 0:
            specials = Specials.of(session.model.config.vocabulary)
            rows = None if keep == 1 else all_rows(session.model, tokens, None, specials).rows
            session.prefill(tokens)
            if rows is None:
                rows = session.logits[:, None].clone()
            return rows[:, -keep:]
        kept = []
        for place in range(count):
            session.append(tokens[:, place])
            if not keep or place >= count - keep:
                kept.append(session.logits.clone())
        return torch.stack(kept, 1)
