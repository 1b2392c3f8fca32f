"""An exported model, read: its files, its fingerprint, and what its bytes are. Needs no deepspeed."""

from longstride.launcher.models.exported import (
    EXPORT_FORMAT,
    Exported,
    computing_numbers,
    empty_model,
    fingerprint,
    load_model,
    placed,
    runnable,
    usable_device,
)
from longstride.launcher.models.fingerprint import DTYPES, MAPPED_BYTES, STORED, TensorHash, combined, tensor_bytes
from longstride.launcher.models.hub_files import MODEL_TYPE, hub_fields, hub_files
from longstride.launcher.models.model_data import ModelData, describe

__all__ = [
    "DTYPES",
    "EXPORT_FORMAT",
    "MAPPED_BYTES",
    "MODEL_TYPE",
    "STORED",
    "Exported",
    "ModelData",
    "TensorHash",
    "combined",
    "computing_numbers",
    "describe",
    "empty_model",
    "fingerprint",
    "hub_fields",
    "hub_files",
    "load_model",
    "placed",
    "runnable",
    "tensor_bytes",
    "usable_device",
]
