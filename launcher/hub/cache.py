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

from longstride.launcher.hub.configuration import Specials
from longstride.launcher.hub.rows import align, all_rows
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
        """Return the logits of the next token, (b, V); NaN after a full context."""
        session = self.session
        config = session.model.config
        if session.position < config.context:
            return session.logits.clone()
        like = session.model.embedding.start
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.full((session.batch, config.vocabulary), torch.nan, dtype=wide, device=like.device)

    def take(self, tokens: Tensor, keep: int) -> Tensor:
        """Append tokens (b, n), n ≥ 1; return logits after each of the last ``keep``, or all for 0: (b, ·, V)."""
        if tokens.shape[1] > 1:
            return self.session.extend(tokens, keep).clone()
        self.session.append(tokens[:, 0])  # the same call as in sampling, for the same bits
        return self.next_logits()[:, None]


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

    def __init__(self, network: SparseTransformer) -> None:
        self._network = network
        self._groups: list[_Group] = []
        self._places = 0
        # (B, p): tokens of each context up to each of the first p places. Every later place has a token.
        self._counts: Tensor | None = None

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
        if self._groups and batch != self.batch_size:
            rule = f"{CACHE_NAME} holds {self.batch_size}; batch_repeat_interleave and batch_select_indices change that"
            raise ValueError(f"input_ids: {batch} contexts: {rule}")
        mask = None if mask is None else self._check_mask(mask, count)
        specials = Specials.of(self._network.config.vocabulary)
        unusual = (tokens < 0) | (tokens >= specials.start)
        if mask is not None:
            unusual = unusual | ~mask
        is_ragged = bool(unusual.any())
        if not self._groups or not self._places:
            return self._begin(tokens, mask, keep, specials, is_ragged)
        if is_ragged:
            return self._extend_ragged(tokens, mask, specials)[:, -keep:]
        self._require_room([count] * batch)
        if not count:
            return tokens.new_empty(batch, 0, specials.start, dtype=self._groups[0].next_logits().dtype)
        logits = []
        for group in self._groups:
            rows = tokens if len(self._groups) == 1 else tokens[group.members]
            logits.append((group.members, group.take(rows, keep)))
        self._places += count
        return self._gather(logits)

    def _check_mask(self, mask: Tensor, count: int) -> Tensor | None:
        """Check a mask, and return the part of the new places, bool; None if all of them are tokens."""
        total = self._places + count
        if mask.shape[1] != total:
            rule = f"must be {total}, for all that {CACHE_NAME} holds and the new ones"
            raise ValueError(f"attention_mask: {mask.shape[1]} places: {rule if self._places else f'must be {total}'}")
        mask = mask.bool()
        if bool(mask.all()):
            return None
        if self._places:
            counts = self._token_counts()
            if bool((~mask[:, : self._places] & (counts.diff(prepend=counts.new_zeros(len(counts), 1)) > 0)).any()):
                rule = f"padding where {CACHE_NAME} holds a token; use crop to remove tokens"
                raise ValueError(f"attention_mask: {rule}")
        return mask[:, self._places :]

    def _begin(self, tokens: Tensor, mask: Tensor | None, keep: int, specials: Specials, is_ragged: bool) -> Tensor:
        """Take the first tokens in a pass for each length; if all logits are needed, compute them in one more."""
        batch, count = tokens.shape
        rows, lengths, counts = tokens, [count] * batch, None
        if is_ragged:
            aligned = align(tokens, mask, specials)
            rows, lengths, counts = aligned.tokens, aligned.lengths.tolist(), aligned.rows
        self._require_room(lengths)
        self._groups, self._places, self._counts = [], count, counts
        for length in sorted(set(lengths)):
            members = [number for number in range(batch) if lengths[number] == length]
            session = Session(self._network, len(members))
            session.prefill(rows[members, :length] if is_ragged else rows)
            self._groups.append(_Group(members, session))
        if keep == 1 or not count:
            return self._gather([(group.members, group.next_logits()[:, None]) for group in self._groups])
        return all_rows(self._network, tokens, mask, specials, keep=keep).rows

    def _extend_ragged(self, tokens: Tensor, mask: Tensor | None, specials: Specials) -> Tensor:
        """Extend contexts of which some have padding or fewer tokens than others; return all logits (B, n, V)."""
        aligned = align(tokens, mask, specials)
        counts = self._token_counts()
        started = ((tokens == specials.start) & (True if mask is None else mask)).any(1)
        if bool((started & (counts[:, -1] > 0)).any()):
            rule = f"after tokens that {CACHE_NAME} holds; it must be first or absent"
            raise ValueError(f"input_ids: the start, {specials.start}, {rule}")
        lengths = aligned.lengths.tolist()
        self._require_room(lengths)
        groups, logits = [], []
        for group in self._groups:
            for part, length in group.split_by([lengths[member] for member in group.members]):
                rows = part.next_logits()[:, None]  # after the tokens in the cache
                if length:
                    rows = torch.cat([rows, part.take(aligned.tokens[part.members, :length], 0)], 1)
                index = aligned.rows[part.members][..., None].expand(-1, -1, rows.shape[2])
                logits.append((part.members, rows.gather(1, index)))
                groups.append(part)
        self._groups = groups
        self._counts = torch.cat([counts, counts[:, -1:] + aligned.rows], 1)
        self._places += tokens.shape[1]
        return self._gather(logits)

    def _token_counts(self) -> Tensor:
        """Return the number of each context's tokens up to each place, (B, places) with at least one place."""
        counts = self._counts
        if counts is None:
            device = self._network.embedding.start.device
            counts = torch.zeros(self.batch_size, 0, dtype=torch.int64, device=device)
        last = counts[:, -1:] if counts.shape[1] else counts.new_zeros(len(counts), 1)
        later = torch.arange(1, self._places - counts.shape[1] + 1, device=counts.device)
        return torch.cat([counts, last + later], 1)

    def _require_room(self, counts: list[int]) -> None:
        """Raise ValueError unless each context has room for so many more tokens."""
        context = self._network.config.context
        lengths = {member: group.session.position for group in self._groups for member in group.members}
        most = max(lengths.get(number, 0) + count for number, count in enumerate(counts))
        if most > context:
            raise ValueError(f"{most} tokens: more than the model's context of {context}; give {context} at most")

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
        return self._places

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the capacity in tokens: the model's context."""
        return self._network.config.context

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Do nothing: every token can be removed."""

    def reset(self) -> None:
        """Remove all contexts."""
        self._groups, self._places, self._counts = [], 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last places: -3 removes three, as in transformers. ValueError for numbers above 0."""
        if tokens_to_remove > 0:
            rule = f"must be 0 or less: {-tokens_to_remove} removes {tokens_to_remove} places"
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove}: {rule}")
        places = self._places + tokens_to_remove
        if places <= 0:
            self.reset()
        if places <= 0 or not tokens_to_remove:
            return
        lengths = self._token_counts()[:, places - 1].tolist()
        self._groups = [
            part
            for group in self._groups
            for part, _ in group.split_by([group.session.position - lengths[member] for member in group.members])
        ]
        for group in self._groups:
            group.session.truncate(lengths[group.members[0]])
        self._places = places
        if self._counts is not None:
            self._counts = self._counts[:, :places]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let context i continue from context ``beam_idx[i]``, as beam search needs."""
        if len(self._groups) == 1 and len(beam_idx) == self.batch_size:  # needs no wait for the device
            self._groups[0].session.rearrange(beam_idx)
        else:
            order = beam_idx.tolist()
            groups = []
            for group in self._groups:
                places = {member: number for number, member in enumerate(group.members)}
                members = [number for number, source in enumerate(order) if source in places]
                if members:
                    groups.append(group.select(members, [places[order[number]] for number in members]))
            self._groups = groups
        if self._counts is not None:
            self._counts = self._counts[beam_idx]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only copies of these contexts: (b,) integers, or a bool for each context."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each context so often, one copy after the other."""
        numbers = torch.arange(self.batch_size, device=self._network.embedding.start.device)
        self.reorder_cache(numbers.repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionCache:
        """Copy the sessions, but not the network."""
        memo |= {id(module): module for module in self._network.modules()}
        duplicate: SessionCache = object.__new__(type(self))
        vars(duplicate).update(copy.deepcopy(vars(self), memo))
        return duplicate
