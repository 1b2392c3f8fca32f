"""The trainings of `benchmarks/paper/paper.py`: data sets, models and steps, in three sizes.

Letters: N positions of a context, l stride, c summary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longstride.launcher.config import TrainConfig
from longstride.sparse_model import ModelConfig

PATTERNS = ("dense", "fixed", "strided")  # in the order of the paper's Table 2
TEXT, IMAGES = "text", "images"
BETAS = (0.9, 0.95)
# Shares of N that every scored byte sees at least; the paper's Table 3 begins at the half.
MINIMUM_CONTEXTS = (0.0, 0.5, 0.75, 0.9)


@dataclass(frozen=True)
class Case:
    """One data set at one size. Only the pattern differs between the models that are compared."""

    name: str
    context: int  # N
    stride: int  # l; of pictures, the bytes of a row
    summary: int  # c
    layers: int
    heads: int
    width: int
    steps: int
    batch: int  # contexts a step
    learning_rate: float  # at its highest
    held_out: int  # contexts of the validation split that are scored, evenly spread
    evaluation_batch: int  # contexts
    regions: int = 0  # parts of the held-out text, 2N bytes each, that are scored at every minimum context
    height: int = 0  # of pictures, which are as wide; 0: text
    pictures: int = 0  # that are drawn
    validation_fraction: float = 0.05  # of files
    feed_forward_ratio: float = 4.0  # of width

    @property
    def warmup_steps(self) -> int:
        """A tenth of all."""
        return max(1, self.steps // 10)

    def train_config(self, seed: int) -> TrainConfig:
        """Return the trainer's settings: warm-up, cosine to 0, weight decay."""
        content = {
            "output": "none",  # a loop that saves nothing
            "seed": seed,
            "steps": self.steps,
            "global_batch": self.batch,
            "micro_batch": self.batch,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "betas": BETAS,
        }
        return TrainConfig.model_validate(content)

    def model_config(self, pattern: str) -> ModelConfig:
        """Return the model with one pattern in every layer; the factors of a sparse pattern are merged."""
        kinds: dict[str, dict[str, Any]] = {
            "dense": {"type": "dense"},
            "fixed": {"type": "fixed", "stride": self.stride, "summary": self.summary},
            "strided": {"type": "strided", "stride": self.stride},
        }
        embedding: dict[str, Any] = {"type": "text", "row_width": self.stride}
        if self.height:
            embedding = {"type": "image", "height": self.height, "width": self.height, "channels": 3}
        sizes = {name: getattr(self, name) for name in ("context", "layers", "heads", "width", "feed_forward_ratio")}
        return ModelConfig.model_validate({**sizes, "attention": kinds[pattern], "embedding": embedding})


SIZES: dict[str, tuple[Case, ...]] = {
    # Says that everything runs, and nothing else.
    "tiny": (
        Case(TEXT, 64, 16, 4, 2, 2, 16, 6, 2, 0.01, held_out=5, evaluation_batch=2, regions=2),
        Case(
            IMAGES, 192, 24, 3, 2, 2, 16, 6, 2, 0.01, held_out=3, evaluation_batch=2, height=8, pictures=40,
            validation_fraction=0.2,
        ),
    ),
    # Two cores, under 20 minutes. Narrow, so that there is time for many steps, which count for more than width here.
    "small": (
        Case(
            TEXT, 3_072, 64, 8, 2, 2, 64, 600, 1, 0.005, held_out=48, evaluation_batch=4, regions=4,
            feed_forward_ratio=2.0,
        ),
        Case(
            IMAGES, 3_072, 96, 6, 2, 2, 64, 600, 1, 0.005, held_out=48, evaluation_batch=4, height=32, pictures=2_000,
            feed_forward_ratio=2.0,
        ),
    ),
    # One H100 or H200, under 8 minutes: the paper's contexts, strides and summaries.
    "real": (
        Case(TEXT, 12_288, 128, 32, 8, 8, 512, 300, 4, 0.001, held_out=96, evaluation_batch=4, regions=4),
        Case(
            IMAGES, 3_072, 96, 12, 8, 8, 512, 300, 16, 0.001, held_out=384, evaluation_batch=16, height=32,
            pictures=10_000,
        ),
    ),
}  # fmt: skip
