"""What an export has beside weights and configuration, so that `transformers` loads it by the installed Longstride."""

from __future__ import annotations

import json
from typing import Any

from longstride.sparse_model import ModelConfig

MODEL_TYPE = "longstride"
_BYTE_VALUES = 256
_MODULE = "modeling_longstride"
# In a `try`: transformers takes other imports for packages to be installed by their names.
_CODE = '''"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM, LongstrideTokenizer
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {error}") from error

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
'''


def hub_fields() -> dict[str, Any]:
    """What config.json has for transformers."""
    classes = {"AutoConfig": "LongstrideConfig", "AutoModelForCausalLM": "LongstrideForCausalLM"}
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["LongstrideForCausalLM"],
        "auto_map": {auto: f"{_MODULE}.{name}" for auto, name in classes.items()},
    }


def hub_files(model: ModelConfig) -> dict[str, str]:
    """Names and contents of files; a tokenizer only where all tokens are bytes of a text."""
    files = {f"{_MODULE}.py": _CODE}
    if model.embedding.type == "text" and model.vocabulary == _BYTE_VALUES:
        content = {
            "tokenizer_class": "LongstrideTokenizer",
            "auto_map": {"AutoTokenizer": [f"{_MODULE}.LongstrideTokenizer", None]},
            "model_max_length": model.context,
        }
        files["tokenizer_config.json"] = json.dumps(content, indent=2) + "\n"
    return files
