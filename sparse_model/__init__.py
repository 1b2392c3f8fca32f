"""The Sparse Transformer: ``SparseTransformer(ModelConfig.model_validate({...}))``."""

from kernels.errors import ConfigError
from sparse_model.config import ModelConfig
from sparse_model.transformer import SparseTransformer

__all__ = ["ConfigError", "ModelConfig", "SparseTransformer"]
