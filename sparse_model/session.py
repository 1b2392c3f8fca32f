"""One context that grows token by token: logits of the next position, at the cost of that position alone.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longstride.sparse_model.bare import bare
from longstride.sparse_model.cache import allocate, even_length
from longstride.sparse_model.transformer import SparseTransformer


class Session:
    """A model's keys and values for a batch of contexts of one length, and the logits of their next position.

    ``session.logits`` says what comes next, ``session.append(tokens)`` what came. A context that was appended to token
    by token gives the same bits whenever the same is done again on the machine: with the same weights, batch, length
    and number of threads. ``prefill`` takes a beginning at once, and may differ from that in the last bits.
    """

    def __init__(self, model: SparseTransformer, batch: int = 1, length: int | None = None) -> None:
        """An empty context.

        Args:
            model: in evaluation mode, its weights all on one device; they must not change during the session, and hooks
                that are put on it meanwhile are not called.
            batch: contexts, all of the same length at any time.
            length: tokens to make room for, at most the model's context; all of it where None.

        Raises:
            ValueError: the model is in training mode, or the batch or the length is out of range.
        """
        context = model.config.context
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        if batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1")
        if length is not None and not 0 <= length <= context:
            raise ValueError(f"length={length}: must be 0 to {context}, the model's context")
        self.model, self.batch = model, batch
        self._bare = bare(model)
        self.length = context if length is None else even_length(model.config, length)
        self.position = 0  # of the next token: how many are known
        start = model.embedding.start
        with torch.inference_mode():
            self.caches = allocate(model.config, batch, self.length, start.device, start.dtype)
        self._last: Tensor | None = None  # token before `position`
        self._logits: Tensor | None = None  # of `position`, where its row was computed already

    @property
    def logits(self) -> Tensor:
        """Of the next token, (B, V) in fp32 (fp64 for fp64); computed when first asked for.

        Raises:
            ValueError: the session is full.
        """
        if self._logits is None:
            self._require_room(1)
            with torch.inference_mode():
                h = self._bare.embedding.row(self._last, self.position, self.batch)
                h = self._bare.through(h, self.caches, self.position)
                found = self._bare.logits(self._bare.norm(h)).squeeze(1)
                self._logits = found if found.dtype in (torch.float32, torch.float64) else found.float()
        return self._logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to every context.

        Args:
            tokens: (B,) integers on the model's device.

        Raises:
            ValueError: another shape, or the session is full.
        """
        if tokens.shape != (self.batch,):
            raise ValueError(f"tokens {tuple(tokens.shape)} must be ({self.batch},), one for each context")
        self._require_room(1)
        assert self.logits is not None  # its row is read by later ones
        self._known(tokens)
        self.position += 1

    def prefill(self, tokens: Tensor) -> None:
        """Begin every context with several tokens, in one forward pass.

        Args:
            tokens: (B, n) integers on the model's device, n from 0.

        Raises:
            ValueError: another shape, too many tokens, or the contexts have begun already.
        """
        if tokens.dim() != 2 or len(tokens) != self.batch:
            raise ValueError(f"tokens {tuple(tokens.shape)} must be ({self.batch}, n), a row for each context")
        if self.position:
            raise ValueError(f"{self.position} tokens are known already: reset() begins anew")
        self._require_room(tokens.shape[1])
        if not tokens.shape[1]:
            return
        tokens = tokens.long()
        with torch.inference_mode():
            self._bare.through(self._bare.embedding(tokens), self.caches, 0)
        self._known(tokens[:, -1])
        self.position = tokens.shape[1]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what stands for the model is made anew for theirs."""
        return {name: value for name, value in vars(self).items() if name != "_bare"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bare = bare(self.model)

    def reset(self) -> None:
        """Forget all tokens: the same room, for other contexts."""
        self.position, self._last, self._logits = 0, None, None

    def rearrange(self, order: Tensor) -> None:
        """Context i becomes what context ``order[i]`` is: contexts may leave, and stand several times.

        Args:
            order: (B,) integers from 0 to B - 1, on the model's device.

        Raises:
            ValueError: another shape.
        """
        if order.shape != (self.batch,):
            raise ValueError(f"order {tuple(order.shape)} must be ({self.batch},), one for each context")
        with torch.inference_mode():
            for cache in self.caches:
                cache.rearrange(order, self.position + 1)
        self._last = None if self._last is None else self._last[order]
        self._logits = None if self._logits is None else self._logits[order]

    def _known(self, last: Tensor) -> None:
        """The last token, which the next row begins with: a copy, as the caller may write to its own."""
        self._last, self._logits = last.long().clone(), None

    def _require_room(self, rows: int) -> None:
        if self.position + rows > self.length:
            raise ValueError(f"{self.position + rows} tokens: the session has room for {self.length}")
