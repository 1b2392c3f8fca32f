"""The file by which transformers finds the classes of an exported model: it leads to the installed Longstride.

``longstride export`` writes it, and so does ``save_pretrained`` of a model that transformers has loaded.
"""

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
# What config.json tells of it.
AUTO_MAP = {"AutoConfig": f"{MODULE}.LongstrideConfig", "AutoModelForCausalLM": f"{MODULE}.LongstrideForCausalLM"}
