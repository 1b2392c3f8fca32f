"""What a modality has to say about itself."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Modality:
    """How files of one kind become bytes of a model's context and back."""

    name: str
    extension: str  # of a sample's member in a shard: KEY.extension
    suffixes: tuple[str, ...]  # of the files that a build takes from a folder unless told otherwise
    decode: Callable[[bytes], np.ndarray]  # a member's payload -> (n,) uint8
    encode: Callable[[np.ndarray], bytes]  # (n,) integers 0..255 -> what a person opens
