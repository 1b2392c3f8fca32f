"""Learned indexers in models of transformers: each query then attends to the keys that its layer's indexer chooses.

The equations are those of the mixer "indexed" (DeepSeek-AI 2025, arXiv 2512.02556, section 2.1). A forward pre-hook of
each attention layer computes the index from the layer's input, and ``attend`` reads it.

Letters: B batch, H heads of queries, K heads of keys, M queries, N keys, D head width, J heads of the indexer of width
I, R rotated channels of the model's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from longstride.kernels import ConfigError, Problem, attend_listed, sparse_attention
from longstride.kernels.indexed import choose_keys, indexed_attention, indexer_loss
from longstride.kernels.patterns import Dense
from longstride.kernels.selections import listed_positions
from longstride.launcher.hub.attention import Documents, documents_of, refuse_unsupported
from longstride.launcher.hub.cache import CACHE_NAME

NAME = "longstride_indexed"
FIELD = "longstride_indexer"  # of a model's configuration


class Indexer(nn.Module):
    """Scores each key of a query by Σ_j w_j · ReLU(q_j · k), with one k a position (equation 1).

    q and k are rotated by the model's own angles, in halves: by all of them, or with I < R by I/2, evenly spaced. Rows
    are detached, so the model learns nothing from the indexer's loss.
    """

    def __init__(self, width: int, index_heads: int, index_width: int) -> None:
        super().__init__()
        self.widths = [index_heads * index_width, index_width, index_heads]
        self.projection = nn.Linear(width, sum(self.widths), bias=False)
        self.index: tuple[Tensor, Tensor, Tensor] | None = None  # from the hook, until the layer attends
        self.loss: Tensor | None = None  # of the last forward pass, until ``sum_indexer_losses``

    def forward(self, rows: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, M, J, I), k (B, M, I) and w (B, M, J) of rows (B, M, C); cosines and sines are (B, M, R)."""
        q, k, weights = self.projection(rows.detach()).split(self.widths, -1)
        channels, width, heads = self.widths
        q, k = q.unflatten(-1, (heads, width)), k[..., None, :]
        if angles is not None:
            count = min(width, angles[0].shape[-1]) // 2
            chosen = torch.arange(count, device=q.device) * (angles[0].shape[-1] // 2) // count
            cosines, sines = (x[..., None, chosen] for x in angles)
            q, k = (
                torch.cat([a * cosines - b * sines, b * cosines + a * sines, unrotated], -1)
                for a, b, unrotated in (x.split([count, count, width - 2 * count], -1) for x in (q, k))
            )
        return q, k[..., 0, :], weights * channels**-0.5


def add_indexers(
    model: Any, keys: int, *, block: int = 1, window: int = 1, index_heads: int = 4, index_width: int = 32
) -> None:
    """Give each attention layer of a model a new indexer, and select ``attn_implementation="longstride_indexed"``.

    The options are saved as ``model.config.longstride_indexer``; its keys, block and window may change at any time.

    Args:
        model: of transformers, with causal attention.
        keys: keys that a query reads at most, the window counted. Contexts of at most as many have dense attention.
        block: positions that are chosen together, by their highest score; divides keys.
        window: last positions, the query's own counted, that it reads always.
        index_heads, index_width: J and an even I.

    Raises:
        ConfigError: an option is wrong, or the model has no such layers, or has indexers.
    """
    options = {"keys": keys, "block": block, "window": window, "index_heads": index_heads, "index_width": index_width}
    _check(options, "")
    layers = [layer for layer in model.modules() if hasattr(layer, "layer_idx") and hasattr(layer, "is_causal")]
    if not layers or any(hasattr(layer, "indexer") for layer in layers):
        rule = "has indexers; change config.longstride_indexer" if layers else "has no attention of AttentionInterface"
        raise _error("model", rule, type(model).__name__)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _documents_without_padding)
    for layer in layers:
        weight = next(layer.parameters())
        layer.indexer = Indexer(layer.config.hidden_size, index_heads, index_width).to(weight)
        layer.register_forward_pre_hook(_compute_index, with_kwargs=True)
    setattr(model.config, FIELD, options)
    model.set_attn_implementation(NAME)


def load_indexers(model: Any, folder: str | Path) -> None:
    """Add the indexers that ``save_pretrained(folder)`` wrote to the model that ``from_pretrained(folder)`` read."""
    add_indexers(model, **getattr(model.config, FIELD))
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys() if ".indexer." in name}  # noqa: SIM118
    missing = [name for name in model.load_state_dict(weights, strict=False).missing_keys if ".indexer." in name]
    if missing:
        raise _error(str(folder), f"has no {missing[0]}; give a folder that save_pretrained wrote with indexers")


def sum_indexer_losses(model: Any) -> Tensor:
    """Return the sum of the layers' losses in the last forward pass, and forget them (equations 3 and 4).

    A layer's loss is KL(p ‖ softmax(scores)) over the keys that a query read, averaged over queries, where p are its
    attention weights, averaged over heads. Only indexers have its gradient.

    Raises:
        ConfigError: there was no forward pass in training mode.
    """
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    losses = [indexer.loss for indexer in indexers if indexer.loss is not None]
    if not losses or len(losses) < len(indexers):
        raise _error(
            "model", "has no losses of indexers; call model.train() and the model before", type(model).__name__
        )
    for indexer in indexers:
        indexer.loss = None
    return torch.stack(losses).sum()


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer to the keys that its indexer chose; arguments as ``attention.attend`` has."""
    refuse_unsupported(module, dropout, is_causal, options)
    indexer = getattr(module, "indexer", None)
    if not isinstance(indexer, Indexer) or indexer.index is None:
        raise _error("attn_implementation", "this model has no indexers; call add_indexers", NAME)
    index, indexer.index = indexer.index, None
    keys, block, window = _check(getattr(module.config, FIELD), f"config.{FIELD}.")
    num_keys = key.shape[2]
    first = num_keys - query.shape[2]
    documents = Documents.of_mask(attention_mask, query.shape[2], num_keys)
    if documents.starts is not None:
        raise _error("position_ids", "indexers read one text a context; do not pack texts")
    for size in (sliding_window, documents.window):
        if size is not None and size < num_keys:
            raise _error("sliding_window", "must be None, as indexers choose among all keys", size)
    learns = module.training and torch.is_grad_enabled() and not first
    if num_keys <= keys:
        out = sparse_attention(query, key, value, Dense(), scale=scaling, first_query=first)
        if learns:  # the loss divides scores by √D
            factor = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
            indexer.loss = indexer_loss(*index, (query.detach() * factor, key.detach()))
        return out.transpose(1, 2).contiguous(), None
    numbers = choose_keys(*index, count=keys // block, block=block, window=window, first=first)
    if first:
        places = listed_positions(numbers, block, torch.arange(first, num_keys, device=query.device))
        places = places[:, None].expand(-1, query.shape[1], -1, -1)
        steps = range(query.shape[2])
        out = torch.stack([attend_listed(query[:, :, n], key, value, places[:, :, n], scale=scaling) for n in steps], 2)
    else:
        out = indexed_attention(query, key, value, numbers, block=block, scale=scaling, return_weights=learns)
        if learns:
            out, target = out
            attention = query.detach(), key.detach()
            indexer.loss = indexer_loss(*index, attention, numbers=numbers, block=block, target=target.detach())
    return out.transpose(1, 2).contiguous(), None


def _compute_index(layer: Any, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Compute a layer's index from its input, and add the new keys to its cache."""
    if layer.config._attn_implementation != NAME:
        return
    rows = inputs[0] if inputs else options["hidden_states"]
    q, k, weights = layer.indexer(rows, options.get("position_embeddings"))
    cache = options.get(CACHE_NAME)
    if cache is not None:
        number = layer.layer_idx
        while len(cache.layers) <= number and cache.layer_class_to_replicate is DynamicLayer:
            cache.layers.append(DynamicLayer())
        if type(cache.layers[number]) is DynamicLayer and not cache.get_seq_length(number):
            cache.layers[number] = DynamicIndexedLayer()
        if type(cache.layers[number]) is not DynamicIndexedLayer:
            rule = f"{type(cache.layers[number]).__name__} has no place for keys of indexers; give a new DynamicCache"
            raise _error(CACHE_NAME, rule)
        k = cache.update_indexer(k, number)
    layer.indexer.index = q, k, weights


def _documents_without_padding(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return what ``documents_of`` does; ConfigError if the batch has padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise _error("attention_mask", "indexers read no padding; give texts of equal length, or one at a time")
    return documents_of(attention_mask=attention_mask, **options)


def _check(options: Mapping[str, int], path: str) -> tuple[int, int, int]:
    """Return keys, block and window; ConfigError names a wrong option."""
    for name, number in options.items():
        if type(number) is not int or number < 1:
            raise _error(path + name, "must be a positive integer", number)
    keys, block, window = options["keys"], options["block"], options["window"]
    if keys % block:
        nearest = max(1, round(keys / block)) * block
        raise _error(f"{path}keys", f"must be a multiple of block={block}; nearest {nearest}", keys)
    most = (1 + -(-(window - 1) // block)) * block
    if most > keys:
        raise _error(f"{path}window", f"may lie in blocks of {most} positions; take keys of at least that many", window)
    if options["index_width"] % 2:
        raise _error(
            f"{path}index_width", f"must be even; nearest {options['index_width'] + 1}", options["index_width"]
        )
    return keys, block, window


def _error(path: str, rule: str, value: object = ...) -> ConfigError:
    return ConfigError(Problem(path, rule, value))
