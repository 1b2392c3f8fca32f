"""Our attention inside models of transformers: ``attn_implementation="longstride"``.

transformers calls two functions. ``documents_of`` sees the padding and packing of a batch once per forward pass, and
replaces the mask of all pairs. ``attend`` gets its result in every layer, with queries, keys and values.

Letters: B batch, H heads of queries, K heads of keys, M queries, N keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from longstride.kernels import ConfigError, Problem, selected_attention, sparse_attention
from longstride.kernels.patterns import GROUP, Dense, Local, Pattern, declares_causal, pattern_from_json
from longstride.kernels.registry import registered_names
from longstride.kernels.selections import within_documents

NAME = "longstride"
FIELD = "longstride_pattern"  # of a model's configuration
EXAMPLE = '{"type": "fixed", "stride": 128, "summary": 32}'

# Options of transformers that change what attention computes, and why ours does not support them.
UNSUPPORTED = {
    "softcap": "scores are not capped",
    "s_aux": "there are no attention sinks",
    "sinks": "there are no attention sinks",
    "position_bias": "no bias is added to scores",
    "indices": "the pattern alone selects keys",
    "block_indices": "the pattern alone selects keys",
    "output_attentions": "block-sparse attention has no weights to return",
}


def register_attention(*, trust_code: bool = False) -> None:
    """Make ``attn_implementation="longstride"`` available to the models of transformers.

    A model's configuration needs ``longstride_pattern``: a pattern as JSON, or a list of patterns over which layers
    cycle. Calling this again only changes ``trust_code``.

    Args:
        trust_code: whether configurations, which may come from a hub, can name patterns of other packages.
    """
    AttentionInterface.register(NAME, partial(attend, trust_code=trust_code))
    AttentionMaskInterface.register(NAME, documents_of)


class Documents(NamedTuple):
    """The batch's restrictions on attention besides the pattern: separate documents and a window.

    Left padding is a document of its own. Right padding needs none, because no token attends to later ones.
    """

    starts: Tensor | None  # (B, N) int64, the first key of each key's document; None: one document
    first_query: int  # place of the first query among the keys
    first_key: int = 0  # position of the first key; above 0 where a cache has dropped earlier keys
    window: int | None = None  # most keys that a query attends to, including its own

    @classmethod
    def of_mask(cls, mask: Tensor | None, num_queries: int, num_keys: int) -> Documents:
        """Read the result of ``documents_of``; ConfigError for another mask."""
        if mask is None:
            return cls(None, num_keys - num_queries)
        if mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, num_keys + 3):
            raise _error("attention_mask", "a mask of all pairs; give (batch, positions) with zeros at padding")
        starts = mask[:, 0, 0, :num_keys]
        first_query, first_key, window = mask[0, 0, 0, num_keys:].tolist()
        return cls(starts if bool(starts.any()) else None, first_query, first_key, window or None)


def documents_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """Find the documents from what transformers makes a mask of, with O(N) evaluations of its mask function.

    Args:
        batch_size, q_length, kv_length: B, M and N.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: whether a query may attend to a key, for indices of batch, head, query and key.
        attention_mask: (B, positions), zeros at padding.
        local_size: window of sliding attention.
        use_vmap: whether the model adds its own mask function.
        device: of the result.
        options: used by other implementations.

    Returns:
        (B, 1, 1, N + 3) int64, the fields of ``Documents``. transformers only passes on masks with four axes unchanged.
        None: one document, whose last positions are the queries.

    Raises:
        ConfigError: attention is not causal, the model has its own mask, or padding stands between tokens.
    """
    if use_vmap:
        raise _error("attention_mask", "this model adds a mask of its own; give another attn_implementation")
    starts = torch.zeros(batch_size, kv_length, dtype=torch.int64, device=device)
    places = torch.arange(kv_length, device=device)
    if mask_function is not None and kv_length > 1:
        batch, head = torch.arange(batch_size, device=device)[:, None], places.new_zeros(1, 1)
        later, earlier = (places[1:] + kv_offset)[None], (places[:-1] + kv_offset)[None]
        if bool(mask_function(batch, head, earlier, later).any()):
            raise _error("is_causal", "queries attend to later keys; give another attn_implementation", False)
        # A key is the last of its document if its successor may not attend to it.
        is_first = ~mask_function(batch, head, later, earlier).expand(batch_size, -1)
        starts[:, 1:] = torch.where(is_first, places[1:], 0).cummax(1).values
    if attention_mask is not None:
        mask = attention_mask[:, kv_offset : kv_offset + kv_length]
        mask = F.pad(mask, (0, kv_length - mask.shape[1]))  # a static cache has room for more
        visible = mask.int()
        if bool((F.pad(visible, (1, 0)).diff(dim=1) == 1).sum(1).gt(1).any()):
            raise _error("attention_mask", "padding between tokens; pad prompts on the left")
        first = visible.argmax(1, keepdim=True)  # the first of the largest
        positions = torch.arange(mask.shape[1], device=mask.device)
        starts = torch.maximum(starts, torch.where(positions >= first, first, 0).to(device))
    first_query = int(q_offset) - kv_offset
    window = local_size if local_size is not None and local_size < kv_length else 0
    if not (kv_offset or window or first_query != kv_length - q_length or bool(starts.any())):
        return None
    numbers = starts.new_tensor([first_query, kv_offset, window]).expand(batch_size, -1)
    return torch.cat([starts, numbers], 1)[:, None, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    trust_code: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer under its pattern.

    Args:
        module: the layer, with the model's configuration.
        query: (B, H, M, D); key: (B, K, N, D); value: (B, K, N, Dv).
        attention_mask: the result of ``documents_of``.
        dropout, is_causal: only 0 and True are supported.
        scaling: factor of the scores, by default 1/sqrt(D).
        sliding_window: most keys that a query attends to.
        trust_code: whether the pattern may come from another package.
        options: other options of the model; those in ``UNSUPPORTED`` must be absent.

    Returns:
        (B, M, H, Dv), and None instead of attention weights.

    Raises:
        ConfigError: an option is not supported, or the configuration has no pattern.
    """
    refuse_unsupported(module, dropout, is_causal, options)
    count = key.shape[2]
    documents = Documents.of_mask(attention_mask, query.shape[2], count)
    windows = [size for size in (sliding_window, documents.window) if size is not None and size < count]
    pattern = _cut_to_window(_read_pattern(module, trust_code), min(windows, default=None), documents.first_key)
    if documents.starts is None:
        out = sparse_attention(query, key, value, pattern, scale=scaling, first_query=documents.first_query)
    elif query.shape[2] == count:
        patterns = [pattern.for_head(head) for head in range(query.shape[1])]
        out = selected_attention(query, key, value, within_documents(patterns, documents.starts), scale=scaling)
    else:
        out = _attend_by_document(query, key, value, pattern, documents.starts, documents.first_query, scaling)
    return out.transpose(1, 2).contiguous(), None


def refuse_unsupported(module: Any, dropout: float, is_causal: bool | None, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what transformers asks of attention and ours does not support."""
    if dropout:
        raise _error("attention dropout", "weights are not dropped; set the model's attention dropout to 0", dropout)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        rule = f"patterns are causal; give {type(module).__name__} another attn_implementation"
        raise _error("is_causal", rule, False)
    for name, reason in UNSUPPORTED.items():
        option = options.get(name)
        if option is not None and option is not False:
            shown = option if isinstance(option, int | float) else ...
            raise _error(name, f"{reason}; give another attn_implementation", shown)


def _attend_by_document(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, starts: Tensor, first_query: int, scale: float | None
) -> Tensor:
    """Compute queries after a cache, one context and document at a time."""
    contexts = []
    for context, begins in enumerate(starts[:, first_query : first_query + q.shape[2]].tolist()):
        runs, place = [], 0
        while place < len(begins):
            begin = begins[place]
            stop = place + begins[place:].count(begin)  # starts never decrease
            keys = slice(begin, first_query + stop)
            rows = q[context, None, :, place:stop], k[context, None, :, keys], v[context, None, :, keys]
            runs.append(sparse_attention(*rows, pattern, scale=scale, first_query=first_query + place - begin))
            place = stop
        contexts.append(torch.cat(runs, 2))
    return torch.cat(contexts)


def _read_pattern(module: Any, trust_code: bool) -> Pattern:
    """Return the pattern of a layer from the model's configuration."""
    value, path = getattr(module.config, FIELD, None), f"config.{FIELD}"
    if value is None:
        raise _error(path, f"missing; give a pattern, such as {EXAMPLE}")
    if isinstance(value, list):
        if not value:
            raise _error(path, f"must have at least one pattern, such as {EXAMPLE}", value)
        number = module.layer_idx % len(value)
        value, path = value[number], f"{path}[{number}]"
    kind = value.get("type") if isinstance(value, dict) else None
    if not trust_code and isinstance(kind, str) and (":" in kind or kind in registered_names(GROUP)):
        rule = "is from another package; call register_attention(trust_code=True) to run its code"
        raise _error(f"{path}.type", rule, kind)
    try:
        pattern = pattern_from_json(value)
    except ConfigError as error:
        raise error.under(path) from None
    if not declares_causal(pattern):
        raise _error(f"{path}.causal", "later keys are never read here; leave it out", False)
    return pattern


def _cut_to_window(pattern: Pattern, window: int | None, first_key: int) -> Pattern:
    """Return the pattern without keys beyond a window; ConfigError if it cannot be cut, or counts from lost keys."""
    if window is not None:
        if isinstance(pattern, Dense):
            pattern = Local(window)
        elif isinstance(pattern, Local) and pattern.dilation == 1:
            pattern = Local(min(window, pattern.window))
        else:
            advice = "give these layers a dense or local pattern, or the model sliding_window=None"
            raise _error("sliding_window", f"cannot be combined with {pattern}; {advice}", window)
    period = pattern.period()
    if first_key and (period is None or first_key % period):
        raise _error("sliding_window", f"its cache drops keys, from which {pattern} counts; give a local pattern")
    return pattern


def _error(path: str, rule: str, value: object = ...) -> ConfigError:
    return ConfigError(Problem(path, rule, value))
