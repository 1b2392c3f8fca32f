"""Selections on the Triton backend: passes, overlaps, slices and tiles, in the interpreter where there is no card.

Letters: B batch, H heads, N positions.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.kernels.selections import Part, Selection, recent_members
from tests.harness.backends import DEVICES, DTYPES, WITH_TRITON, use_tiles
from tests.harness.oracles import (
    Shape,
)
from tests.kernels.test_selections import check, clusters, on_device, random_part, selections

pytestmark = WITH_TRITON

SHAPE = Shape(2, 2, 41, 16, 24)
HALF, BRAIN, SINGLE, DOUBLE = DTYPES


def natural_parts(batch: int, heads: int, context: int) -> Selection:
    """Parts of natural orders, which share a pass over queries, one of few keys, and one of any orders."""
    row = torch.arange(context, dtype=torch.int32).expand(batch, heads, context)
    near = Part(None, None, (row - 6).clamp_min(0), row + 1)
    first = Part(None, None, torch.zeros_like(row), (row + 1).clamp_max(4))
    few = random_part(batch, heads, context, seed=4)._replace(query_order=None)
    return Selection((near, random_part(batch, heads, context, seed=6), first, few), context, disjoint=False)


@pytest.mark.parametrize("dtype", [pytest.param(HALF, marks=pytest.mark.campaign), BRAIN])
def test_parts_of_one_order_share_a_pass_and_count_a_pair_once(dtype: torch.dtype) -> None:
    from longstride.kernels.backends.triton.selected import SelectedPlanner

    selection = natural_parts(*SHAPE[:3])
    q = torch.empty(*SHAPE[:3], 16, device=DEVICES["triton"])
    planner = SelectedPlanner((q, q, q), on_device(selection, "triton"))
    choices = planner.choices("forward", "all")
    passes = [planner.pack("queries", "all", number, choice) for number, choice in enumerate(choices)]
    assert [one.earlier for one in passes] == [(0, 2, 3), (1,)]
    over_keys = [
        planner.pack("keys", "all", number, choice).num_rows
        for number, choice in enumerate(planner.choices("dkdv", "all"))
    ]
    assert over_keys == [31, 31, 41, 41] and planner.ends_with_every_key("all")
    check("triton", selection, dtype, SHAPE)


@pytest.mark.parametrize("edges", [(16, 32), pytest.param((32, 16), marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["rounds", "any orders"])
def test_tiles_may_have_any_edges_and_passes_any_slices(
    name: str, edges: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices of one tile of queries; without a last pass that adds up, sums are gathered."""
    from longstride.kernels.backends.triton import configurations, launch_plan

    use_tiles(monkeypatch, edges, closed=None)
    monkeypatch.setattr(configurations, "SHORTEST_SLICE", 1)
    monkeypatch.setattr(launch_plan, "num_processors", lambda device: 64)
    shape = Shape(1, 2, 75, 16, 16)
    check("triton", selections(*shape[:3])[name], HALF, shape, scale=-0.3)


@pytest.mark.campaign
@pytest.mark.parametrize("context, window", [(512, 64), (2048, 128)])
@pytest.mark.parametrize("kind", ["random", "one", "rounds"])
def test_long_contexts(
    kind: str, context: int, window: int, monkeypatch: pytest.MonkeyPatch, tiles_of_a_card: None
) -> None:
    """Random clusters, all in one, and three rounds."""
    use_tiles(monkeypatch, (64, 64), closed=None)
    size = (1, 2, context)
    names = [(kind, 0)] if kind != "rounds" else [("random", seed) for seed in range(3)]
    parts = tuple(recent_members(clusters(name, *size, seed=seed), window=window) for name, seed in names)
    check("triton", Selection(parts, window, disjoint=len(parts) == 1), BRAIN, Shape(*size, 32, 32))


class NoHost(TorchDispatchMode):
    """Fails where the host would wait for the device: to read a value, to allocate by one, to copy there or back."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.name().removeprefix("aten::").split(".")[0], kwargs or {}
        copies = name == "_to_copy" and kwargs.get("device") is not None  # else only to another dtype
        assert name not in self.WAITS and not copies, f"{function} waits for the device"
        return function(*args, **kwargs)


def test_the_host_reads_no_value() -> None:
    """All that a launch reads is made by operations on the device, whose sizes follow from those of the tensors."""
    from longstride.kernels.backends.triton.selected import SelectedPlanner

    q = torch.empty(*SHAPE[:3], 16, device=DEVICES["triton"])
    for name in ("rounds", "any orders, twice", "expanded"):
        selection = on_device(selections(*SHAPE[:3])[name], "triton")

        def launched(selection: Selection = selection) -> list[Tensor]:
            planner = SelectedPlanner((q, q, q), selection)
            read = []
            for kernel, rows in (("forward", "queries"), ("dkdv", "keys")):
                for number, choice in enumerate(planner.choices(kernel, "all")):  # type: ignore[arg-type]
                    one = planner.pack(rows, "all", number, choice)  # type: ignore[arg-type]
                    read += [one.table, one.data]
            return [*read, *planner.sources("all", (1,) * len(planner.by_keys))[:2]]

        tables = [id(tensor) for tensor in launched()[::2]]  # copied to the device once, as they follow from sizes
        with NoHost():
            again = launched()
        assert [id(tensor) for tensor in again[::2]] == tables


def test_what_heads_share_is_kept_once() -> None:
    from longstride.kernels.backends.triton.selected import SelectedPlanner

    q = torch.empty(*SHAPE[:3], 16, device=DEVICES["triton"])
    planner = SelectedPlanner((q, q, q), on_device(selections(*SHAPE[:3])["expanded"], "triton"))
    (choice,) = planner.choices("forward", "all")
    assert planner.pack("queries", "all", 0, choice).data.numel() == 3 * SHAPE.context  # one order serves both sides
