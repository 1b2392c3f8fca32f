"""What becomes of a context that cannot be read: the run ends, or another context of the epoch stands in for it.

Which one follows from (seed, epoch, context) alone: whoever reads the damaged context, whatever the number of ranks and
workers, finds the same substitute.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.shards import REPAIR


@dataclass(frozen=True, slots=True)
class Substitution:
    """A context that stands in for a damaged one."""

    context: int  # the number of the one delivered
    damaged: int  # of the one that cannot be read
    damage: str  # what is wrong, naming shard and sample

    def __str__(self) -> str:
        return f"context {self.context} stands in for {self.damaged}: {self.damage}"


def substitute(read: Callable[[int], None], damaged: int, damage: DataError, candidates: Iterable[int]) -> Substitution:
    """Read the first candidate that can be read in place of a damaged context.

    Raises DataError where so many are damaged that none is found.
    """
    tried = 0
    for context in candidates:
        try:
            read(context)
        except DataError:
            tried += 1
            continue
        return Substitution(context, damaged, str(damage).removesuffix(f"; {REPAIR}"))
    raise DataError(f"{damage}; so are all {tried} contexts that could stand in for it: too much is lost")
