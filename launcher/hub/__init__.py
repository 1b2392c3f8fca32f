"""An exported model as transformers has models and tokenizers; needs transformers, and no deepspeed.

The stub in an export imports the classes from here; ``register()`` has transformers load an export without that stub.
``register_attention()`` makes our attention available to the models that transformers has.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from longstride.launcher.hub.attention import register_attention
from longstride.launcher.hub.configuration import LongstrideConfig
from longstride.launcher.hub.model import LongstrideForCausalLM
from longstride.launcher.hub.tokenizer import LongstrideTokenizer


def register() -> None:
    """Makes these classes known to transformers: its ``Auto`` classes then load an export without `trust_remote_code`.

    The stub of the export is not read, so its age is no matter.
    """
    AutoConfig.register(LongstrideConfig.model_type, LongstrideConfig, exist_ok=True)
    AutoModelForCausalLM.register(LongstrideConfig, LongstrideForCausalLM, exist_ok=True)
    AutoTokenizer.register(LongstrideConfig, tokenizer_class=LongstrideTokenizer, exist_ok=True)
