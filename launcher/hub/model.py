"""An exported model as transformers has models. Needs transformers, and no deepspeed.

transformers has the logits behind token i at place i, where the network has them in row i + 1: its row i is what is
known before token i. So n tokens need n + 1 rows; the first, before every token, is only told of an empty prompt.

Letters: B batch, n tokens at hand, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from longstride.launcher.models import MODEL_TYPE
from longstride.sparse_model import ModelConfig, Session, SparseTransformer


class LongstrideConfig(PreTrainedConfig):
    """config.json of an export; ``model`` is the network's configuration."""

    model_type = MODEL_TYPE

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:
        others.setdefault("tie_word_embeddings", False)
        super().__init__(**others)
        self.model = model
        if model is not None:  # transformers makes one without to see what the defaults are
            # By the names that its own tools look for.
            self.vocab_size = model.get("vocabulary", ModelConfig.model_fields["vocabulary"].default)
            self.max_position_embeddings = model["context"]
            self.hidden_size = model["width"]
            self.num_hidden_layers = model["layers"]
            self.num_attention_heads = model["heads"]


class Known:
    """``past_key_values``: a session, which transformers hands from step to step."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def get_seq_length(self, layer: int = 0) -> int:
        """Tokens that are known."""
        return self.session.position

    def reorder_cache(self, order: Tensor) -> None:
        """Of a beam search: context i goes on from what was context ``order[i]``."""
        self.session.rearrange(order)


class LongstrideForCausalLM(PreTrainedModel, GenerationMixin):
    """A Sparse Transformer; tensors have the names that they have in an export."""

    config_class = LongstrideConfig
    config: LongstrideConfig
    main_input_name = "input_ids"
    _is_stateful = True  # a session cannot take tokens back, as speculative decoding asks
    _no_split_modules: ClassVar[list[str]] = ["ResidualBlock"]

    def __init__(self, config: LongstrideConfig) -> None:
        super().__init__(config)
        # Whatever backend of attention the run had: where the model is to compute is not known before it does.
        network = SparseTransformer(ModelConfig.model_validate(config.model).model_copy(update={"backend": "auto"}))
        # Its parts stand here by their own names; the network itself would put one more before each.
        self.__dict__["network"] = network
        self.embedding, self.blocks, self.norm, self.logits = (
            network.embedding, network.blocks, network.norm, network.logits
        )  # fmt: skip
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The network has initialised itself."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # ours is made at the first step

    def train(self, mode: bool = True) -> LongstrideForCausalLM:
        """As torch has it."""
        self.__dict__["network"].train(mode)
        return super().train(mode)

    def get_input_embeddings(self) -> torch.nn.Module:
        """Of the tokens."""
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
        """Logits of the token behind each of ``input_ids``.

        Args:
            input_ids: (B, n), n from 0; those that come after the known ones, where some are known.
            attention_mask: ones; contexts of different lengths cannot stand in one batch.
            past_key_values: what an earlier call gave back.
            labels: (B, n), mostly ``input_ids``; -100 counts for nothing.
            use_cache: whether ``past_key_values`` is wanted.
            logits_to_keep: only the last so many; 0 for all.

        Returns:
            Logits (B, n, V) in fp32 at least. Of no tokens they are (B, 1, V), the first token's. Behind a full context
            nothing comes, and they are NaN. The loss is in nats a token.

        Raises:
            ValueError: no tokens, padding, or more tokens than the context holds.
        """
        if input_ids is None or others.get("inputs_embeds") is not None:
            raise ValueError("input_ids: must be given; this model takes no embeddings in their place")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("attention_mask: has zeros; this model takes no padding: give contexts of one length")
        known = past_key_values if isinstance(past_key_values, Known) else None
        if known is None and use_cache and not self.training:
            known = Known(Session(self._network(), len(input_ids)))
        if known is not None:
            logits = self._continued(known.session, input_ids, logits_to_keep)
        else:
            logits = self._rows(input_ids)[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=known)
        return output if return_dict is not False else output.to_tuple()

    # transformers looks for what a model takes by the name kwargs.
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """As transformers has it. Raises ValueError where the context is full, and nothing can come."""
        context = self._network().config.context
        if input_ids.shape[1] >= context:
            rule = f"{input_ids.shape[1]} tokens: the model's context of {context} has no room for another"
            raise ValueError(f"{rule}; give max_length={context} or less")
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _network(self) -> SparseTransformer:
        """Of the same parts."""
        network: SparseTransformer = self.__dict__["network"]
        return network

    def _rows(self, tokens: Tensor) -> Tensor:
        """All logits by one pass: (B, n, V), or (B, 1, V) of no tokens."""
        network = self._network()
        wide = torch.promote_types(network.embedding.start.dtype, torch.float32)
        if tokens.shape[1] >= network.config.context:  # more than that the network refuses
            rows = network(tokens).to(wide)[:, 1:]
            return torch.cat([rows, rows.new_full((len(rows), 1, network.config.vocabulary), torch.nan)], 1)
        rows = network(F.pad(tokens, (0, 1))).to(wide)
        return rows[:, 1:] if tokens.shape[1] else rows

    def _continued(self, session: Session, tokens: Tensor, keep: int) -> Tensor:
        """Logits with tokens that are known from here on."""
        count = tokens.shape[1]
        if session.position == 0:
            rows = None if keep == 1 else self._rows(tokens)
            session.prefill(tokens)
            if rows is None:
                rows = session.logits[:, None].clone()
            return rows[:, -keep:]
        found = []
        for place in range(count):
            session.append(tokens[:, place])
            if not keep or place >= count - keep:
                found.append(session.logits.clone())
        return torch.stack(found, 1)
