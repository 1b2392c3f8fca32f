"""Use Longstride in transformers: exported models in its classes, and sparse attention in its models."""

from longstride.launcher.hub import register, register_attention

__all__ = ["register", "register_attention"]
