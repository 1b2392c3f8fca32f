"""One context that grows token by token: logits of the next position, at the cost of that position alone.

Letters: B batch, N positions, C width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every

from longstride.kernels import ConfigError
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.embedding import NO_TOKEN
from longstride.sparse_model.transformer import SparseTransformer

Module = TypeVar("Module", bound=nn.Module)


class Session:
    """What a model keeps of a batch of contexts of one length, and the logits of their next position.

    ``session.logits`` predicts the next token, and ``session.append(tokens)`` adds it. Appending token by token gives
    the same bits every time on one machine, with the same weights, batch, length and number of threads. ``prefill``
    takes several tokens at once; its last bits may differ.
    """

    def __init__(self, model: SparseTransformer, batch: int = 1, length: int | None = None) -> None:
        """An empty context.

        Args:
            model: in evaluation mode, with its weights on one device. They must not change during the session, and
                hooks that are added meanwhile are not called.
            batch: number of contexts, all of the same length at any time.
            length: tokens to make room for, at most the model's context, which is the default.

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
        self.position = 0  # of the next token
        start = model.embedding.start
        with torch.inference_mode():
            self.states = model.new_states(batch, self.length, start.device, start.dtype)
        # The last tokens before `position`, (B, reach).
        self._before = torch.full((batch, model.embedding.reach), NO_TOKEN, device=start.device)
        self._logits: Tensor | None = None  # of `position`, once its row is computed

    @property
    def logits(self) -> Tensor:
        """Logits of the next token, (B, V) in fp32 (fp64 for fp64); computed at the first access.

        Raises:
            ValueError: the session is full.
        """
        if self._logits is None:
            self._require_room(1)
            with torch.inference_mode():
                h = self._bare.embedding.row(self._before, self.position)
                h = self._bare.through(h, self.states, self.position)
                logits = self._bare.logits(self._bare.norm(h)).squeeze(1)
                self._logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
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
        assert self.logits is not None  # computes the row of this position, whose keys and values later rows read
        self._add(tokens[:, None])

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
            raise ValueError(f"the session has {self.position} tokens already: reset() empties it")
        self._require_room(tokens.shape[1])
        if not tokens.shape[1]:
            return
        tokens = tokens.long()
        with torch.inference_mode():
            self._bare.through(self._bare.embedding(tokens), self.states, 0)
        self._add(tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Without the bare model, which a copy makes from its own model."""
        return {name: value for name, value in vars(self).items() if name != "_bare"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bare = bare(self.model)

    def reset(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.position, self._logits = 0, None
        self._before = torch.full_like(self._before, NO_TOKEN)

    def rearrange(self, order: Tensor) -> None:
        """Context i becomes a copy of context ``order[i]``: contexts may be dropped, and repeated.

        Args:
            order: (B,) integers from 0 to B - 1, on the model's device.

        Raises:
            ValueError: another shape.
        """
        if order.shape != (self.batch,):
            raise ValueError(f"order {tuple(order.shape)} must be ({self.batch},), one for each context")
        with torch.inference_mode():
            for state in self.states:
                if state is not None:
                    state.rearrange(order, self.position + 1)
        self._before = self._before[order]
        self._logits = None if self._logits is None else self._logits[order]

    def _add(self, tokens: Tensor) -> None:
        """Go on behind tokens (B, n), and keep a copy of those that the next row embeds."""
        reach = self._before.shape[1]
        self._before = torch.cat([self._before, tokens[:, -reach:].long()], 1)[:, -reach:]
        self.position, self._logits = self.position + tokens.shape[1], None

    def _require_room(self, rows: int) -> None:
        if self.position + rows > self.length:
            raise ValueError(f"{self.position + rows} tokens: the session has room for {self.length}")


def even_length(config: ModelConfig, least: int) -> int:
    """The smallest length, from ``least`` to the context, that all mixers divide evenly.

    A causal pattern gives the same rows at any length. But only where its stride divides the length do its reads have a
    closed form, and are its columns read in place.
    """
    mixers = {block.mixer for block in config.blocks() if block.mixer is not None}
    for length in range(max(least, 1), config.context):
        with contextlib.suppress(ConfigError):
            for mixer in mixers:
                mixer.check(config, length)
            return length
    return config.context


def bare(module: Module) -> Module:
    """The same module to call, without what ``nn.Module`` adds to every call and every name; it shares its tensors.

    One row of a small model is some hundred operations of a few microseconds each: looking for hooks that are not
    there, and for parameters by name, takes time that shows. It holds as long as nothing is assigned to either module.
    A submodule that has hooks, was compiled, or had its ``forward`` replaced is called as before. So are all modules
    where global hooks exist. Hooks that are added later are not called.
    """
    return _bare(module, {})


def _bare(module: Any, known: dict[int, Any]) -> Any:
    """``known``: the bare modules so far, by the ids of the originals, as a submodule may occur several times."""
    if module is None or id(module) in known:
        return known.get(id(module))
    attributes, kind = vars(module), module.__class__
    hooks = (attributes["_forward_hooks"], attributes["_forward_pre_hooks"], every._global_forward_hooks)
    if any((*hooks, every._global_forward_pre_hooks, module._compiled_call_impl, "forward" in attributes)):
        known[id(module)] = module
        return module
    children = {name: _bare(child, known) for name, child in attributes["_modules"].items()}
    known[id(module)] = twin = object.__new__(_called_by(kind, kind.forward))
    # Plain attributes are found without nn.Module.__getattr__.
    vars(twin).update(attributes | attributes["_parameters"] | attributes["_buffers"] | children, _modules=children)
    return twin


@lru_cache
def _called_by(kind: Any, forward: Any) -> Any:
    """The class with its present ``forward`` as ``__call__``."""
    return type(kind.__name__, (kind,), {"__call__": forward})
