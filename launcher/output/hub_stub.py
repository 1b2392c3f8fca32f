"""The file in an exported model through which transformers finds the classes of the installed Longstride.

``longstride export`` writes it, and so does ``save_pretrained`` of a model that transformers has loaded.
"""

from pathlib import Path

MODULE = "modeling_longstride"
FILE = f"{MODULE}.py"
# In a `try`, because transformers asks to install the packages of all other imports.
_TEXT = '''"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from longstride.launcher.hub import {imports}
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {{error}}") from error

__all__ = [{names}]
'''
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{MODULE}.LongstrideTokenizer", None]}  # of tokenizer_config.json
MASK = "<|longstride_mask|>"  # the token's text there, for a model that is not causal


def auto_map(causal: bool) -> dict[str, str]:
    """Return the entry of config.json that points to the file, for a model whose objective is causal or not.

    The class of causal models refuses any other in one line, which says what to use. So each model names it.
    """
    names = {"AutoConfig": "LongstrideConfig"}
    if not causal:
        names |= {"AutoModelForMaskedLM": "LongstrideForMaskedLM", "AutoModel": "LongstrideModel"}
    names["AutoModelForCausalLM"] = "LongstrideForCausalLM"
    return {automatic: f"{MODULE}.{name}" for automatic, name in names.items()}


def text(causal: bool) -> str:
    """Return the content of the file for such a model."""
    names = sorted([path.partition(".")[2] for path in auto_map(causal).values()] + ["LongstrideTokenizer"])
    return _TEXT.format(imports=", ".join(names), names=", ".join(f'"{name}"' for name in names))


def write(folder: Path, causal: bool) -> None:
    """Write the file into a folder, which is created if needed. An equal file is not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / FILE, text(causal)
    if not path.is_file() or path.read_text() != content:
        path.write_text(content)
