"""From a checkpoint to safetensors, a configuration and a model card: `longstride export`."""

from longstride.launcher.exports.export import master_weights

__all__ = ["master_weights"]
