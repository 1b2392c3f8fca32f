"""The Sparse Transformer: ``SparseTransformer(ModelConfig.model_validate({...}))``."""

import longstride

if __name__ == "sparse_model":
    longstride.stand_aside(__name__)

from longstride.kernels.errors import ConfigError
from longstride.sparse_model.config import ModelConfig
from longstride.sparse_model.transformer import SparseTransformer

__all__ = ["ConfigError", "ModelConfig", "SparseTransformer"]
