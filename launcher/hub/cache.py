"""A cache for transformers: the state of a batch whose contexts may have different lengths.

Letters: B contexts of the batch, n new places, N places in all, V vocabulary. A place has a token, padding or a start.
The network only knows tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from longstride.launcher.hub.rows import align
from longstride.sparse_model import Session, SparseTransformer

# Name of the argument and the output: "cache" from transformers 5.24 on, "past_key_values" before.
CACHE_NAME = [field.name for field in dataclasses.fields(CausalLMOutputWithPast)][2]


class _Group(NamedTuple):
    """Contexts of one length, which share a session."""

    members: list[int]  # indices of its contexts in the batch
    session: Session

    def select(self, members: list[int], sources: Sequence[int]) -> _Group:
        """Return contexts ``members``, copies of those at ``sources`` in this group; in place if possible."""
        order = torch.tensor(sources, device=self.session.model.embedding.start.device)
        if len(sources) != self.session.batch:
            return _Group(members, self.session.selected(order))
        if list(sources) != list(range(self.session.batch)):
            self.session.rearrange(order)
        return _Group(members, self.session)

    def split_by(self, keys: Sequence[int]) -> list[tuple[_Group, int]]:
        """Split it into groups of contexts with equal keys, and return each with its key."""
        parts = []
        for key in sorted(set(keys)):
            places = [place for place, value in enumerate(keys) if value == key]
            parts.append((self.select([self.members[place] for place in places], places), key))
        return parts

    def next_logits(self) -> Tensor:
        """Return the logits of the next token, (b, 1, V); NaN after a full context."""
        session = self.session
        config = session.model.config
        if session.position < config.context:
            return session.logits[:, None].clone()
        like = session.model.embedding.start
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.full((session.batch, 1, config.vocabulary), torch.nan, dtype=wide, device=like.device)

    def take(self, tokens: Tensor, rows: Tensor, keep: int) -> Tensor:
        """Append tokens (b, m), m ≥ 0; return the logits after each of the last ``keep`` places, or all for 0.

        ``rows`` (b, n) says after how many of the tokens each place is. Returns (b, ·, V).
        """
        session = self.session
        if keep == 1 and not session.position:
            session.prefill(tokens)
        elif keep == 1 and tokens.shape[1] > 1:
            return session.extend(tokens, 1).clone()
        elif rows.shape[1] > 1:
            logits = self.next_logits()
            if tokens.shape[1]:
                logits = torch.cat([logits, session.extend(tokens)], 1)
            return logits.gather(1, rows[:, -keep:, None].expand(-1, -1, logits.shape[2]))
        elif tokens.shape[1]:
            session.append(tokens[:, 0])  # the same call as in sampling, for the same bits
        return self.next_logits()


class SessionCache:
    """A cache that transformers passes from step to step, with one session for all contexts of one length.

    It begins empty. A step with padding for only some contexts, such as finished ones, splits them from the others.
    Every context thus has the tokens and takes the steps that it would have and take alone. Contexts of a session share
    matrix products, so their logits equal those alone within rounding.
    """

    is_compileable = False
    is_croppable = True
    is_linear = (False,)  # not purely recurrent: transformers passes the tokens that are not in the cache
    layers: ClassVar[tuple[Any, ...]] = ()
    _groups: list[_Group]
    _counts: Tensor  # (B, 1 + p): tokens of each context before the first place, and up to each of the p places

    def __init__(self, network: SparseTransformer) -> None:
        self._network = network
        self.reset()

    def is_compatible_with(self, network: SparseTransformer) -> bool:
        """Whether ``network`` is its own network, or has the same weights, like a copy."""
        if self._network._modules is network._modules:
            return True
        weights, other_weights = self._network.state_dict(), network.state_dict()
        if self._network.config != network.config or weights.keys() != other_weights.keys():
            return False
        pairs = [(tensor, other_weights[name]) for name, tensor in weights.items()]
        return all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs)

    def extend(self, tokens: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        """Append tokens; return the logits after each of the last ``keep`` places.

        Args:
            tokens: (B, n) integers, including padding and starts.
            mask: (B, N), zeros at padding, of all places including the new ones.
            keep: how many logits to return; 0 for all.

        Returns:
            (B, n, V), or less by ``keep``; (B, 1, V) for the first token if there are no tokens. NaN after a full
            context.

        Raises:
            ValueError: another batch or mask, padding between the tokens, or no room.
        """
        batch, count = tokens.shape
        is_new = not self.get_seq_length()
        counts = tokens.new_zeros(batch, 1, dtype=torch.int64) if is_new else self._counts
        if batch != len(counts):
            rule = f"{CACHE_NAME} holds {len(counts)}; batch_repeat_interleave and batch_select_indices change that"
            raise ValueError(f"input_ids: {batch} contexts: {rule}")
        if mask is not None:
            mask = _new_places(mask, counts, count)
        aligned = align(tokens, mask, self._network.config.vocabulary)
        if bool((aligned.started & (counts[:, -1] > 0)).any()):
            rule = f"after tokens that {CACHE_NAME} holds; it must be first or absent"
            raise ValueError(f"input_ids: the start, {self._network.config.vocabulary}, {rule}")
        lengths, context = aligned.lengths, self._network.config.context
        most = max(held + length for held, length in zip(counts[:, -1].tolist(), lengths, strict=True))
        if most > context:
            raise ValueError(f"{most} tokens: more than the model's context of {context}; give {context} at most")
        groups = self._groups
        if is_new:
            by_length: dict[int, list[int]] = {}
            for number, length in enumerate(lengths):
                by_length.setdefault(length, []).append(number)
            groups = [_Group(members, Session(self._network, len(members))) for members in by_length.values()]
        self._groups, logits = [], []
        for group in groups:
            for part, length in group.split_by([lengths[member] for member in group.members]):
                rows = part.take(aligned.tokens[part.members, :length], aligned.rows[part.members], keep)
                logits.append((part.members, rows))
                self._groups.append(part)
        self._counts = torch.cat([counts, counts[:, -1:] + aligned.rows], 1)
        return self._gather(logits)

    def _gather(self, parts: list[tuple[list[int], Tensor]]) -> Tensor:
        """Return the logits (b, n, V) of groups in the order of the batch."""
        if len(parts) == 1:
            return parts[0][1]
        logits = parts[0][1].new_empty(self.batch_size, *parts[0][1].shape[1:])
        for members, rows in parts:
            logits[members] = rows
        return logits

    @property
    def batch_size(self) -> int:
        """The number of contexts."""
        return sum(len(group.members) for group in self._groups)

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the longest context."""
        return max((group.session.position for group in self._groups), default=0)

    @property
    def is_initialized(self) -> bool:
        """Whether it has contexts."""
        return bool(self._groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of places, including padding."""
        return self._counts.shape[1] - 1

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity in tokens: the model's context."""
        return self._network.config.context

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Do nothing: every token can be removed."""

    def reset(self) -> None:
        """Remove all contexts."""
        self._groups, self._counts = [], torch.zeros(0, 1, dtype=torch.int64)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last places: -3 removes three, as in transformers. ValueError for numbers above 0."""
        if tokens_to_remove > 0:
            rule = f"must be 0 or less: {-tokens_to_remove} removes {tokens_to_remove} places"
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove}: {rule}")
        places = self.get_seq_length() + tokens_to_remove
        if places <= 0:
            self.reset()
            return
        lengths = self._counts[:, places].tolist()
        self._groups = [
            part for group in self._groups for part, _ in group.split_by([lengths[member] for member in group.members])
        ]
        for group in self._groups:
            group.session.truncate(lengths[group.members[0]])
        self._counts = self._counts[:, : places + 1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let context i continue from context ``beam_idx[i]``, as beam search needs."""
        order, groups = beam_idx.tolist(), []
        for group in self._groups:
            places = {member: number for number, member in enumerate(group.members)}
            members = [number for number, source in enumerate(order) if source in places]
            if members:
                groups.append(group.select(members, [places[order[number]] for number in members]))
        self._groups, self._counts = groups, self._counts[beam_idx]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only copies of these contexts: (b,) integers, or a bool for each context."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each context so often, one copy after the other."""
        numbers = torch.arange(self.batch_size, device=self._counts.device)
        self.reorder_cache(numbers.repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionCache:
        """Copy the sessions, but not the network."""
        memo |= {id(module): module for module in self._network.modules()}
        duplicate: SessionCache = object.__new__(type(self))
        vars(duplicate).update(copy.deepcopy(vars(self), memo))
        return duplicate


def _new_places(mask: Tensor, counts: Tensor, count: int) -> Tensor:
    """Check a mask against the cache's counts of tokens, and return the part of ``count`` new places, bool."""
    places = counts.shape[1] - 1
    if mask.shape[1] != places + count:
        rule = f"must be {places + count}, for all that {CACHE_NAME} holds and the new ones"
        raise ValueError(f"attention_mask: {mask.shape[1]} places: {rule}")
    mask = mask.bool()
    if bool((~mask[:, :places] & (counts.diff(dim=1) > 0)).any()):
        raise ValueError(f"attention_mask: padding where {CACHE_NAME} holds a token; use crop to remove tokens")
    return mask[:, places:]
