"""An exported model as a class of transformers: what all objectives share.

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
from transformers.modeling_outputs import ModelOutput
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.launcher.hub.configuration import LongstrideConfig, Specials
from longstride.launcher.hub.rows import all_rows
from longstride.launcher.models import DTYPES, Fingerprint
from longstride.sparse_model import MixerOutput, ModelConfig, SparseTransformer

_IGNORED = -100  # a label without loss
_logger = logging.get_logger(__name__)


class LongstridePreTrainedModel(PreTrainedModel):
    """A Sparse Transformer whose tensors have the same names as in an export."""

    causal: ClassVar[bool]  # of the objectives whose models it takes

    config_class = LongstrideConfig
    config: LongstrideConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = True  # Trainer then passes the number of labels in a step
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["ResidualBlock", "ReversibleBlock"]

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        if not config.trust_code and (types := ModelConfig.foreign_types(config.model or {})):
            rule = "is from another package; install it, and give from_pretrained trust_code=True to run its code"
            raise ConfigError.at("type", types[0], rule)
        # Not the run's attention backend, since the device is not known yet.
        network_config = ModelConfig.model_validate(config.model).model_copy(update={"backend": "auto"})
        network_config.require_tokens()
        objective = network_config.objective
        if objective.causal != self.causal:
            rule = f"predicts {'each next token' if objective.causal else 'tokens from both sides'}"
            automatic = "AutoModelForCausalLM" if objective.causal else "AutoModelForMaskedLM"
            raise ConfigError.at("model.objective.type", objective.type, f"{rule}; use {automatic}")
        with torch.random.fork_rng(devices=[]):  # the drawn values are not used
            network = SparseTransformer(network_config, initialize=False)
        # The network's parts are the submodules. As a submodule itself, it would prefix the names of its tensors.
        self.__dict__["_skeleton"] = {name: value for name, value in vars(network).items() if name != "_modules"}
        self.embedding, self.blocks, self.norm, self.logits = (
            network.embedding, network.blocks, network.norm, network.logits
        )  # fmt: skip
        if network.shared is not None:
            self.shared = network.shared
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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

    def _require_supported(
        self, input_ids: Tensor | None, output_attentions: bool | None, others: dict[str, Any]
    ) -> Tensor | None:
        """Return tokens (B, n) as int64; ValueError for other tensors, and for arguments that no model takes."""
        unsupported = [name for name, value in others.items() if value is not None]
        if unsupported:
            raise ValueError(f"{unsupported[0]}: this model does not take this argument; leave it out")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions: block-sparse attention has no weights to return; leave it out")
        if input_ids is not None and (input_ids.dim() != 2 or input_ids.is_floating_point()):
            actual = f"{input_ids.dtype}, shape {tuple(input_ids.shape)}"
            raise ValueError(f"input_ids: {actual}: must be integers (B, n); of one row, input_ids[None]")
        return None if input_ids is None else input_ids.long()  # uint8 cannot hold the numbers of special tokens

    def _new_states(self, requested: bool | None) -> list[Tensor] | None:
        """Return a list for the states of all blocks, if a call or the configuration requests them."""
        return [] if (self.config.output_hidden_states if requested is None else requested) else None

    def _returned(self, output: ModelOutput, as_dict: bool | None) -> Any:
        """Return an output as it is, or as a tuple if a call or the configuration requests that."""
        return output if (self.config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _all_rows(self, tokens: Tensor, mask: Tensor | None, **options: Any) -> MixerOutput:
        """Call ``all_rows``, under activation checkpointing if it is on."""
        network = self.network
        # Reversible blocks store no activations in any case.
        recomputed = self.gradient_checkpointing and self.training and not network.config.reversible
        return all_rows(network, tokens, mask, recompute=self._recompute if recomputed else None, **options)

    def _recompute(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """Call a block, under activation checkpointing for every n-th one."""
        number = next(number for number, candidate in enumerate(self.blocks) if candidate is block)
        if number % self._recomputed_every:
            return block(*inputs)
        return self._gradient_checkpointing_func(block, *inputs)

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor, items: int | Tensor | None, auxiliary: Tensor | None) -> Tensor:
        """Return the mean nats of the labels, or with ``items`` their sum divided by it, plus auxiliary losses.

        Args:
            logits: (B, n, V).
            labels: (B, n), the token that each place predicts; -100 and special tokens are ignored.
            items: the number of labels in all batches of a step.
            auxiliary: () fp32, a mean over this batch.
        """
        labels = labels.long()
        special = labels >= logits.shape[-1]
        if items is not None and bool(special.any()):
            rule = "num_items_in_batch counts it, and no model predicts it, so that this loss is too small by its share"
            _logger.warning_once(f"labels: {int(labels[special][0])}: {rule}; give -100, or pad on the right")
        targets = labels.masked_fill(special, _IGNORED).flatten().to(logits.device)
        if items is None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets)
            return loss if auxiliary is None else loss + auxiliary
        nats = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        if auxiliary is not None:  # a mean over this batch; the step has several
            nats = nats + auxiliary * (targets != _IGNORED).sum()
        return nats / (items.to(nats.device) if isinstance(items, Tensor) else items)


def check_positions(positions: Tensor | None, mask: Tensor | None, past: int) -> None:
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
