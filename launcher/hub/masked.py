"""Exported models that read masked tokens from both sides, as classes of transformers.

Row i of the network has token i, so that rows are places, without a start.

Letters: B batch, n tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from longstride.launcher.hub.configuration import LongstrideConfig
from longstride.launcher.hub.model import LongstridePreTrainedModel, check_positions
from longstride.sparse_model import MixerOutput


class LongstrideModel(LongstridePreTrainedModel):
    """A model without its logits, for `AutoModel`: a row of features for each token."""

    causal = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutput | tuple[Any, ...]:
        """Return the normalised output of the last block, (B, n, C). See ``LongstrideForMaskedLM`` for the rest."""
        hidden = self._new_states(output_hidden_states)
        output = self._read(
            input_ids, attention_mask, position_ids, output_attentions, others, hidden=hidden, project=False
        )
        return self._returned(BaseModelOutput(output.rows, None if hidden is None else tuple(hidden)), return_dict)

    def _read(
        self,
        tokens: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        output_attentions: bool | None,
        others: dict[str, Any],
        **options: Any,
    ) -> MixerOutput:
        """Check the arguments of a call, and return its rows; ``options`` are those of ``all_rows``."""
        tokens = self._require_supported(tokens, output_attentions, others)
        if tokens is None:
            raise ValueError("input_ids: must be given")
        check_positions(positions, mask, 0)
        return self._all_rows(tokens, mask, **options)


class LongstrideForMaskedLM(LongstrideModel):
    """A model that predicts masked tokens from all others."""

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Pipelines look up in this table which models fill masks.
        MODEL_FOR_MASKED_LM_MAPPING_NAMES.setdefault(config.model_type, "LongstrideForMaskedLM")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **others: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Compute the logits of each of ``input_ids``, whether it is masked or not.

        Args:
            input_ids: (B, n), 1 ≤ n: tokens below V, V for a masked token, padding on either side.
            attention_mask: (B, n), zeros at padding.
            position_ids: (B, n) or (1, n), must equal the default: counted from 0, with or without padding.
            output_attentions: refused, since block-sparse attention never has complete rows of weights.
            output_hidden_states: whether to return the input of each block and the normalised output of the last.
            return_dict: False for a tuple.
            labels: (B, n), the token at each masked place, and -100 at all others, which are ignored.
            num_items_in_batch: number of labels in all batches of a step; the loss is then this batch's share.
            others: arguments for other models must be None.

        Returns:
            Logits (B, n, V), at least fp32; those of padding mean nothing. The loss is in nats a label, in training
            with the auxiliary losses of the model's parts.

        Raises:
            ValueError: an argument is missing or not supported, or there are more tokens than the context holds.
        """
        hidden = self._new_states(output_hidden_states)
        output = self._read(input_ids, attention_mask, position_ids, output_attentions, others, hidden=hidden)
        loss = None
        if labels is not None:
            if labels.shape != output.rows.shape[:2]:
                shapes = f"{tuple(labels.shape)}, and tokens {tuple(output.rows.shape[:2])}"
                raise ValueError(f"labels: {shapes}: must be as many; give -100 where nothing is masked")
            loss = self._loss(output.rows, labels, num_items_in_batch, output.auxiliary_loss)
        states = None if hidden is None else tuple(hidden)
        return self._returned(MaskedLMOutput(loss, output.rows, states), return_dict)
