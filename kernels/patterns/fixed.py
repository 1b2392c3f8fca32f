"""The paper's fixed pattern: the own block joined with the summaries of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor
from typing_extensions import Doc

from longstride.kernels.patterns.base import Pattern, PatternDefaults, PatternPart, require_divides
from longstride.kernels.patterns.block import Block
from longstride.kernels.patterns.summary import Summary, SummaryKeys


@dataclass(frozen=True)
class Fixed(PatternDefaults):
    """The query's block joined with every block's last positions (Child et al. 2019, section 4.3).

    ``num_summaries`` and ``index`` are those of Summary: heads take distinct summary sub-blocks in turn.
    """

    stride: Annotated[int, Doc("positions in a block; the paper's l")]
    summary: Annotated[int, Doc("positions at a block's end that later blocks read; the paper's c")]
    num_summaries: Annotated[int, Doc("summary sub-blocks that heads take in turn")] = 1
    index: int | None = None

    def __post_init__(self) -> None:
        self.factors()  # they check the values

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Original positions q and k, broadcastable; True where q attends to k."""
        block, summary = self.factors()
        return block.mask(q, k) | summary.mask(q, k)

    def for_head(self, head: int) -> Pattern:
        """The pattern with this head's own summary sub-block."""
        if self.num_summaries == 1 or self.index is not None:
            return self
        return replace(self, index=head % self.num_summaries)

    def factors(self) -> tuple[Block, Summary]:
        """Block, then summary."""
        return Block(self.stride), Summary(self.stride, self.summary, self.num_summaries, index=self.index)

    def parts(self) -> tuple[PatternPart, ...]:
        """The own block, and the summary keys of the blocks before it."""
        block, summary = self.factors()
        return block, SummaryKeys(summary, earlier_blocks=True)

    def period(self) -> int:
        """Whole blocks."""
        return self.stride

    def check(self, context: int) -> None:
        """Raise ConfigError unless the stride divides the context."""
        require_divides("stride", self.stride, context)
