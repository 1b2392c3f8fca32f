"""Adapt ``generate`` of transformers to this model: its cache, its context, and tokens that it never predicts.

Letters: B contexts of the batch, n places of a row, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from longstride.launcher.hub.cache import CACHE_NAME, SessionCache
from longstride.launcher.hub.configuration import Specials
from longstride.sparse_model import SparseTransformer

# Processors that index the scores by the tokens of a row or prompt.
_BY_TOKENS = (
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)


class SessionGenerationMixin(GenerationMixin):
    """``generate`` of transformers with sessions as the cache."""

    _is_stateful = False  # a session can remove tokens

    @property
    @abstractmethod
    def network(self) -> SparseTransformer:
        """The network of the current tensors."""

    # transformers inspects this signature: it needs ``kwargs``, and would pass embeddings to a parameter for them.
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs like transformers, without positions after the first step."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs.pop("tokenizer", None)  # passed for stop strings
        if not kwargs.get("is_first_iteration"):
            inputs.pop("position_ids", None)  # counted by transformers; checking them would wait for the device
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError, because its pages hold keys and values, and a session holds more."""
        rule = "this model keeps sessions, not pages; generate takes prompts of any lengths in one batch"
        raise ValueError(f"continuous batching: {rule}")

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Adjust the generation config of a loaded model like transformers, and add the special tokens."""
        super().adjust_generation_fn(*args, **kwargs)
        specials = {name: getattr(self.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.generation_config.update(**specials, defaults_only=True)

    def _prepare_model_inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """Prepare inputs like transformers; empty prompts begin with the start, like missing ones."""
        inputs, name, others = super()._prepare_model_inputs(*args, **kwargs)
        if name == "input_ids":
            inputs = inputs.long()  # as forward does
        if name == "input_ids" and not inputs.shape[1]:
            inputs = inputs.new_full((len(inputs), 1), Specials.of(self.network.config.vocabulary).start)
            if others.get("attention_mask") is not None:
                others["attention_mask"] = torch.ones_like(inputs)
        return inputs, name, others

    def compute_transition_scores(self, sequences: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute scores like transformers, with 0 at padding, which has none."""
        vocabulary = self.network.config.vocabulary
        scores: Tensor = super().compute_transition_scores(sequences.clamp(max=vocabulary - 1), *args, **kwargs)
        return scores.masked_fill(sequences[:, sequences.shape[1] - scores.shape[1] :] >= vocabulary, 0.0)

    def _prepare_generated_length(self, generation_config: GenerationConfig, **kwargs: Any) -> GenerationConfig:
        """Prepare lengths like transformers; the default ends with the context, counted without padding."""
        default, context = generation_config.max_length, self.network.config.context
        config = super()._prepare_generated_length(generation_config=generation_config, **kwargs)
        config._prompt = tokens = kwargs["inputs_tensor"]  # read below, for the same call
        if kwargs["has_default_max_length"] and config.max_new_tokens is None:
            config.max_length = min(default, context - self._most_tokens(tokens, None)) + tokens.shape[1]
        return config

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Make a cache if none is passed, caching is on and the model is not in training mode.

        ValueError for another kind of cache, or a request that does not fit the context.
        """
        if generation_config.assistant_early_exit is not None:
            rule = "this model has no exit before its last layer; give another export as assistant_model"
            raise ValueError(f"assistant_early_exit={generation_config.assistant_early_exit}: {rule}")
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: this model keeps its own session; leave it out")
        generation_config.cache_implementation = None
        tokens = vars(generation_config).pop("_prompt")
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        context = self.network.config.context
        count = self._most_tokens(tokens, mask)
        if cache is not None:
            if not isinstance(cache, SessionCache):
                rule = "this model keeps its own session; pass what an earlier call returned, or leave it out"
                raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__}: {rule}")
            visible, places = generation_config._mask_length if mask is None else mask.shape[1], cache.get_seq_length()
            if visible != tokens.shape[1]:  # transformers then treats all tokens as new
                count += cache.most_tokens
            elif visible <= places:
                rule = "give all tokens, or new ones with an attention_mask of all"
                raise ValueError(f"input_ids: {visible} places, and {CACHE_NAME} holds {places}: {rule}")
        room, requested = context - count, generation_config.max_length - tokens.shape[1]
        if requested > room:
            name = "max_length" if generation_config.max_new_tokens is None else "max_new_tokens"
            advice = f"give max_new_tokens={room} at most" if room > 0 else "give a shorter prompt"
            rule = f"{count} tokens and {requested} new ones exceed the model's context of {context}; {advice}"
            raise ValueError(f"{name}={getattr(generation_config, name)}: {rule}")
        if getattr(self.prepare_inputs_for_generation, "__self__", self) is not self:
            # PEFT prepends virtual embeddings in the first step, but not if it finds a cache like this.
            generation_config.use_cache = False
        elif cache is None and generation_config.use_cache is not False and not self.training:
            model_kwargs[CACHE_NAME] = SessionCache(self.network)

    def _get_logits_processor(self, generation_config: GenerationConfig, **kwargs: Any) -> LogitsProcessorList:
        """Get processors like transformers, adapted to rows with tokens that have no logit.

        ValueError if the end is to be forced, which has no logit.
        """
        specials = Specials.of(self.network.config.vocabulary)
        processors = super()._get_logits_processor(generation_config=generation_config, **kwargs)
        for number, processor in enumerate(processors):
            if isinstance(processor, ForcedEOSTokenLogitsProcessor | ExponentialDecayLengthPenalty):
                is_penalty = isinstance(processor, ExponentialDecayLengthPenalty)
                name = "exponential_decay_length_penalty" if is_penalty else "forced_eos_token_id"
                if bool((processor.eos_token_id >= specials.start).any()):
                    rule = "the model never predicts it; give a byte as eos_token_id, or leave this out"
                    raise ValueError(f"{name}: the end is token {specials.end}: {rule}")
            if isinstance(processor, _BY_TOKENS):
                processors[number] = _ForAllTokens(processor, len(specials))
        return processors

    def _most_tokens(self, tokens: Tensor, mask: Tensor | None) -> int:
        """Return the length of the longest row (B, n), without start and padding."""
        present = tokens < self.network.config.vocabulary
        if mask is not None:
            visible = mask[:: len(mask) // len(tokens), -tokens.shape[1] :]  # the first beam of each prompt
            present = present & visible.bool().to(tokens.device)
        return int(present.sum(1).max()) if tokens.numel() else 0


class _ForAllTokens:
    """A processor that indexes scores by a row's tokens, with scores for special tokens."""

    def __init__(self, processor: Any, specials: int) -> None:
        self.processor, self.specials = processor, specials

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = F.pad(scores, (0, self.specials), value=-torch.inf)
        processed: Tensor = self.processor(input_ids, scores)
        return processed[:, : -self.specials]
