"""Exported models and the tokenizer as classes of transformers. Needs transformers, but no deepspeed.

The stub in an export imports the classes from here. ``register()`` lets transformers load an export without that stub.
``register_attention()`` offers our attention to the models of transformers, and ``add_indexers()`` makes theirs sparse.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from longstride.launcher.hub.attention import register_attention
from longstride.launcher.hub.causal import LongstrideForCausalLM
from longstride.launcher.hub.configuration import LongstrideConfig
from longstride.launcher.hub.indexers import add_indexers, load_indexers, sum_indexer_losses
from longstride.launcher.hub.masked import LongstrideForMaskedLM, LongstrideModel
from longstride.launcher.hub.tokenizer import LongstrideTokenizer


def register() -> None:
    """Register the classes with transformers: its ``Auto`` classes then load an export without `trust_remote_code`.

    The export's stub is not read, so its version does not matter.
    """
    AutoConfig.register(LongstrideConfig.model_type, LongstrideConfig, exist_ok=True)
    AutoModel.register(LongstrideConfig, LongstrideModel, exist_ok=True)
    AutoModelForCausalLM.register(LongstrideConfig, LongstrideForCausalLM, exist_ok=True)
    AutoModelForMaskedLM.register(LongstrideConfig, LongstrideForMaskedLM, exist_ok=True)
    AutoTokenizer.register(LongstrideConfig, tokenizer_class=LongstrideTokenizer, exist_ok=True)
