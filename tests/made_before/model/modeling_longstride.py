"""What transformers runs by `trust_remote_code=True`: it leads to the installed Longstride."""

try:
    from launcher.hub_model import LongstrideConfig, LongstrideForCausalLM
    from launcher.hub_tokenizer import LongstrideTokenizer
except ImportError as error:
    raise ImportError(f"this model needs Longstride, and transformers 5.23 or newer, installed: {error}") from error

__all__ = ["LongstrideConfig", "LongstrideForCausalLM", "LongstrideTokenizer"]
