"""An exported model as a class of transformers.

transformers has at place i the logits of the token after token i. The network has them in row i + 1: its row i predicts
token i. So n tokens need n + 1 rows. The first row, of the first token, is returned for an empty prompt alone.

Letters: B batch, n tokens at hand, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longstride.launcher.hub.cache import SessionCache
from longstride.launcher.hub.configuration import LongstrideConfig
from longstride.sparse_model import Mixed, ModelConfig, Session, SparseTransformer


class LongstrideForCausalLM(PreTrainedModel, GenerationMixin):
    """A Sparse Transformer; tensors have the names that they have in an export."""

    config_class = LongstrideConfig
    config: LongstrideConfig
    _network: SparseTransformer
    main_input_name = "input_ids"
    _is_stateful = True  # a session cannot take tokens back, which speculative decoding needs
    _no_split_modules: ClassVar[list[str]] = ["ResidualBlock", "ReversibleBlock"]

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Not the run's backend of attention: it is not known yet which device will compute.
        network = SparseTransformer(ModelConfig.model_validate(config.model).model_copy(update={"backend": "auto"}))
        # Not as a submodule, which would put its name before those of its tensors; its parts are submodules instead.
        self.__dict__["_network"] = network
        self.embedding, self.blocks, self.norm, self.logits = (
            network.embedding, network.blocks, network.norm, network.logits
        )  # fmt: skip
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: the network has initialised itself."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a SessionCache is made at the first step

    def train(self, mode: bool = True) -> LongstrideForCausalLM:
        """As torch has it."""
        self._network.train(mode)
        return super().train(mode)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The embedding of the tokens."""
        return self.embedding.tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        """The projection to logits."""
        return self.logits

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the token after each of ``input_ids``.

        Args:
            input_ids: (B, n), n from 0; with ``past_key_values``, the tokens after those that it holds.
            attention_mask: ones; contexts of different lengths cannot stand in one batch.
            past_key_values: what an earlier call returned.
            labels: (B, n), mostly ``input_ids``; -100 is left out.
            use_cache: whether to return ``past_key_values``.
            logits_to_keep: how many of the last ones to return; 0 for all.

        Returns:
            Logits (B, n, V) in fp32 at least; without tokens (B, 1, V), the first token's. Nothing comes after a full
            context, where they are NaN. The loss is in nats a token, in training with the auxiliary
            losses of the model's parts.

        Raises:
            ValueError: no tokens, padding, or more tokens than the context holds.
        """
        if input_ids is None or others.get("inputs_embeds") is not None:
            raise ValueError("input_ids: must be given; this model takes no embeddings in their place")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: has zeros; this model takes no padding: give contexts of one length")
        cache = past_key_values if isinstance(past_key_values, SessionCache) else None
        if cache is None and use_cache and not self.training:
            cache = SessionCache(Session(self._network, len(input_ids)))
        auxiliary = None
        if cache is not None:
            logits = self._continued(cache.session, input_ids, logits_to_keep)
        else:
            mixed = self._rows(input_ids)
            logits, auxiliary = mixed.rows[:, -logits_to_keep:], mixed.auxiliary
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            if auxiliary is not None:  # in training alone
                loss = loss + auxiliary
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if return_dict is not False else output.to_tuple()

    # transformers looks for a parameter of the name kwargs.
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """As transformers has it. Raises ValueError where the context is full."""
        context = self._network.config.context
        if input_ids.shape[1] >= context:
            rule = f"{input_ids.shape[1]} tokens: the model's context of {context} has no room for another"
            raise ValueError(f"{rule}; give max_length={context} or less")
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _rows(self, tokens: Tensor) -> Mixed:
        """All logits by one pass, (B, n, V), or (B, 1, V) without tokens; and in training the auxiliary losses."""
        network = self._network
        wide = torch.promote_types(network.embedding.start.dtype, torch.float32)
        if tokens.shape[1] >= network.config.context:  # more than that the network refuses
            mixed = network(tokens, return_mixed=True)
            rows = mixed.rows.to(wide)[:, 1:]
            nothing = rows.new_full((len(rows), 1, network.config.vocabulary), torch.nan)
            return mixed._replace(rows=torch.cat([rows, nothing], 1))
        mixed = network(F.pad(tokens, (0, 1)), return_mixed=True)
        rows = mixed.rows.to(wide)
        return mixed._replace(rows=rows[:, 1:] if tokens.shape[1] else rows)

    def _continued(self, session: Session, tokens: Tensor, keep: int) -> Tensor:
        """The last ``keep`` logits of tokens that the session takes; all for 0."""
        count = tokens.shape[1]
        if session.position == 0:
            rows = None if keep == 1 else self._rows(tokens).rows
            session.prefill(tokens)
            if rows is None:
                rows = session.logits[:, None].clone()
            return rows[:, -keep:]
        kept = []
        for place in range(count):
            session.append(tokens[:, place])
            if not keep or place >= count - keep:
                kept.append(session.logits.clone())
        return torch.stack(kept, 1)
