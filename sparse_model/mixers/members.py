"""The last positions of each cluster, for generation: a query to come reads those of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class RecentMembers:
    """Lists of positions, one for each cluster, of which the last ones are kept; axes before those are the owner's.

    Member m of a cluster stands at m modulo the number that is kept. A position that is added again changes nothing, so
    a step that was cut off can be taken again. The cluster of every position is kept too, for when some are taken back.
    """

    def __init__(self, shape: tuple[int, ...], clusters: int, kept: int, length: int, device: torch.device) -> None:
        """Empty lists, of all ``shape`` leading axes, for positions below ``length``."""
        self.kept = kept
        self.clusters = torch.zeros(*shape, length, dtype=torch.int64, device=device)  # of each position
        self.counts = torch.zeros(*shape, clusters, dtype=torch.int64, device=device)  # members so far
        self.positions = torch.zeros(*shape, clusters * kept, dtype=torch.int64, device=device)

    def begin(self, clusters: Tensor) -> None:
        """Have the lists of the first n positions alone, in these clusters (…, n)."""
        self.clusters[..., : clusters.shape[-1]] = clusters
        self.counts.zero_().scatter_add_(-1, clusters, torch.ones_like(clusters))
        placed, position = clusters.sort(dim=-1, stable=True)
        first = (self.counts.cumsum(-1) - self.counts).gather(-1, placed)
        member = torch.arange(clusters.shape[-1], device=clusters.device) - first
        stays = member >= self.counts.gather(-1, placed) - self.kept
        # One place behind all takes those that do not.
        place = torch.where(stays, placed * self.kept + member % self.kept, self.positions.shape[-1])
        self.positions.copy_(F.pad(self.positions, (0, 1)).scatter_(-1, place, position)[..., :-1])

    def add(self, cluster: Tensor, position: int) -> None:
        """Enter a position, greater than all, into its cluster (…, 1)."""
        count = self._count_before(cluster, position)
        self.positions.scatter_(-1, cluster * self.kept + count % self.kept, position)
        self.counts.scatter_(-1, cluster, count + 1)
        self.clusters[..., position : position + 1] = cluster

    def before(self, cluster: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a cluster (…, 1) has of positions before this one, which none but itself follows.

        Returns:
            Positions (…, kept) in any order; the number of each as a member, below 0 where there is none; and how many
            members there are, (…, 1).
        """
        count = self._count_before(cluster, position)
        slots = torch.arange(self.kept, device=cluster.device)
        number = count - 1 - (count - 1 - slots) % self.kept
        return self.positions.gather(-1, cluster * self.kept + slots), number, count

    def take(self, source: RecentMembers, order: Tensor, into: slice) -> None:
        """Lists ``into`` of the first axis become copies of lists ``order`` of such, or of these."""
        self.counts[into] = source.counts[order]
        self.positions[into] = source.positions[order]
        self.clusters[into] = source.clusters[order]

    def truncate(self, length: int) -> None:
        """Have the lists of the first ``length`` positions alone; it sorts those."""
        self.begin(self.clusters[..., :length])

    def _count_before(self, cluster: Tensor, position: int) -> Tensor:
        """Members of a cluster without this position, which is the last one if it is among them."""
        count = self.counts.gather(-1, cluster)
        last = self.positions.gather(-1, cluster * self.kept + (count - 1) % self.kept)
        return count - ((count > 0) & (last == position)).long()
