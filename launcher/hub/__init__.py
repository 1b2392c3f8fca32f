"""An exported model as transformers has models and tokenizers.

The stub in an export imports from here. Needs transformers, and no deepspeed.
"""

from longstride.launcher.hub.model import LongstrideConfig, LongstrideForCausalLM
from longstride.launcher.hub.tokenizer import LongstrideTokenizer

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
