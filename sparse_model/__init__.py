"""The Sparse Transformer: ``SparseTransformer(ModelConfig.model_validate({...}))``, and sampling from it.

It hands out the model, how contexts are divided over processes, its configuration and the base class of all
configurations, ``Session`` and ``generate`` for inference, what its blocks take, return and count, and n-gram tables,
whose rows a trainer keeps elsewhere.
"""

import longstride

if __name__ == "sparse_model":
    longstride.stand_aside(__name__)
else:
    from longstride.sparse_model.config import BlockConfig, ImageEmbedding, ModelConfig
    from longstride.sparse_model.division import Division
    from longstride.sparse_model.generation import generate, wrong_settings
    from longstride.sparse_model.ngrams import Ngrams, add_rows
    from longstride.sparse_model.part import BlockContext, MixerOutput, Work
    from longstride.sparse_model.session import Session
    from longstride.sparse_model.strict import StrictModel, config_error
    from longstride.sparse_model.transformer import SparseTransformer
