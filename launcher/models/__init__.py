"""An exported model's folder: its weights, its fingerprint and the kind of its data.

Needs no deepspeed, so that sampling and serving start quickly.
"""

from longstride.launcher.models.exported import (
    Exported,
    is_export,
    load_model,
    require_finite_logits,
    stream_model,
    usable_device,
)
from longstride.launcher.models.model_data import ModelData
from longstride.launcher.models.tensors import (
    ALIGNMENT,
    AVERAGE,
    DTYPES,
    MAPPED_BYTES,
    TRAINED,
    Fingerprint,
    Shapes,
    write_tensors,
)
