"""An exported model as transformers has models and tokenizers; needs transformers, and no deepspeed.

The stub in an export imports the classes from here; ``register()`` has transformers load an export without that stub.
"""

from longstride.launcher.hub.model import LongstrideConfig, LongstrideForCausalLM, LongstrideTokenizer, register
