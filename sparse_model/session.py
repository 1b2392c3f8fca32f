"""One context that grows token by token: logits of the next position, at the cost of that position alone.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every

from longstride.kernels import ConfigError
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.ngrams import NO_TOKEN
from longstride.sparse_model.tiles import wide_of
from longstride.sparse_model.transformer import SparseTransformer

Module = TypeVar("Module", bound=nn.Module)


class Session:
    """The cache of a model for a batch of contexts of one length, and the logits of their next position.

    ``session.logits`` predicts the next token, and ``session.append(tokens)`` adds it. Appending token by token gives
    the same bits every time on one machine, with the same weights, batch, length and number of threads. ``prefill`` and
    ``extend`` take several tokens at once; their last bits may differ. ``truncate`` removes the last tokens, as if they
    had never been appended.

    A model that carries state reads texts of any length at constant cost: ``carry()`` begins the next context after a
    whole one, as training does, and ``read`` does so as often as needed.

    The contexts of a batch share matrix products, so the last bits of a context depend on the batch size. For the bits
    of a batch of one, use a session for each context; ``selected`` copies one that has begun.

    A session that begins under autocast caches what autocast computes, and must continue under the same autocast.
    """

    def __init__(
        self,
        model: SparseTransformer,
        batch: int = 1,
        length: int | None = None,
        *,
        back: int | None = None,
    ) -> None:
        """Start with an empty context.

        Args:
            model: in evaluation mode, with its weights on one device. They must not change during the session. Hooks
                that are added later are not called.
            batch: number of contexts, all of the same length at any time.
            length: tokens to make room for, at most the model's context, which is the default.
            back: how many tokens ``truncate`` may remove without removing all; None: any number. A convolution then
                keeps all its rows.

        Raises:
            ConfigError: the model predicts no next token.
            ValueError: the model is in training mode, or the batch, the length or ``back`` is out of range.
        """
        model.config.require_next_token()
        context = model.config.context
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        if batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1")
        if length is not None and not 0 <= length <= context:
            raise ValueError(f"length={length}: must be 0 to {context}, the model's context")
        if back is not None and back < 0:
            raise ValueError(f"back={back}: must be 0 or more")
        self.model, self.batch, self._back = model, batch, back
        self._bare = bare(model)
        self.length = context if length is None else even_length(model.config, length)
        self.position = 0  # of the next token
        self._last: Tensor | None = None  # (B, reach), tokens before the context if it continues another
        start = model.embedding.start
        self._autocast = _autocast(start)
        with torch.inference_mode():
            self.states = model.new_states(batch, self.length, start.device, self._autocast or start.dtype, back)
        # All tokens, after NO_TOKEN for those before the beginning that the first rows look up: (B, reach + N).
        self._reach = model.reach
        self._tokens = torch.full((batch, self._reach + self.length), NO_TOKEN, device=start.device)
        self._logits: Tensor | None = None  # of `position`, once its row is computed

    @property
    def logits(self) -> Tensor:
        """Logits of the next token, (B, V) in fp32 (fp64 for fp64); computed at the first access.

        Raises:
            ValueError: the session is full, or began under another autocast.
        """
        if self._logits is None:
            self._require_room(1)
            self._require_autocast()
            with torch.inference_mode():
                h = self._rows(self.position, 1)
                logits = self._bare.logits(self._bare.norm(h)).squeeze(1)
                self._logits = logits.to(wide_of(logits))
        return self._logits

    def append(self, tokens: Tensor) -> None:
        """Add one token to every context.

        Args:
            tokens: (B,) integers on the model's device.

        Raises:
            ValueError: the shape is wrong, or the session is full.
        """
        if tokens.shape != (self.batch,):
            raise ValueError(f"tokens {tuple(tokens.shape)} must be ({self.batch},), one for each context")
        assert self.logits is not None  # computes this position's row, so that its keys and values are cached
        with torch.inference_mode():
            self._store(tokens[:, None])
        self.position, self._logits = self.position + 1, None

    def carry(self) -> None:
        """Begin the next context after a whole one, with what the model carries from one to the other.

        Raises:
            ValueError: the model carries nothing, or the context is not complete.
        """
        context = self.model.config.context
        if not self.model.carried:
            raise ValueError("the model carries nothing from one context to the next")
        if self.position != context:
            raise ValueError(f"the context has {self.position} tokens: only a whole one of {context} is continued")
        with torch.inference_mode():
            for mixer, state in zip(self.model.mixers, filter(None, self.states), strict=True):
                state.carry() if mixer.carried else state.truncate(0)  # type: ignore[attr-defined]
            self._last = self._tokens[:, context : context + self._reach].clone()
        self.position, self._logits = 0, None

    def read(self, tokens: Tensor) -> None:
        """Add tokens (B, n) of any number n; whenever a context is whole, ``carry()`` begins the next one.

        Raises:
            ValueError: as ``extend`` and ``carry``.
        """
        while tokens.shape[1]:
            if self.position == self.length:  # single steps have completed it
                self.carry()
            room = self.length - self.position
            if self.position:
                self.extend(tokens[:, :room], keep=1)
            else:
                self.prefill(tokens[:, :room])
            tokens = tokens[:, room:]
            if self.position == self.length:
                self.carry()

    def prefill(self, tokens: Tensor) -> None:
        """Begin every context with several tokens, in one forward pass.

        Args:
            tokens: (B, n) integers on the model's device, n from 0.

        Raises:
            ValueError: the shape is wrong, there are too many tokens, or the contexts have begun already.
        """
        if self.position:
            raise ValueError(f"the session already has {self.position} tokens; reset() empties it")
        self._require_fit(tokens, least=0)
        if not tokens.shape[1]:
            return
        with torch.inference_mode():
            self._store(tokens)
            self._rows(0, tokens.shape[1])
        self.position, self._logits = tokens.shape[1], None

    def extend(self, tokens: Tensor, keep: int = 0) -> Tensor:
        """Add several tokens to every context, in one pass.

        Layers that compute each row independently, such as linear layers, get all rows at once. Mixers get one row
        after the other, as in single steps, except at the beginning of a context and in attention over patterns. The
        last bits may differ from those of single steps.

        Args:
            tokens: (B, n) integers on the model's device, n from 1.
            keep: for how many of the last tokens to compute the logits; 0 for all.

        Returns:
            Logits after each token, (B, ``keep`` or n, V) as ``logits``; NaN after a full context.

        Raises:
            ValueError: the shape is wrong, the session has too little room, or it began under another autocast.
        """
        self._require_fit(tokens, least=1)
        count = tokens.shape[1]
        # The row of the last token is computed here unless the logits after it, and so its keys, are known.
        first = self.position + (self.position > 0 and self._logits is not None)
        model, full = self._bare, self.position + count == self.length
        with torch.inference_mode():
            self._store(tokens)
            h = self._rows(first, self.position + count + 1 - full - first)
            logits = model.logits(model.norm(h[:, h.shape[1] + full - (keep or count) :]))
            logits = logits.to(wide_of(logits))
            if full:
                logits = nn.functional.pad(logits, (0, 0, 0, 1), value=torch.nan)
        self.position, self._logits = self.position + count, None if full else logits[:, -1]
        return logits

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length`` of every context; with 0 also what was carried to it.

        Attention over patterns needs no time for this. Mixers that list the members of a cluster or bucket list them
        again, which at most sorts the remaining positions.

        Raises:
            ValueError: there are fewer tokens, or more would be removed than ``back`` allows.
        """
        if not 0 <= length <= self.position:
            raise ValueError(f"length={length}: must be 0 to {self.position}, the current number of tokens")
        if self._back is not None and 0 < length < self.position - self._back:
            rule = f"must be 0, or at least {self.position - self._back}"
            raise ValueError(f"length={length}: {rule}: the session was created with back={self._back}")
        if length == self.position and length:
            return
        self._last = self._last if length else None
        with torch.inference_mode():
            for state in self.states:
                if state is not None:
                    state.truncate(length)
        self.position, self._logits = length, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        """Copy the session but not its model."""
        memo |= {id(module): module for module in self.model.modules()}
        session: Session = object.__new__(type(self))
        session.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return session

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the bare model, which a copy makes from its own model."""
        return {name: value for name, value in vars(self).items() if name != "_bare"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bare = bare(self.model)

    def reset(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.truncate(0)

    def rearrange(self, order: Tensor) -> None:
        """Replace context i by a copy of context ``order[i]``, so that contexts may be dropped and repeated.

        Args:
            order: (B,) integers from 0 to B - 1, on the model's device.

        Raises:
            ValueError: the shape is wrong.
        """
        if order.shape != (self.batch,):
            raise ValueError(f"order {tuple(order.shape)} must be ({self.batch},), one for each context")
        self._take(self, order)

    def selected(self, order: Tensor) -> Session:
        """Return a new session whose context i is a copy of context ``order[i]``; ``order`` is (b,) integers, b from 1.

        Raises:
            ValueError: no contexts, or this session began under another autocast.
        """
        self._require_autocast()
        session = Session(self.model, len(order), self.length, back=self._back)
        session.position = self.position
        session._take(self, order)
        return session

    def _take(self, source: Session, order: Tensor) -> None:
        """Copy contexts of a session with as many tokens."""
        with torch.inference_mode():
            for state, of_source in zip(self.states, source.states, strict=True):
                if state is not None:
                    state.take(of_source, order, self.position + 1, slice(None))
            self._tokens.copy_(source._tokens[order])
            self._last = None if source._last is None else source._last[order]
            self._logits = None if source._logits is None else source._logits[order]

    def _rows(self, first: int, count: int) -> Tensor:
        """Compute ``count`` rows from position ``first`` on, (B, count, C) before the last norm, and cache them."""
        embedding = self._bare.embedding
        if not count:
            return embedding.start.new_empty(self.batch, 0, self.model.config.width)
        before = self._tokens[:, first : first + self._reach + count - 1]
        seen, goes_on = before, self._last is not None
        if self._last is not None and first < self._reach:  # the embedding reads on, where mixers begin
            seen = torch.cat([self._last[:, first:], before[:, self._reach - first :]], 1)
        if not first and count > 1 and not goes_on:  # the last token of a context is only a target
            h = embedding(nn.functional.pad(before[:, self._reach :], (0, 1)))
        else:
            h = embedding.rows(seen[:, self._reach - embedding.reach :], first, goes_on)
        return self._bare.forward_cached(h, self.states, first, before)

    def _store(self, tokens: Tensor) -> None:
        """Write tokens (B, n) behind the present ones."""
        first = self.position + self._reach
        self._tokens[:, first : first + tokens.shape[1]] = tokens

    def _require_autocast(self) -> None:
        if (now := _autocast(self.model.embedding.start)) != self._autocast:
            began, goes = (
                f"under autocast to {dtype}" if dtype else "without autocast" for dtype in (self._autocast, now)
            )
            raise ValueError(f"the session began {began}, and continues {goes}: its cache needs the first")

    def _require_fit(self, tokens: Tensor, least: int) -> None:
        if tokens.dim() != 2 or len(tokens) != self.batch or tokens.shape[1] < least:
            rule = f"must be ({self.batch}, n), a row for each context, n from {least}"
            raise ValueError(f"tokens {tuple(tokens.shape)} {rule}")
        self._require_room(tokens.shape[1])
        self._require_autocast()

    def _require_room(self, rows: int) -> None:
        if self.position + rows > self.length:
            raise ValueError(f"{self.position + rows} tokens: the session has room for {self.length}")


def _autocast(like: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts projections by weights like these; None: they stay as they are."""
    kind = like.device.type
    # Autocast leaves fp64 as it is.
    casts = like.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else None


def even_length(config: ModelConfig, least: int) -> int:
    """Return the smallest length, from ``least`` to the context, that all mixers divide evenly.

    A causal pattern gives the same rows at any length. But its reads have a closed form, and its columns are read in
    place, only if its stride divides the length.
    """
    mixers = {block.mixer for block in config.blocks() if block.mixer is not None}
    for length in range(max(least, 1), config.context):
        with contextlib.suppress(ConfigError):
            for mixer in mixers:
                mixer.check(config, length)
            return length
    return config.context


def bare(module: Module) -> Module:
    """Return the same module without the overhead that ``nn.Module`` adds to every call; it shares the tensors.

    One row of a small model takes some hundred operations of a few microseconds each, so that looking for hooks and for
    parameters by name takes noticeable time. The result is valid as long as nothing is assigned to either module. A
    submodule that has hooks, was compiled, or had its ``forward`` replaced is called as before. So are all modules if
    global hooks exist. Hooks that are added later are not called.
    """
    return _bare(module, {})


def _bare(module: Any, twins: dict[int, Any]) -> Any:
    """Make the bare module; ``twins`` maps ids of originals to theirs, as a submodule may occur several times."""
    if module is None or id(module) in twins:
        return twins.get(id(module))
    attributes, kind = vars(module), module.__class__
    hooks = (attributes["_forward_hooks"], attributes["_forward_pre_hooks"], every._global_forward_hooks)
    if any((*hooks, every._global_forward_pre_hooks, module._compiled_call_impl, "forward" in attributes)):
        twins[id(module)] = module
        return module
    children = {name: _bare(child, twins) for name, child in attributes["_modules"].items()}
    twins[id(module)] = twin = object.__new__(_called_by(kind, kind.forward))
    # Plain attributes are found without nn.Module.__getattr__.
    vars(twin).update(attributes | attributes["_parameters"] | attributes["_buffers"] | children, _modules=children)
    return twin


@lru_cache
def _called_by(kind: Any, forward: Any) -> Any:
    """Return a subclass that has the present ``forward`` as ``__call__``."""
    return type(kind.__name__, (kind,), {"__call__": forward})
