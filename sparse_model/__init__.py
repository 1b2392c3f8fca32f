"""The Sparse Transformer: ``SparseTransformer(ModelConfig.model_validate({...}))``, and sampling from it.

Exports the model and its configuration, the sequence-parallel division, the base class of all configurations,
``Session`` and ``generate`` for inference, the inputs, outputs and costs of blocks, and tables of rows and experts,
which a trainer may store elsewhere.
"""

import longstride

if __name__ == "sparse_model":
    longstride.stand_aside(__name__)
else:
    from longstride.sparse_model.config import BlockConfig, ImageEmbedding, ModelConfig
    from longstride.sparse_model.division import Division
    from longstride.sparse_model.feed_forwards.experts import Experts
    from longstride.sparse_model.generation import generate, wrong_settings
    from longstride.sparse_model.ngrams import Table
    from longstride.sparse_model.part import BlockContext, MixerOutput, Work
    from longstride.sparse_model.session import Session
    from longstride.sparse_model.strict import StrictModel, config_error
    from longstride.sparse_model.transformer import SparseTransformer
