"""The file in an exported model through which transformers finds the classes of the installed Longstride.

``longstride export`` writes it, and so does ``save_pretrained`` of a model that transformers has loaded.
"""

from pathlib import Path

MODULE = "modeling_longstride"
FILE = f"{MODULE}.py"
# In a `try`, because transformers asks to install the packages of all other imports.
TEXT = '''"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM, LongstrideTokenizer
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {error}") from error

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
'''
# The entries of config.json and tokenizer_config.json that point to it.
AUTO_MAP = {"AutoConfig": f"{MODULE}.LongstrideConfig", "AutoModelForCausalLM": f"{MODULE}.LongstrideForCausalLM"}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{MODULE}.LongstrideTokenizer", None]}


def write(folder: Path) -> None:
    """Write the file into a folder, which is created if needed. An equal file is not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    if not path.is_file() or path.read_text() != TEXT:
        path.write_text(TEXT)
