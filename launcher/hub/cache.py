"""``past_key_values`` of transformers: sessions that it hands from step to step."""

from __future__ import annotations

from torch import Tensor

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
