"""An exported model as a class of transformers.

Place i of transformers has the logits of the token after token i. The network has them in row i + 1, since its row i
predicts token i; n tokens need n + 1 rows. Row 0, of the first token, goes to a start before it, and to padding.

Letters: B batch, n tokens, C width, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from longstride.kernels import ConfigError
from longstride.launcher.hub.cache import CACHE_NAME, SessionCache
from longstride.launcher.hub.configuration import LongstrideConfig, Specials
from longstride.launcher.hub.generation import SessionGenerationMixin
from longstride.launcher.hub.rows import all_rows
from longstride.launcher.models import DTYPES, Fingerprint
from longstride.sparse_model import ModelConfig, SparseTransformer

_IGNORED = -100  # a label without loss
_logger = logging.get_logger(__name__)


class LongstrideForCausalLM(PreTrainedModel, SessionGenerationMixin):
    """A Sparse Transformer whose tensors have the same names as in an export."""

    config_class = LongstrideConfig
    config: LongstrideConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # Trainer then passes the number of labels in a step
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ResidualBlock", "ReversibleBlock"]

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Trainer and pipelines look up in this table that labels are shifted by one place.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(config.model_type, "LongstrideForCausalLM")
        if not config.trust_code and (types := ModelConfig.foreign_types(config.model or {})):
            rule = "is from another package; install it, and give from_pretrained trust_code=True to run its code"
            raise ConfigError.at("type", types[0], rule)
        # Not the run's attention backend, since the device is not known yet.
        network_config = ModelConfig.model_validate(config.model).model_copy(update={"backend": "auto"})
        with torch.random.fork_rng(devices=[]):  # the drawn values are not used
            network = SparseTransformer(network_config, initialize=False)
        # The network's parts are the submodules. As a submodule itself, it would prefix the names of its tensors.
        self.__dict__["_skeleton"] = {name: value for name, value in vars(network).items() if name != "_modules"}
        self.embedding, self.blocks, self.norm, self.logits = (
            network.embedding, network.blocks, network.norm, network.logits
        )  # fmt: skip
        if network.logits.embedding is not None:  # transformers places and offloads a tied tensor by both its names
            self.logits.weight = self.embedding.tokens.weight
            self._tied_weights_keys = {"logits.weight": "embedding.tokens.weight"}
        self._first_values: dict[int, Tensor] = {}  # by the id of the tensor that still needs them
        self._keep_in_fp32_modules_strict = [name for name, _ in network.named_buffers()]
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def network(self) -> SparseTransformer:
        """The network of the current submodules, which adapters and other tools may have replaced."""
        network = object.__new__(SparseTransformer)
        vars(network).update(self._skeleton, _modules=self._modules, training=self.training)
        return network

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Give tensors of a module that were not loaded the values of a new network."""
        if not any(module is submodule for submodule in self.modules()):
            super()._init_weights(module)
            return
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        missing = [tensor for tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
        if missing and not self._first_values:
            new, mine = (
                dict([*model.named_parameters(), *model.named_buffers()])
                for model in (SparseTransformer(self.network.config), self)
            )
            self._first_values = {
                id(mine[name]): tensor
                for name, tensor in new.items()
                if not getattr(mine[name], "_is_hf_initialized", False)
            }
        for tensor in missing:
            tensor.data.copy_(self._first_values.pop(id(tensor)).data)
            tensor.__dict__["_is_hf_initialized"] = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LongstrideForCausalLM:
        """Apply like torch, but keep fp32 buffers in fp32, also in a model of 16 bits."""
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self.get_buffer(name)
            if now.dtype.itemsize < buffer.dtype.itemsize:
                now.data = buffer.to(now.device)
        return self

    @classmethod
    def is_remote_code(cls) -> bool:
        """Return False: the stub of an export leads here, so there is no code to save with a model."""
        return False

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Save like transformers. The result is an export, and its config.json has the weights' fingerprint.

        If these are not the loaded weights, config.json no longer names their run and step. When several files are
        written, an older single file is removed, because it would be read instead.
        """
        if not getattr(self, "_hf_peft_config_loaded", False):  # adapters are saved alone
            all_tensors, digest = self.state_dict(), None
            tensors = all_tensors if state_dict is None else state_dict
            tied = self.all_tied_weights_keys  # second names, which transformers does not write
            tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
            is_complete = tensors.keys() == all_tensors.keys() - tied and not any(t.is_meta for t in tensors.values())
            if is_main_process and is_complete and all(t.dtype in DTYPES.values() for t in tensors.values()):
                fingerprint = Fingerprint(self.config.model or {})
                for name, tensor in tensors.items():
                    fingerprint.add(name, tensor.cpu())
                digest = fingerprint.hexdigest()
            if digest != getattr(self.config, "fingerprint", None):
                for name in ("fingerprint", "origin"):
                    self.config.__dict__.pop(name, None)
                if digest is not None:
                    self.config.fingerprint = digest
        single_file, index = (Path(save_directory) / name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        before = [path.stat().st_mtime_ns if path.is_file() else None for path in (single_file, index)]
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)
        after = [path.stat().st_mtime_ns if path.is_file() else None for path in (single_file, index)]
        if is_main_process and after[0] is not None and after[0] == before[0] and after[1] != before[1]:
            single_file.unlink()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Switch it like transformers, for blocks that are not its layers."""
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        self._recomputed_every = every_n_layers

    def get_input_embeddings(self) -> Any:
        """Return the token embedding."""
        return self.embedding.tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the token embedding."""
        self.embedding.tokens = value

    def get_output_embeddings(self) -> Any:
        """Return the projection to logits."""
        return self.logits

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the projection to logits."""
        self.logits = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> torch.nn.Module:
        """Return the unchanged embedding, which suffices for all tokens of the tokenizer.

        Raises:
            ValueError: for another number of tokens.
        """
        tokens = self.network.config.vocabulary
        count = tokens if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of:
            count = -(-count // pad_to_multiple_of) * pad_to_multiple_of
        most = Specials.of(tokens).padding + 1
        if not tokens <= count <= most:
            rule = f"this model has {tokens} tokens, and no weights for the {most - tokens} special ones"
            raise ValueError(f"new_num_tokens={count}: {rule}; give {tokens} to {most}, or train another vocabulary")
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Compute the logits of the token after each of ``input_ids``.

        Args:
            input_ids: (B, n), n ≥ 0: tokens below V, optionally a start before the first, padding on either side. With
                ``cache``, the tokens after those in it.
            attention_mask: (B, n), zeros at padding; with ``cache``, of all tokens including those in it.
            position_ids: (B, n) or (1, n), must equal the default: counted from 0, with or without padding.
            cache: the cache of an earlier call.
            inputs_embeds: (B, n, C), rows of ``get_input_embeddings()``, replaces ``input_ids``.
            labels: (B, n), usually ``input_ids``; -100, the start, the end and padding are ignored.
            use_cache: whether to return ``cache``.
            output_attentions: refused, since block-sparse attention never has complete rows of weights.
            output_hidden_states: whether to return the input of each block and the normalised output of the last.
            return_dict: False for a tuple.
            logits_to_keep: how many of the last logits to return, 0 for all; or their places, as in transformers.
            num_items_in_batch: number of labels in all batches of a step; the loss is then this batch's share.
            past_key_values: the name of ``cache`` in transformers below 5.24.
            others: ``shift_labels`` (B, n), the label after each place, replaces ``labels``. It is not a parameter,
                because Trainer would then require both. Arguments for other models must be None.

        Returns:
            Logits (B, n, V), at least fp32; (B, 1, V) for the first token if n is 0. NaN after a full context. The loss
            is in nats a token, in training with the auxiliary losses of the model's parts. Without a start it omits the
            first token.

        Raises:
            ValueError: an argument is missing or not supported, or there are more tokens than the context holds.
        """
        shift_labels = others.pop("shift_labels", None)
        unsupported = [name for name, value in others.items() if value is not None]
        if unsupported:
            raise ValueError(f"{unsupported[0]}: this model does not take this argument; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: one of them must be given")
        if input_ids is not None:
            if input_ids.dim() != 2 or input_ids.is_floating_point():
                actual = f"{input_ids.dtype}, shape {tuple(input_ids.shape)}"
                raise ValueError(f"input_ids: {actual}: must be integers (B, n); of one row, input_ids[None]")
            input_ids = input_ids.long()  # uint8 cannot hold the numbers of special tokens
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: block-sparse attention has no weights to return; leave it out")
        if past_key_values is not None:
            if cache is not None:
                raise ValueError(f"cache, past_key_values: two names of one argument; give only {CACHE_NAME}")
            cache = past_key_values
        if cache is not None and not isinstance(cache, SessionCache):
            rule = "this model keeps its own session; leave it out, and pass what a call with use_cache=True returns"
            raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__}: {rule}")
        if inputs_embeds is not None and self.network.reach > 1:
            raise ValueError("inputs_embeds: this model looks up n-grams of tokens too; give input_ids")
        network, hidden = self.network, None
        if cache is not None and not cache.is_compatible_with(network):
            rule = "give a cache that this model returned, or leave it out"
            raise ValueError(f"{CACHE_NAME}: belongs to another model or other weights: {rule}")
        _check_positions(position_ids, attention_mask, 0 if cache is None else cache.get_seq_length())
        if self.config.output_hidden_states if output_hidden_states is None else output_hidden_states:
            hidden = list[Tensor]()
        if cache is not None or (use_cache and not self.training):
            if input_ids is None or hidden is not None or isinstance(logits_to_keep, Tensor):
                rule = "takes input_ids, a number of logits_to_keep, and has no output_hidden_states"
                raise ValueError(f"use_cache=True: a step with a cache {rule}; give use_cache=False")
            if cache is None:
                cache = SessionCache(network)
            logits, auxiliary = cache.extend(input_ids, attention_mask, logits_to_keep), None
        else:
            tokens = input_ids
            if tokens is None:
                assert inputs_embeds is not None
                tokens = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
            # Reversible blocks store no activations in any case.
            recomputed = self.gradient_checkpointing and self.training and not network.config.reversible
            network_output = all_rows(
                network,
                tokens,
                attention_mask,
                keep=logits_to_keep,
                embedded=inputs_embeds,
                recompute=self._recompute if recomputed else None,
                hidden=hidden,
            )
            logits, auxiliary = network_output.rows, network_output.auxiliary_loss
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self._loss(logits, labels, shift_labels, num_items_in_batch, auxiliary)
        states = None if hidden is None else tuple(hidden)
        output = CausalLMOutputWithPast(loss, logits, cache, states)  # the third has two names
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def _recompute(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """Call a block, under activation checkpointing for every n-th one."""
        number = next(number for number, candidate in enumerate(self.blocks) if candidate is block)
        if number % self._recomputed_every:
            return block(*inputs)
        return self._gradient_checkpointing_func(block, *inputs)

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        items: int | Tensor | None,
        auxiliary: Tensor | None,
    ) -> Tensor:
        """Return the mean nats of the labels, or with ``items`` their sum divided by it, plus auxiliary losses."""
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        if shift_labels.shape != logits.shape[:2]:
            shapes = f"{tuple(shift_labels.shape)} after the first, and logits for {tuple(logits.shape[:2])}"
            raise ValueError(f"labels: {shapes}: must be as many; give one for each token, and no logits_to_keep")
        shift_labels = shift_labels.long()
        vocabulary = logits.shape[-1]
        special = shift_labels >= vocabulary
        if items is not None and bool(special.any()):
            rule = "num_items_in_batch counts it, and no model predicts it, so that this loss is too small by its share"
            _logger.warning_once(f"labels: {int(shift_labels[special][0])}: {rule}; give -100, or pad on the right")
        targets = shift_labels.masked_fill(special, _IGNORED).flatten().to(logits.device)
        if items is None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
            return loss if auxiliary is None else loss + auxiliary
        nats = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        if auxiliary is not None:  # a mean over this batch; the step has several
            nats = nats + auxiliary * (targets != _IGNORED).sum()
        return nats / (items.to(nats.device) if isinstance(items, Tensor) else items)


def _check_positions(positions: Tensor | None, mask: Tensor | None, past: int) -> None:
    """Raise ValueError unless positions equal the default ones."""
    if positions is None:
        return
    count = positions.shape[-1]
    expected = torch.arange(past, past + count, device=positions.device)
    if bool((positions == expected).all()):
        return
    if mask is not None:
        visible = mask[:, -count:].bool()
        expected = mask.long().cumsum(1)[:, -count:] - 1
        if bool(((positions == expected) | ~visible).all()):
            return
    raise ValueError("position_ids: positions always count from 0 in each row; leave them out")
