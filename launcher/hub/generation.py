"""What ``generate`` of transformers has to know of this model: its cache, its context, and tokens it never predicts.

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

# Processors that look up the scores of tokens of a row or prompt.
_BY_TOKENS = (
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)


class SessionGenerationMixin(GenerationMixin):
    """``generate`` as transformers has it, by sessions."""

    _is_stateful = False  # a session takes tokens back

    @property
    @abstractmethod
    def network(self) -> SparseTransformer:
        """Of the tensors as they are now."""

    # transformers looks for a parameter of the name kwargs, and takes embeddings where it finds one for them.
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """As transformers has it."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs.pop("tokenizer", None)  # of stop strings
        if not kwargs.get("is_first_iteration"):
            inputs.pop("position_ids", None)  # transformers has counted them on; to look at them would wait for a card
        return inputs

    def init_continuous_batching(self, *given: Any, **named: Any) -> Any:
        """Raises ValueError: its pages hold keys and values, and a session more."""
        rule = "this model keeps sessions and no pages; generate takes prompts of any lengths in one batch"
        raise ValueError(f"continuous batching: {rule}")

    def adjust_generation_fn(self, *given: Any, **named: Any) -> None:
        """As transformers has it where it loads a model, with the special tokens of the model's configuration."""
        super().adjust_generation_fn(*given, **named)
        specials = {name: getattr(self.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        self.generation_config.update(**specials, defaults_only=True)

    def _prepare_model_inputs(self, *given: Any, **named: Any) -> tuple[Tensor, str | None, dict[str, Any]]:
        """As transformers has it; prompts of no tokens begin with the start, as those do that are not given at all."""
        inputs, name, others = super()._prepare_model_inputs(*given, **named)
        if name == "input_ids":
            inputs = inputs.long()  # as forward does
        if name == "input_ids" and not inputs.shape[1]:
            inputs = inputs.new_full((len(inputs), 1), Specials.of(self.network.config.vocabulary).start)
            if others.get("attention_mask") is not None:
                others["attention_mask"] = torch.ones_like(inputs)
        return inputs, name, others

    def compute_transition_scores(self, sequences: Tensor, *given: Any, **named: Any) -> Tensor:
        """As transformers has it; 0 at padding, which has no score."""
        vocabulary = self.network.config.vocabulary
        scores: Tensor = super().compute_transition_scores(sequences.clamp(max=vocabulary - 1), *given, **named)
        return scores.masked_fill(sequences[:, sequences.shape[1] - scores.shape[1] :] >= vocabulary, 0.0)

    def _prepare_generated_length(self, generation_config: GenerationConfig, **given: Any) -> GenerationConfig:
        """As transformers has it; by default, as far as the context goes and no mean number of positions."""
        default, context = generation_config.max_length, self.network.config.context
        config = super()._prepare_generated_length(generation_config=generation_config, **given)
        config._prompt = tokens = given["inputs_tensor"]  # beside what else transformers finds out for this call
        if given["has_default_max_length"] and config.max_new_tokens is None:
            config.max_length = min(default, context - self._most_tokens(tokens, None)) + tokens.shape[1]
        return config

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        """Makes a cache, where none is given, one may be used, and no dropout is drawn.

        Raises:
            ValueError: another kind of cache is asked for, or what is asked for does not fit the context.
        """
        if generation_config.assistant_early_exit is not None:
            rule = "this model has no exit before its last layer; give another export as assistant_model"
            raise ValueError(f"assistant_early_exit={generation_config.assistant_early_exit}: {rule}")
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r}: this model keeps a session of its own; leave it out")
        generation_config.cache_implementation = None
        tokens = vars(generation_config).pop("_prompt")
        cache, mask, context = (
            model_kwargs.get(CACHE_NAME),
            model_kwargs.get("attention_mask"),
            self.network.config.context,
        )
        held = self._most_tokens(tokens, mask)
        if cache is not None:
            if not isinstance(cache, SessionCache):
                rule = "this model keeps a session; give what an earlier call of it returned, or leave it out"
                raise ValueError(f"{CACHE_NAME}: a {type(cache).__name__}: {rule}")
            shown, places = generation_config._mask_length if mask is None else mask.shape[1], cache.get_seq_length()
            if shown != tokens.shape[1]:  # transformers then takes all tokens for new ones
                held += cache.most_tokens
            elif shown <= places:
                rule = "give all tokens, or new ones with an attention_mask of all"
                raise ValueError(f"input_ids: {shown} places, and {CACHE_NAME} holds {places}: {rule}")
        room, wanted = context - held, generation_config.max_length - tokens.shape[1]
        if wanted > room:
            name = "max_length" if generation_config.max_new_tokens is None else "max_new_tokens"
            more = f"give max_new_tokens={room} at most" if room > 0 else "give a shorter prompt"
            rule = f"{held} tokens and {wanted} new ones exceed the model's context of {context}; {more}"
            raise ValueError(f"{name}={getattr(generation_config, name)}: {rule}")
        if getattr(self.prepare_inputs_for_generation, "__self__", self) is not self:
            # PEFT's: it puts embeddings of no token before the first step, but not where it finds a cache like this.
            generation_config.use_cache = False
        elif cache is None and generation_config.use_cache is not False and not self.training:
            model_kwargs[CACHE_NAME] = SessionCache(self.network)

    def _get_logits_processor(self, generation_config: GenerationConfig, **given: Any) -> LogitsProcessorList:
        """As transformers has it, where a row may hold tokens that have no logit.

        Raises:
            ValueError: the end is to be forced, and the model has no logit of it.
        """
        specials = Specials.of(self.network.config.vocabulary)
        processors = super()._get_logits_processor(generation_config=generation_config, **given)
        for number, processor in enumerate(processors):
            if isinstance(processor, ForcedEOSTokenLogitsProcessor | ExponentialDecayLengthPenalty):
                name = "forced_eos_token_id"
                if isinstance(processor, ExponentialDecayLengthPenalty):
                    name = "exponential_decay_length_penalty"
                if bool((processor.eos_token_id >= specials.start).any()):
                    rule = "the model never predicts it; give a byte as eos_token_id, or leave this out"
                    raise ValueError(f"{name}: the end is token {specials.end}: {rule}")
            if isinstance(processor, _BY_TOKENS):
                processors[number] = _ForAllTokens(processor, len(specials))
        return processors

    def _most_tokens(self, tokens: Tensor, mask: Tensor | None) -> int:
        """Of the longest row (B, n), without start and padding."""
        present = tokens < self.network.config.vocabulary
        if mask is not None:
            shown = mask[:: len(mask) // len(tokens), -tokens.shape[1] :]  # of beams each prompt's first
            present = present & shown.bool().to(tokens.device)
        return int(present.sum(1).max()) if tokens.numel() else 0


class _ForAllTokens:
    """A processor that looks up the scores of the tokens of a row, with scores for those that have none."""

    def __init__(self, processor: Any, specials: int) -> None:
        self.processor, self.specials = processor, specials

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = F.pad(scores, (0, self.specials), value=-torch.inf)
        processed: Tensor = self.processor(input_ids, scores)
        return processed[:, : -self.specials]
