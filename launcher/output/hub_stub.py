"""The file by which transformers finds the classes of an exported model: it leads to the installed Longstride.

``longstride export`` writes it, and so does ``save_pretrained`` of a model that transformers has loaded.
"""

from pathlib import Path

MODULE = "modeling_longstride"
FILE = f"{MODULE}.py"
# In a `try`: transformers takes other imports for packages to be installed by their names.
TEXT = '''"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM, LongstrideTokenizer
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {error}") from error

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
'''
# What config.json tells of it, and tokenizer_config.json.
AUTO_MAP = {"AutoConfig": f"{MODULE}.LongstrideConfig", "AutoModelForCausalLM": f"{MODULE}.LongstrideForCausalLM"}
TOKENIZER_AUTO_MAP = {"AutoTokenizer": [f"{MODULE}.LongstrideTokenizer", None]}


def write(folder: Path) -> None:
    """Puts the file into a folder, which is made where there is none; one that is there already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / FILE
    if not kept.is_file() or kept.read_text() != TEXT:
        kept.write_text(TEXT)
