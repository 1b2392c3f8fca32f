"""An exported model that predicts each token from those before it, as a class of transformers.

Place i of transformers has the logits of the token after token i. The network has them in row i + 1, since its row i
predicts token i; n tokens need n + 1 rows. Row 0, of the first token, goes to a start before it, and to padding.

Letters: B batch, n tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longstride.launcher.hub.cache import CACHE_NAME, SessionCache
from longstride.launcher.hub.configuration import LongstrideConfig
from longstride.launcher.hub.generation import SessionGenerationMixin
from longstride.launcher.hub.model import LongstridePreTrainedModel, check_positions


class LongstrideForCausalLM(LongstridePreTrainedModel, SessionGenerationMixin):
    """A model that predicts each token from those before it, and generates."""

    causal = True

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Trainer and pipelines look up in this table that labels are shifted by one place.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(config.model_type, "LongstrideForCausalLM")

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
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: one of them must be given")
        input_ids = self._require_supported(input_ids, output_attentions, others)
        if past_key_values is not None:
            if cache is not None:
                raise ValueError(f"cache, past_key_values: two names of one argument; give only {CACHE_NAME}")
            cache = past_key_values
        if cache is not None and not isinstance(cache, SessionCache):
            rule = "this model keeps its own session; leave it out, and pass what a call with use_cache=True returns"
            raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__}: {rule}")
        if inputs_embeds is not None and self.network.reach > 1:
            raise ValueError("inputs_embeds: this model looks up n-grams of tokens too; give input_ids")
        network, hidden = self.network, self._new_states(output_hidden_states)
        if cache is not None and not cache.is_compatible_with(network):
            rule = "give a cache that this model returned, or leave it out"
            raise ValueError(f"{CACHE_NAME}: belongs to another model or other weights: {rule}")
        check_positions(position_ids, attention_mask, 0 if cache is None else cache.get_seq_length())
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
            network_output = self._all_rows(
                tokens, attention_mask, keep=logits_to_keep, embedded=inputs_embeds, hidden=hidden
            )
            logits, auxiliary = network_output.rows, network_output.auxiliary_loss
        loss = None
        if labels is not None or shift_labels is not None:
            loss = self._shifted_loss(logits, labels, shift_labels, num_items_in_batch, auxiliary)
        states = None if hidden is None else tuple(hidden)
        output = CausalLMOutputWithPast(loss, logits, cache, states)  # the third has two names
        return self._returned(output, return_dict)

    def _shifted_loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        items: int | Tensor | None,
        auxiliary: Tensor | None,
    ) -> Tensor:
        """Return the loss of the labels after each place; ``shift_labels`` has them already there."""
        if shift_labels is None:
            assert labels is not None
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        if shift_labels.shape != logits.shape[:2]:
            shapes = f"{tuple(shift_labels.shape)} after the first, and logits for {tuple(logits.shape[:2])}"
            raise ValueError(f"labels: {shapes}: must be as many; give one for each token, and no logits_to_keep")
        return self._loss(logits, shift_labels, items, auxiliary)
