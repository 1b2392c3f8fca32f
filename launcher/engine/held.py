"""Parameters that DeepSpeed does not hold: they have gradients, an optimiser and checkpoint files of their own.

Their gradients count in the norm that DeepSpeed clips by, and one that is not finite drops the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

_EPSILON = 1e-6  # added to the norm before clipping, as DeepSpeed does


class Held(Protocol):
    """Some of these parameters. All ranks call each method, in the same order."""

    kind: str  # the beginning of their files' names in a checkpoint

    @property
    def numel(self) -> int:
        """The numbers of the complete weights."""

    def reduce(self, scale: float) -> Tensor:
        """Sum the gradients of losses times ``scale`` over the ranks; return the sum of all their squares, fp32."""

    def step(self, number: int, factor: float) -> None:
        """Take step ``number`` + 1 with the reduced gradients times ``factor``."""

    def forget(self) -> None:
        """Drop the gradients of a step that is not taken."""

    def freeze(self, frozen: bool) -> None:
        """Collect no gradients from now on, or collect them again."""

    def local(self) -> Iterator[Tensor]:
        """Yield this rank's weights."""

    def whole(self) -> dict[str, Tensor]:
        """Return the complete weights by the names of the model's parameters, on every rank."""

    def share(self) -> dict[str, Tensor]:
        """Return what this rank saves, by the names in its file; nothing if it has no file."""


class HeldParameters:
    """All parameters of a model that its engine does not hold; often none."""

    def __init__(self, engine: DeepSpeedEngine, parts: Sequence[Held]) -> None:
        self.parts = parts
        self._frozen = False
        self._clipping = engine.gradient_clipping()
        self._norm = torch.zeros((), device=engine.device)  # of the gradients times the loss scale
        if parts:
            self._join_norm(engine)

    def reduce(self, scale: float) -> None:
        """Sum the gradients of losses times ``scale`` over the ranks, before the engine takes its step."""
        if self._frozen:
            self._norm.zero_()
        elif self.parts:
            squares = torch.stack([part.reduce(scale) for part in self.parts])
            self._norm = squares.sum().sqrt() * scale

    def step(self, number: int, norm: float) -> None:
        """Take step ``number`` + 1, clipped as the engine's: ``norm`` is that of all unscaled gradients."""
        factor = min(1.0, self._clipping / (norm + _EPSILON)) if self._clipping else 1.0
        for part in () if self._frozen else self.parts:
            part.step(number, factor)

    def forget(self) -> None:
        """Drop the gradients of a step that is not taken."""
        for part in self.parts:
            part.forget()

    def freeze(self, frozen: bool) -> None:
        """Leave these parameters as they are in the next steps, or train them again."""
        self._frozen = frozen
        for part in self.parts:
            part.freeze(frozen)

    def local(self) -> Iterator[Tensor]:
        """Yield this rank's weights."""
        for part in self.parts:
            yield from part.local()

    def whole(self) -> dict[str, Tensor]:
        """Return the complete weights by the names of the model's parameters, on every rank. All ranks must call."""
        return {name: tensor for part in self.parts for name, tensor in part.whole().items()}

    def total_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of gradients and of the reduced ones here, for an engine without a loss scale."""
        return torch.nn.utils.get_total_norm([*gradients, self._norm] if self.parts else gradients)

    def _join_norm(self, engine: DeepSpeedEngine) -> None:
        """Let DeepSpeed add the norm to its own. Each of its optimisers computes that in another method."""
        optimizer: Any = engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            norms = optimizer._get_norm_groups
            optimizer._get_norm_groups = lambda: [*norms(), self._norm]
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = lambda: combine_grad_norm_groups([norm(), self._norm])
        elif isinstance(optimizer, BF16_Optimizer):
            gradients = optimizer.get_grads_for_norm

            def with_norm(for_clipping: bool = False) -> Any:
                if for_clipping:
                    return gradients(for_clipping=True)
                tensors, experts = gradients()
                return [*tensors, self._norm], experts

            optimizer.get_grads_for_norm = with_norm
        elif isinstance(optimizer, FP16_UnfusedOptimizer):
            overflows, clip = optimizer.overflow_checker.check, optimizer.unscale_and_clip_grads

            def clip_by_both(total_norm: float) -> float:
                optimizer._global_grad_norm = math.hypot(total_norm, float(self._norm))
                scale: float = clip(optimizer._global_grad_norm)
                return scale

            optimizer.overflow_checker.check = lambda: overflows() or not math.isfinite(float(self._norm))
            optimizer.unscale_and_clip_grads = clip_by_both
        else:  # ZeRO 0 in fp32
            parameters = list(engine.module.parameters())

            def clip_gradients() -> None:
                norm = self.total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
                torch.nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping(), norm)

            engine.clip_fp32_gradients = clip_gradients
