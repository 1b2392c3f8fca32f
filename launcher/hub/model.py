"""An exported model as a class of transformers.

transformers has at place i the logits of the token after token i. The network has them in row i + 1: its row i predicts
token i. So n tokens need n + 1 rows. The first row, of the first token, stands at a start before it, and at padding.

Letters: B batch, n tokens at hand, C width, V vocabulary.
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

_LEFT_OUT = -100  # as a label: of no loss
_logger = logging.get_logger(__name__)


class LongstrideForCausalLM(PreTrainedModel, SessionGenerationMixin):
    """A Sparse Transformer; tensors have the names that they have in an export."""

    config_class = LongstrideConfig
    config: LongstrideConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # Trainer then tells how many labels a whole step has
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ResidualBlock", "ReversibleBlock"]

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Trainer and pipelines know by this table of theirs that labels stand one place behind logits.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(config.model_type, "LongstrideForCausalLM")
        if not config.trust_code and (types := ModelConfig.foreign_types(config.model or {})):
            rule = "is from another package; install it, and give from_pretrained trust_code=True to run its code"
            raise ConfigError.at("type", types[0], rule)
        # Not the run's backend of attention: it is not known yet which device will compute.
        of_network = ModelConfig.model_validate(config.model).model_copy(update={"backend": "auto"})
        with torch.random.fork_rng(devices=[]):  # what is drawn here is not kept
            network = SparseTransformer(of_network, initialize=False)
        # Not as a submodule, which would put its name before those of its tensors; its parts are submodules instead.
        self.__dict__["_skeleton"] = {name: value for name, value in vars(network).items() if name != "_modules"}
        self.embedding, self.blocks, self.norm, self.logits = (
            network.embedding, network.blocks, network.norm, network.logits
        )  # fmt: skip
        self._first_values: dict[int, Tensor] = {}  # by the tensor that they are for, until it has them
        self._keep_in_fp32_modules_strict = [name for name, _ in network.named_buffers()]
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def network(self) -> SparseTransformer:
        """The network of the submodules as they are now: adapters and other tools put new ones in their places."""
        network = object.__new__(SparseTransformer)
        vars(network).update(self._skeleton, _modules=self._modules, training=self.training)
        return network

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Gives what was not loaded of a module's tensors the values that a new network of ours has there."""
        if not any(module is each for each in self.modules()):
            super()._init_weights(module)
            return
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        missing = [tensor for tensor in own if not getattr(tensor, "_is_hf_initialized", False)]
        if missing and not self._first_values:
            new, mine = (
                dict([*each.named_parameters(), *each.named_buffers()])
                for each in (SparseTransformer(self.network.config), self)
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
        """As torch has it; but buffers, which parts compute with in fp32, stay so in a model of 16 bits."""
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            now = self.get_buffer(name)
            if now.dtype.itemsize < buffer.dtype.itemsize:
                now.data = buffer.to(now.device)
        return self

    @classmethod
    def is_remote_code(cls) -> bool:
        """Never: the stub of an export leads here, and there is no code to save with a model."""
        return False

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """As transformers has it; what is saved is an export, and its config.json has the weights' own fingerprint.

        Where they are others than those that were loaded, it no longer tells of which run and step they are. A file of
        all weights gives way to several, as it would be read in their place.
        """
        if not getattr(self, "_hf_peft_config_loaded", False):  # adapters are saved alone
            own, digest = self.state_dict(), None
            tensors = own if state_dict is None else state_dict
            whole = tensors.keys() == own.keys() and not any(each.is_meta for each in tensors.values())
            if is_main_process and whole and all(each.dtype in DTYPES.values() for each in tensors.values()):
                fingerprint = Fingerprint(self.config.model or {})
                for name, tensor in tensors.items():
                    fingerprint.add(name, tensor.cpu())
                digest = fingerprint.hexdigest()
            if digest != getattr(self.config, "fingerprint", None):
                for name in ("fingerprint", "origin"):
                    self.config.__dict__.pop(name, None)
                if digest is not None:
                    self.config.fingerprint = digest
        whole_file, index = (Path(save_directory) / name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        before = [path.stat().st_mtime_ns if path.is_file() else None for path in (whole_file, index)]
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)
        after = [path.stat().st_mtime_ns if path.is_file() else None for path in (whole_file, index)]
        if is_main_process and after[0] is not None and after[0] == before[0] and after[1] != before[1]:
            whole_file.unlink()

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """As transformers has it, for blocks that are no layers of its own."""
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)
        self._recomputed_every = every_n_layers

    def get_input_embeddings(self) -> Any:
        """The embedding of the tokens."""
        return self.embedding.tokens

    def set_input_embeddings(self, value: Any) -> None:
        """Puts another one in its place."""
        self.embedding.tokens = value

    def get_output_embeddings(self) -> Any:
        """The projection to logits."""
        return self.logits

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Puts another one in its place."""
        self.logits = new_embeddings

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> torch.nn.Module:
        """Leaves the embedding as it is, which is wide enough for all tokens of the tokenizer, and returns it.

        Raises:
            ValueError: for another number of tokens.
        """
        tokens = self.network.config.vocabulary
        wanted = tokens if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        most = Specials.of(tokens).padding + 1
        if not tokens <= wanted <= most:
            rule = f"this model has {tokens} tokens, and no weights for the {most - tokens} special ones"
            raise ValueError(f"new_num_tokens={wanted}: {rule}; give {tokens} to {most}, or train another vocabulary")
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
        """Logits of the token after each of ``input_ids``.

        Args:
            input_ids: (B, n), n from 0: tokens below V; before the first of a row perhaps the start; padding on either
                side. With ``cache``, the tokens after those that it holds.
            attention_mask: (B, n), zeros at padding; with ``cache`` of all tokens that it then holds.
            position_ids: (B, n) or (1, n), as they are without them: counted from 0, with or without padding.
            cache: what an earlier call returned.
            inputs_embeds: (B, n, C), rows of ``get_input_embeddings()``, in place of ``input_ids``.
            labels: (B, n), mostly ``input_ids``; -100 is left out, and so are the start, the end and padding.
            use_cache: whether to return ``cache``.
            output_attentions: refused: attention over a pattern's blocks never has a whole row of weights.
            output_hidden_states: whether to return what enters each block, and what leaves the last, normalised.
            return_dict: False for a tuple.
            logits_to_keep: how many of the last ones to return, 0 for all; or at which places, as transformers has it.
            num_items_in_batch: labels of all batches that one step is made of: the loss is then this batch's share.
            past_key_values: ``cache``, as transformers below 5.24 calls it.
            others: ``shift_labels`` (B, n), what comes after each place, in place of ``labels``; it has no place of its
                own above, as Trainer would then wait for both. What transformers hands to other models must be None.

        Returns:
            Logits (B, n, V) in fp32 at least; without tokens (B, 1, V), the first token's. Nothing comes after a full
            context, where they are NaN. The loss is in nats a token, in training with the auxiliary losses of the
            model's parts. Without a start, no loss counts the first token.

        Raises:
            ValueError: an argument is missing, or of no use here, or more tokens than the context holds.
        """
        shift_labels = others.pop("shift_labels", None)
        wrong = [name for name, value in others.items() if value is not None]
        if wrong:
            raise ValueError(f"{wrong[0]}: this model takes no such argument; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: one of them must be given")
        if input_ids is not None:
            if input_ids.dim() != 2 or input_ids.is_floating_point():
                found = f"{input_ids.dtype}, shape {tuple(input_ids.shape)}"
                raise ValueError(f"input_ids: {found}: must be integers (B, n); of one row, input_ids[None]")
            input_ids = input_ids.long()  # bytes cannot be compared with the numbers of special tokens
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: attention by blocks has no weights to return; leave it out")
        if past_key_values is not None:
            if cache is not None:
                raise ValueError(f"cache, past_key_values: two names of one argument; give {CACHE_NAME} alone")
            cache = past_key_values
        if cache is not None and not isinstance(cache, SessionCache):
            rule = "this model keeps a session; leave it out, and give what a call with use_cache=True returns"
            raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__}: {rule}")
        if inputs_embeds is not None and self.network.config.ngrams is not None:
            raise ValueError("inputs_embeds: this model looks up n-grams of tokens too; give input_ids")
        network, hidden = self.network, None
        if cache is not None and not cache.goes_on_with(network):
            rule = "its steps are computed by that; give what this model returned, or leave it out"
            raise ValueError(f"{CACHE_NAME}: of another model, or of other weights: {rule}")
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
            # Reversible blocks keep nothing as it is.
            recomputed = self.gradient_checkpointing and self.training and not network.config.reversible
            network_output = all_rows(
                network,
                tokens,
                attention_mask,
                Specials.of(network.config.vocabulary),
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
        """A block whose inner activations the backward pass computes again, or one between such blocks."""
        kept = next(number for number, each in enumerate(self.blocks) if each is block) % self._recomputed_every
        return block(*inputs) if kept else self._gradient_checkpointing_func(block, *inputs)

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        items: int | Tensor | None,
        auxiliary: Tensor | None,
    ) -> Tensor:
        """The mean nats of the labels, or with ``items`` their sum over that; with the auxiliary losses once a step."""
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        if shift_labels.shape != logits.shape[:2]:
            found = f"{tuple(shift_labels.shape)} behind the first, and logits for {tuple(logits.shape[:2])}"
            raise ValueError(f"labels: {found}: must be as many; give one for each token, and no logits_to_keep")
        shift_labels = shift_labels.long()
        vocabulary = logits.shape[-1]
        special = shift_labels >= vocabulary
        if items is not None and bool(special.any()):
            rule = "num_items_in_batch counts it, and no model predicts it, so that this loss is too small by its share"
            _logger.warning_once(f"labels: {int(shift_labels[special][0])}: {rule}; give -100, or pad on the right")
        targets = shift_labels.masked_fill(special, _LEFT_OUT).flatten().to(logits.device)
        if items is None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
            return loss if auxiliary is None else loss + auxiliary
        nats = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        if auxiliary is not None:  # a mean over this batch, which is a part of the step
            nats = nats + auxiliary * (targets != _LEFT_OUT).sum()
        return nats / (items.to(nats.device) if isinstance(items, Tensor) else items)


def _check_positions(positions: Tensor | None, mask: Tensor | None, past: int) -> None:
    """Raises ValueError where positions are others than those that tokens have in any case."""
    if positions is None:
        return
    count = positions.shape[-1]
    counted = torch.arange(past, past + count, device=positions.device)
    if bool((positions == counted).all()):
        return
    if mask is not None:
        shown = mask[:, -count:].bool()
        counted = mask.long().cumsum(1)[:, -count:] - 1
        if bool(((positions == counted) | ~shown).all()):
            return
    raise ValueError("position_ids: positions count from 0 in each row here; leave them out")
