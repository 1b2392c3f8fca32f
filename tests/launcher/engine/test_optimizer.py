"""Muon and the parts of the network: against one matrix at a time in fp64, and cut over ranks as ZeRO cuts."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.launcher.config import RunConfig
from longstride.launcher.engine import muon, states
from longstride.launcher.engine.muon import Matrix, Muon, matrices_in, orthogonal
from longstride.launcher.engine.optimizer import PARTS, make_optimizer, make_schedule, parameter_groups, rate_factor
from longstride.launcher.planning import costs
from longstride.launcher.planning.rehearsal import LiveBytes
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import model_json

RATES = {"matrices": 0.02, "embeddings": 0.003, "output": 0.004}
STACKED = {"in": (32, 32, 16), "wide": (), "tall": ()}
SHAPES = {"in": (80, 32), "wide": (24, 40), "tall": (48, 16)}
SETTINGS = {"momentum": 0.9, "nesterov": True, "steps": 5, "weight_decay": 0.1, "lr": 0.02}


def run_config(**train: Any) -> RunConfig:
    """A small run, with some keys of `train`."""
    settings = {"output": "run", "steps": 10, "global_batch": 2, "micro_batch": 2, "learning_rate": 0.001, **train}
    return RunConfig.model_validate(
        {"model": model_json(), "data": {"path": "data"}, "train": settings, "deepspeed": {}}
    )


def test_orthogonal_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 24, 40) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    values = torch.linalg.svdvals(orthogonal(matrices, 5))
    assert values.min() > 0.65 and values.max() < 1.25
    for size in (0.0, 1e-25, 1e-40):
        assert orthogonal(torch.full((1, 4, 8), size), 5).abs().max() < 1e-6


def expected_step(weight: Tensor, gradients: Sequence[Tensor], heights: Sequence[int]) -> Tensor:
    """Muon on one parameter in fp64: the polynomial is applied to singular values, matrix by matrix."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient.double()
        weight = weight * (1 - 0.02 * 0.1)
        ahead = 0.1 * gradient.double() + 0.9 * momentum
        updates = []
        for matrix in ahead.split(list(heights) or len(ahead)):
            u, s, v = torch.linalg.svd(matrix, full_matrices=False)
            s = s / matrix.norm()
            for _ in range(5):
                s = sum(c * s**power for c, power in zip(muon.COEFFICIENTS, (1, 3, 5), strict=True))  # type: ignore[assignment]
            updates.append(u @ s.diag() @ v * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
        weight = weight - 0.02 * torch.cat(updates)
    return weight


def cut(world_size: int, by_parameter: bool) -> list[tuple[states.Slice, ...]]:
    """All of ``SHAPES`` in one vector a rank, as ZeRO 3 cuts each, or ZeRO 1 and 2 cut all of them laid end to end."""
    sizes = {name: rows * columns for name, (rows, columns) in SHAPES.items()}
    shares = []
    share = -(-sum(sizes.values()) // world_size)
    for rank in range(world_size):
        slices, at, offset = [], 0, 0
        for name, size in sizes.items():
            own = -(-size // world_size)
            low, high = (
                (rank * own, (rank + 1) * own) if by_parameter else (rank * share - offset, (rank + 1) * share - offset)
            )
            begin, end = max(low, 0), min(high, size)
            if begin < end:
                slices.append(states.Slice(name, at if by_parameter else begin + offset - rank * share, begin, end))
            at, offset = at + own, offset + size
        shares.append(tuple(slices))
    return shares


def steps_of_ranks(
    shares: Sequence[tuple[states.Slice, ...]], weights: dict[str, Tensor], gradients: Any
) -> dict[str, Tensor]:
    """The weights after Muon's steps by all ranks, whose exchanges are copies within this process."""
    world_size = len(shares)
    barrier, posted = Barrier(world_size), [None] * world_size
    matrices = {name: matrices_in(SHAPES[name], rows) for name, rows in STACKED.items()}

    def flat(tensors: dict[str, Tensor], rank: int) -> Tensor:
        vector = torch.zeros(max(part.at + part.stop - part.start for share in shares for part in share))
        for part in shares[rank]:
            vector[part.at : part.at + part.stop - part.start] = tensors[part.name].flatten()[part.start : part.stop]
        return vector

    def run(rank: int) -> Tensor:
        master = torch.nn.Parameter(flat(weights, rank))
        other = torch.nn.Parameter(torch.zeros(1))
        optimizer = Muon([{"params": [master], **SETTINGS}, {"params": [other]}], torch.float32)
        vector = states.Vector(master, states.MOMENTS[1], tuple(shares), rank)
        optimizer.lay_out([vector], matrices, torch.device("cpu"))
        (plan,) = optimizer._plans.values()

        def exchange(parts: list[Tensor], to: list[int], of: list[int]) -> Tensor:
            posted[rank] = list(torch.cat([torch.empty(0), *parts]).split(to))  # type: ignore[call-overload]
            barrier.wait()
            received = torch.cat([posted[other][rank] for other in range(world_size)])  # type: ignore[index]
            barrier.wait()
            assert len(received) == sum(of)
            return received

        plan._exchange = exchange  # type: ignore[method-assign]
        for each in gradients:
            master.grad = flat(each, rank)
            optimizer.step()
        assert torch.equal(master.detach() == 0, flat({n: torch.ones(s) for n, s in SHAPES.items()}, rank) == 0)
        return master.detach()

    with ThreadPoolExecutor(world_size) as pool:
        masters = list(pool.map(run, range(world_size)))
    results = {name: torch.zeros(shape).flatten() for name, shape in SHAPES.items()}
    for master, share in zip(masters, shares, strict=True):
        for part in share:
            results[part.name][part.start : part.stop] = master[part.at : part.at + part.stop - part.start]
    return {name: flat.view(SHAPES[name]) for name, flat in results.items()}


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_muon_makes_whole_matrices_orthogonal_however_they_are_cut(world_size: int, by_parameter: bool) -> None:
    """Tolerance: entries below 1 are rounded to 2^-24, which the slope at 0 lets grow 3.4 times in each of 5 steps."""
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    gradients = [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(3)]
    found = steps_of_ranks(cut(world_size, by_parameter), weights, gradients)
    for name, weight in weights.items():
        expected = expected_step(weight, [each[name] for each in gradients], STACKED[name])
        assert (found[name] - expected).abs().max() < 3 * 0.02 * 2 * 3.4445**5 * 2**-24, name


def test_matrices_of_a_parameter_are_its_last_two_dimensions_or_what_is_stacked() -> None:
    assert matrices_in((6, 4)) == [Matrix(0, 6, 4)]
    assert matrices_in((2, 6, 4)) == [Matrix(0, 6, 4), Matrix(24, 6, 4)]
    assert matrices_in((6, 4), (1, 2, 3)) == [Matrix(0, 1, 4), Matrix(4, 2, 4), Matrix(12, 3, 4)]


def test_each_part_has_its_rate_and_one_schedule_scales_all() -> None:
    config = run_config(optimizer={"type": "muon", "rates": RATES}, warmup_steps=2, weight_decay=0.1)
    model = SparseTransformer(config.model)
    groups = parameter_groups(model, split=config.train.optimizer is not None)
    assert [group.part for group in groups] == list(PARTS)
    assert sorted(name for group in groups for name in group.names) == sorted(dict(model.named_parameters()))
    matrices, embeddings, output, vectors = (group.names for group in groups)
    assert all(name.startswith("blocks.") and name.endswith(".weight") and "norm" not in name for name in matrices)
    assert all(name.startswith("embedding.") for name in embeddings) and output == ["logits.weight"]
    assert "embedding.start" in vectors
    optimizer = make_optimizer(dict(model.named_parameters()), groups, config.train)
    schedule = make_schedule(optimizer, config.train)
    assert schedule.get_last_lr() == [0.01, 0.0015, 0.002, 0.0005]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.1, 0.0]
    assert config.train.rate_of("tables") == 0.001


def test_muon_has_no_moments_of_adam_and_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(optimizer={"type": "muon"})
    model = SparseTransformer(config.model)
    parameters = dict(model.named_parameters())
    groups = parameter_groups(model, split=config.train.optimizer is not None)
    optimizer = make_optimizer(parameters, groups, config.train)
    assert isinstance(optimizer, Muon)
    names = {parameter: name for name, parameter in parameters.items()}
    engine: Any = SimpleNamespace(optimizer=optimizer, param_names=names, zero_optimization=lambda: False)
    roles = model.parameter_roles()
    matrices = {name: matrices_in(parameters[name].shape, roles[name].rows) for name in groups[0].names}
    optimizer.lay_out(states.vectors(engine), matrices, torch.device("cpu"))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for vector in states.vectors(engine):
        assert set(optimizer.state[vector.master]) - {"step"} == set(vector.moments)
    kept = sum(t.nbytes for state in optimizer.state.values() for key, t in state.items() if key != "step")
    planned = costs.states(len(parameters), config, 1, 0)
    assert costs.MUON_BATCH == muon.BATCH_ELEMENTS
    assert kept == 4 * costs.moment_elements(config, SparseTransformer.num_parameters(config.model))
    with LiveBytes([*parameters.values(), *(p.grad for p in parameters.values() if p.grad is not None)]) as live:
        optimizer.step()
    assert 0.5 * planned.at_step < live.peak <= planned.at_step


@pytest.mark.parametrize(("fraction", "start"), [(0.5, 10), (0.25, 15), (1.0, 4)])
def test_decay_at_the_end_is_linear_to_the_final_rate(fraction: float, start: int) -> None:
    train = run_config(
        steps=20, warmup_steps=4, final_learning_rate=1e-4, schedule={"type": "wsd", "decay_fraction": fraction}
    ).train
    factors = [rate_factor(train, step) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0] and set(factors[4:start]) <= {1.0}
    falls = [one - other for one, other in pairwise(factors[start - 1 :])]
    assert falls == pytest.approx([0.9 / (20 - start)] * (20 - start))
    assert rate_factor(train, 30) == pytest.approx(0.1)
