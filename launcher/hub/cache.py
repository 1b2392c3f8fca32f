"""The cache of transformers: what a batch of contexts of any lengths has behind it.

Letters: B contexts of the batch, n new places, N places in all, V vocabulary. A place holds a token, padding or a
start; of these the network knows tokens alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from longstride.launcher.hub.alignment import align
from longstride.launcher.hub.configuration import Specials
from longstride.launcher.hub.rows import all_rows
from longstride.sparse_model import Session, SparseTransformer

# The argument and the output that hold it: "cache" from transformers 5.24 on, "past_key_values" before.
CACHE_NAME = [field.name for field in dataclasses.fields(CausalLMOutputWithPast)][2]


class _Group(NamedTuple):
    """Contexts of one length, which go on together."""

    members: list[int]  # numbers of its contexts in the batch
    session: Session

    def selected(self, members: list[int], sources: Sequence[int]) -> _Group:
        """Contexts ``members`` of a batch, each a copy of the one at a place among these; in place where it can be."""
        order = torch.tensor(sources, device=self.session.model.embedding.start.device)
        if len(sources) != self.session.batch:
            return _Group(members, self.session.selected(order))
        if list(sources) != list(range(self.session.batch)):
            self.session.rearrange(order)
        return _Group(members, self.session)

    def parts(self, keys: Sequence[int]) -> list[tuple[_Group, int]]:
        """Its contexts by a number that each has, with that; itself where all have the same."""
        found = []
        for key in sorted(set(keys)):
            places = [place for place, each in enumerate(keys) if each == key]
            found.append((self.selected([self.members[place] for place in places], places), key))
        return found

    def next_logits(self) -> Tensor:
        """Of what comes after the last token, (b, V); NaN behind a full context."""
        session = self.session
        config = session.model.config
        if session.position < config.context:
            return session.logits.clone()
        like = session.model.embedding.start
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.full((session.batch, config.vocabulary), torch.nan, dtype=wide, device=like.device)

    def take(self, tokens: Tensor, keep: int) -> Tensor:
        """Goes on behind tokens (b, n), n from 1; logits after each of the last ``keep``, 0 for all: (b, ·, V)."""
        if tokens.shape[1] > 1:
            return self.session.extend(tokens, keep).clone()
        self.session.append(tokens[:, 0])  # as all who sample do: with the same bits
        return self.next_logits()[:, None]


class SessionCache:
    """What transformers hands from step to step: a session for all contexts of one length.

    It is empty at first. A step that has padding for some contexts alone, as where they are done, parts them from the
    others. So every context has the tokens that it has alone, and takes the steps that it takes alone. Contexts of a
    session share products, so their logits are those alone within rounding.
    """

    is_compileable = False
    is_croppable = True
    is_linear = (False,)  # not a recurrence alone: transformers hands on the tokens that are not held
    layers: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, network: SparseTransformer) -> None:
        self._network = network
        self._groups: list[_Group] = []
        self._places = 0
        # (B, p): tokens of each context up to each of the first p places; behind those, every place holds a token.
        self._counts: Tensor | None = None

    def goes_on_with(self, network: SparseTransformer) -> bool:
        """Whether its own network, which computes its steps, is this one, or has the same weights, as a copy has."""
        if self._network._modules is network._modules:
            return True
        own, given = self._network.state_dict(), network.state_dict()
        if self._network.config != network.config or own.keys() != given.keys():
            return False
        pairs = [(tensor, given[name]) for name, tensor in own.items()]
        return all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs)

    def extend(self, tokens: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        """Takes tokens behind those that it holds; logits of what comes after each of the last ``keep`` places.

        Args:
            tokens: (B, n) integers, padding and starts among them.
            mask: (B, N), zeros at padding, of all places that it then holds.
            keep: how many logits are asked for; 0 for all.

        Returns:
            (B, n, V), or less by ``keep``; (B, 1, V), the first token's, where nothing is held or given. NaN behind a
            full context.

        Raises:
            ValueError: another batch or mask, padding between the tokens, or no room.
        """
        batch, count = tokens.shape
        if self._groups and batch != self.batch_size:
            rule = f"{CACHE_NAME} holds {self.batch_size}; batch_repeat_interleave and batch_select_indices change that"
            raise ValueError(f"input_ids: {batch} contexts: {rule}")
        mask = None if mask is None else self._of_new(mask, count)
        specials = Specials.of(self._network.config.vocabulary)
        unusual = (tokens < 0) | (tokens >= specials.start)
        if mask is not None:
            unusual = unusual | ~mask
        apart = bool(unusual.any())
        if not self._groups or not self._places:
            return self._begun(tokens, mask, keep, specials, apart)
        if apart:
            return self._apart(tokens, mask, specials)[:, -keep:]
        self._require_room([count] * batch)
        if not count:
            return tokens.new_empty(batch, 0, specials.start, dtype=self._groups[0].next_logits().dtype)
        found = []
        for group in self._groups:
            own = tokens if len(self._groups) == 1 else tokens[group.members]
            found.append((group.members, group.take(own, keep)))
        self._places += count
        return self._gathered(found)

    def _of_new(self, mask: Tensor, count: int) -> Tensor | None:
        """The new places of a mask, bool; None where they are tokens."""
        whole = self._places + count
        if mask.shape[1] != whole:
            rule = f"must be {whole}, for all that {CACHE_NAME} holds and the new ones"
            raise ValueError(f"attention_mask: {mask.shape[1]} places: {rule if self._places else f'must be {whole}'}")
        mask = mask.bool()
        if bool(mask.all()):
            return None
        if self._places:
            held = self._counted()
            if bool((~mask[:, : self._places] & (held.diff(prepend=held.new_zeros(len(held), 1)) > 0)).any()):
                rule = f"padding where {CACHE_NAME} holds a token; crop takes tokens back"
                raise ValueError(f"attention_mask: {rule}")
        return mask[:, self._places :]

    def _begun(self, tokens: Tensor, mask: Tensor | None, keep: int, specials: Specials, apart: bool) -> Tensor:
        """The first tokens, by a pass for each length; all logits by one more."""
        batch, count = tokens.shape
        moved, lengths, counts = tokens, [count] * batch, None
        if apart:
            aligned = align(tokens, mask, specials)
            moved, lengths, counts = aligned.tokens, aligned.lengths.tolist(), aligned.rows
        self._require_room(lengths)
        self._groups, self._places, self._counts = [], count, counts
        for length in sorted(set(lengths)):
            members = [number for number, each in enumerate(lengths) if each == length]
            session = Session(self._network, len(members))
            session.prefill(moved[members, :length] if apart else moved)
            self._groups.append(_Group(members, session))
        if keep == 1 or not count:
            return self._gathered([(group.members, group.next_logits()[:, None]) for group in self._groups])
        return all_rows(self._network, tokens, mask, specials, keep=keep).rows

    def _apart(self, tokens: Tensor, mask: Tensor | None, specials: Specials) -> Tensor:
        """Goes on where some contexts have padding, or fewer tokens than others; all logits (B, n, V)."""
        aligned = align(tokens, mask, specials)
        held = self._counted()
        started = ((tokens == specials.start) & (True if mask is None else mask)).any(1)
        if bool((started & (held[:, -1] > 0)).any()):
            rule = f"behind tokens that {CACHE_NAME} holds; it stands first or not at all"
            raise ValueError(f"input_ids: the start, {specials.start}, {rule}")
        lengths = aligned.lengths.tolist()
        self._require_room(lengths)
        groups, found = [], []
        for group in self._groups:
            for part, length in group.parts([lengths[member] for member in group.members]):
                rows = part.next_logits()[:, None]  # behind what is held
                if length:
                    rows = torch.cat([rows, part.take(aligned.tokens[part.members, :length], 0)], 1)
                index = aligned.rows[part.members][..., None].expand(-1, -1, rows.shape[2])
                found.append((part.members, rows.gather(1, index)))
                groups.append(part)
        self._groups = groups
        self._counts = torch.cat([held, held[:, -1:] + aligned.rows], 1)
        self._places += tokens.shape[1]
        return self._gathered(found)

    def _counted(self) -> Tensor:
        """Tokens of each context up to each of all places, (B, places) with at least one."""
        known = self._counts
        if known is None:
            device = self._network.embedding.start.device
            known = torch.zeros(self.batch_size, 0, dtype=torch.int64, device=device)
        last = known[:, -1:] if known.shape[1] else known.new_zeros(len(known), 1)
        more = torch.arange(1, self._places - known.shape[1] + 1, device=known.device)
        return torch.cat([known, last + more], 1)

    def _require_room(self, counts: list[int]) -> None:
        """Raises ValueError unless each context has room for so many tokens more."""
        context = self._network.config.context
        held = {member: group.session.position for group in self._groups for member in group.members}
        most = max(held.get(number, 0) + count for number, count in enumerate(counts))
        if most > context:
            raise ValueError(f"{most} tokens: more than the model's context of {context}; give {context} at most")

    def _gathered(self, found: list[tuple[list[int], Tensor]]) -> Tensor:
        """Logits (b, n, V) of groups in the order of the batch."""
        if len(found) == 1:
            return found[0][1]
        logits = found[0][1].new_empty(self.batch_size, *found[0][1].shape[1:])
        for members, rows in found:
            logits[members] = rows
        return logits

    @property
    def batch_size(self) -> int:
        """How many contexts it holds."""
        return sum(len(group.members) for group in self._groups)

    @property
    def most_tokens(self) -> int:
        """Of its longest context."""
        return max((group.session.position for group in self._groups), default=0)

    @property
    def is_initialized(self) -> bool:
        """Whether it holds any."""
        return bool(self._groups)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many places it holds, those of padding too."""
        return self._places

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """How many tokens there is room for: the model's context."""
        return self._network.config.context

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Nothing: every token can be taken back."""

    def reset(self) -> None:
        """Empties it."""
        self._groups, self._places, self._counts = [], 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last places back: -3 for three of them, as transformers has it.

        Raises:
            ValueError: a number above 0.
        """
        if tokens_to_remove > 0:
            rule = f"must be 0 or less: {-tokens_to_remove} takes {tokens_to_remove} places back"
            raise ValueError(f"crop: tokens_to_remove={tokens_to_remove}: {rule}")
        kept = self._places + tokens_to_remove
        if kept <= 0:
            self.reset()
        elif tokens_to_remove:
            self._keep(kept)

    def _keep(self, kept: int) -> None:
        """Takes back all places but the first so many, from 1."""
        lengths = self._counted()[:, kept - 1].tolist()
        self._groups = [
            part
            for group in self._groups
            for part, _ in group.parts([group.session.position - lengths[member] for member in group.members])
        ]
        for group in self._groups:
            group.session.truncate(lengths[group.members[0]])
        self._places = kept
        if self._counts is not None:
            self._counts = self._counts[:, :kept]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: context i goes on from what was context ``beam_idx[i]``."""
        if len(self._groups) == 1 and len(beam_idx) == self.batch_size:  # nothing to wait for
            self._groups[0].session.rearrange(beam_idx)
        else:
            order = beam_idx.tolist()
            groups = []
            for group in self._groups:
                place = {member: number for number, member in enumerate(group.members)}
                members = [number for number, source in enumerate(order) if source in place]
                if members:
                    groups.append(group.selected(members, [place[order[number]] for number in members]))
            self._groups = groups
        if self._counts is not None:
            self._counts = self._counts[beam_idx]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps copies of these contexts alone, (b,) integers or a bool for each."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each context so often, one copy after the other."""
        numbers = torch.arange(self.batch_size, device=self._network.embedding.start.device)
        self.reorder_cache(numbers.repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionCache:
        """With sessions of its own, on the same network."""
        memo |= {id(module): module for module in self._network.modules()}
        other: SessionCache = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other
