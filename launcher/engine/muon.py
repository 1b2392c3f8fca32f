"""Muon (Jordan et al. 2024), exact under every ZeRO stage: element-wise momentum, orthogonal matrix updates.

ZeRO cuts matrices anywhere. Momentum is element-wise, so it is stored like Adam's moments, next to a rank's share of
the weights. An update needs the complete matrix. Each matrix has an owner among the ranks that hold a part of it. The
others send it their parts of the momentum, and get back their parts of the orthogonal matrix. Each matrix is thus
computed once. DeepSpeed clips gradients before all this.

Letters: W ranks, R rows and C columns of a matrix.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from longstride.launcher.engine.states import MOMENTUM, Vector

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz polynomial
SMALLEST_NORM = 1e-15  # below it, the square underflows in fp32 and the norm would be 0
BATCH_ELEMENTS = 1 << 24  # of matrices in one batch


class Matrix(NamedTuple):
    """A matrix in the flat elements of a parameter, beginning at ``start``."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The first element after it."""
        return self.start + self.rows * self.columns


def matrices_in(shape: Sequence[int], rows: Sequence[int] = ()) -> list[Matrix]:
    """Split a parameter of two or more dimensions into matrices of its last two.

    ``rows`` are the heights of matrices that are stacked in one parameter.
    """
    heights = tuple(rows) or (shape[-2],) * math.prod(shape[:-2])
    matrices, start = [], 0
    for height in heights:
        matrices.append(Matrix(start, height, shape[-1]))
        start = matrices[-1].stop
    assert start == math.prod(shape), f"{rows} rows are not those of {tuple(shape)}"
    return matrices


def orthogonal(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices (…, R, C), R ≤ C, with all singular values brought close to 1, in their own dtype.

    Uses a Newton-Schulz iteration with a polynomial that is steep at 0 instead of exact at 1. After five steps singular
    values are between 0.7 and 1.2. Values of almost zero stay so.
    """
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = matrices / norms.clamp_min(SMALLEST_NORM).to(matrices.dtype)
    for _ in range(steps):
        squares = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon for the groups with a ``momentum``, AdamW for the others.

    Gradients are averaged with the momentum (one step ahead with ``nesterov``) and made orthogonal. The update is that
    times the rate times √max(1, R/C), which changes a layer's output equally for all shapes. Weight decay is decoupled.
    Matrices are computed and exchanged in ``dtype``.

    Before ``lay_out`` is called, a step leaves matrices alone: DeepSpeed takes one while it builds its fp16 optimiser.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype) -> None:
        self._adam = torch.optim.AdamW([group for group in groups if "momentum" not in group], lr=0.0, fused=True)
        self._dtype = dtype
        self._plans: dict[Tensor, _Plan] = {}
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    def lay_out(
        self, vectors: Iterable[Vector], matrices: Mapping[str, Sequence[Matrix]], device: torch.device
    ) -> None:
        """Set where the matrices of each parameter lie, and where they are computed. All ranks must call.

        ``matrices`` has Muon's parameters by name.
        """
        self._device = device
        for vector in vectors:
            if MOMENTUM in vector.moments:
                self._plans[vector.master] = _Plan(vector, matrices, torch.empty(0, dtype=self._dtype, device=device))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step for the parameters with gradients. All ranks must call, with the same vectors."""
        self._adam.state = self.state
        self._adam.param_groups = [group for group in self.param_groups if "momentum" not in group]
        self._adam.step()
        work = []  # group, parameter, plan and complete matrices
        for group in self.param_groups:
            if "momentum" not in group:
                continue
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in self._plans:
                    continue
                state, plan = self.state[parameter], self._plans[parameter]
                if MOMENTUM not in state:
                    state[MOMENTUM] = torch.zeros_like(parameter)
                update = state[MOMENTUM].lerp_(parameter.grad, 1 - group["momentum"])
                if group["nesterov"]:
                    update = torch.lerp(parameter.grad, update, group["momentum"])
                update = update.flatten().to(self._device, self._dtype)
                work.append((group, parameter, plan, plan.gather(update)))
                del update  # free this share of all matrices
        flat = [(group["steps"], matrix) for group, _, _, matrices in work for matrix in matrices]
        updates = iter(_orthogonalise(flat))
        for group, parameter, plan, matrices in work:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            weights = parameter.view(-1)
            for at, scale, part in plan.scatter([next(updates) for _ in matrices]):
                weights[at : at + len(part)].add_(part.to(weights.device), alpha=-group["lr"] * scale)


def _orthogonalise(matrices: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """Return the orthogonal matrices for pairs (steps, matrix), batching those of equal or transposed shape."""
    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, (steps, matrix) in enumerate(matrices):
        alike[steps, min(matrix.shape), max(matrix.shape)].append(number)
    results: list[Tensor] = [matrix for _, matrix in matrices]
    for (steps, rows, columns), numbers in alike.items():
        count = max(1, BATCH_ELEMENTS // (rows * columns))
        for first in range(0, len(numbers), count):
            batch = numbers[first : first + count]
            wide = [results[number] if len(results[number]) == rows else results[number].mT for number in batch]
            for number, result in zip(batch, orthogonal(torch.stack(wide), steps), strict=True):
                results[number] = result if len(results[number]) == rows else result.mT
    return results


class _Part(NamedTuple):
    """Elements of a matrix that a rank holds, beginning at ``at`` in its vector."""

    at: int
    start: int
    stop: int


class _Plan:
    """The owner of each matrix of a vector, and the parts that ranks exchange. Equal on all ranks but for the rank."""

    def __init__(self, vector: Vector, matrices: Mapping[str, Sequence[Matrix]], like: Tensor) -> None:
        self._rank, self._group, self._like = vector.rank, vector.group, like
        ranks = range(len(vector.slices))
        holders: dict[tuple[str, Matrix], dict[int, _Part]] = {}
        for rank, slices in enumerate(vector.slices):
            for name, at, start, stop in slices:
                for matrix in matrices[name]:
                    low, high = max(start, matrix.start), min(stop, matrix.stop)
                    if low < high:
                        part = _Part(at + low - start, low - matrix.start, high - matrix.start)
                        holders.setdefault((name, matrix), {})[rank] = part
        # A matrix on one rank stays there. The others go to the holder with the least work, largest first.
        load = [0] * len(ranks)
        self._local: list[tuple[Matrix, _Part]] = []  # only on this rank
        shared = []
        for (_, matrix), parts in holders.items():
            if len(parts) > 1:
                shared.append((matrix, parts))
                continue
            ((rank, part),) = parts.items()
            load[rank] += _work(matrix)
            if rank == self._rank:
                self._local.append((matrix, part))
        # By owner: matrices and their parts by rank.
        self._shared: list[list[tuple[Matrix, dict[int, _Part]]]] = [[] for _ in ranks]
        for matrix, parts in sorted(shared, key=lambda pair: -_work(pair[0])):
            owner = min(parts, key=lambda rank: load[rank])
            load[owner] += _work(matrix)
            self._shared[owner].append((matrix, parts))
        # Parts that this rank sends to each owner, and receives from each holder, in that order.
        mine = self._shared[self._rank]
        self._sent = [[(m, p[self._rank]) for m, p in self._shared[to] if self._rank in p] for to in ranks]
        self._received = [[(number, p[of]) for number, (_, p) in enumerate(mine) if of in p] for of in ranks]
        self._sent_sizes = [sum(part.stop - part.start for _, part in parts) for parts in self._sent]
        self._received_sizes = [sum(part.stop - part.start for _, part in parts) for parts in self._received]

    def gather(self, update: Tensor) -> list[Tensor]:
        """Return this rank's matrices (R, C), given its share of all."""
        local = [
            update[part.at : part.at + part.stop].view(matrix.rows, matrix.columns) for matrix, part in self._local
        ]
        if not any(self._shared):
            return local
        parts = [update[part.at : part.at + part.stop - part.start] for to in self._sent for _, part in to]
        received = self._exchange(parts, self._sent_sizes, self._received_sizes)
        mine = [update.new_empty(matrix.rows * matrix.columns) for matrix, _ in self._shared[self._rank]]
        at = 0
        for number, part in itertools.chain.from_iterable(self._received):
            size = part.stop - part.start
            mine[number][part.start : part.stop] = received[at : at + size]
            at += size
        shapes = ((matrix.rows, matrix.columns) for matrix, _ in self._shared[self._rank])
        return local + [matrix.view(shape) for matrix, shape in zip(mine, shapes, strict=True)]

    def scatter(self, matrices: Sequence[Tensor]) -> list[tuple[int, float, Tensor]]:
        """Return this rank's share of all, given its matrices: each part's position, scale and elements."""
        results = [
            (part.at, _scale(matrix), result.flatten())
            for (matrix, part), result in zip(self._local, matrices, strict=False)
        ]
        if not any(self._shared):
            return results
        mine = [matrix.flatten() for matrix in matrices[len(self._local) :]]
        parts = [mine[number][part.start : part.stop] for of in self._received for number, part in of]
        received = self._exchange(parts, self._received_sizes, self._sent_sizes)
        at = 0
        for matrix, part in itertools.chain.from_iterable(self._sent):
            size = part.stop - part.start
            results.append((part.at, _scale(matrix), received[at : at + size]))
            at += size
        return results

    def _exchange(self, parts: list[Tensor], to: list[int], of: list[int]) -> Tensor:
        """Send so many elements to each rank, and return those received."""
        received = self._like.new_empty(sum(of))
        torch.distributed.all_to_all_single(received, torch.cat([self._like, *parts]), of, to, group=self._group)
        return received


def _work(matrix: Matrix) -> int:
    """Return the cost of making a matrix orthogonal, in multiplications up to a factor."""
    return matrix.rows * matrix.columns * min(matrix.rows, matrix.columns)


def _scale(matrix: Matrix) -> float:
    return math.sqrt(max(1.0, matrix.rows / matrix.columns))
