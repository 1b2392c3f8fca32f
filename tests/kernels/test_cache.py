"""Caches that are bounded by memory."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longstride.kernels import plan
from longstride.kernels.backends import Saved
from longstride.kernels.cache import ENTRY_BYTES, BoundedCache, cached
from longstride.kernels.patterns import Local
from tests.harness.backends import WITH_TRITON


@dataclass
class Holder:
    """What holds a tensor."""

    tensor: Tensor
    again: tuple[Tensor, ...]


def test_cache_holds_as_many_entries_as_fit_and_those_used_recently() -> None:
    values: BoundedCache[int] = BoundedCache(limit_bytes=3 * ENTRY_BYTES)
    for number in range(3):
        values.put(number, number)
    values.put(3, 3)
    assert len(values) == 3 and values.get(0) is None
    assert values.get(1) == 1
    values.put(4, 4)
    assert values.get(1) == 1 and values.get(2) is None and len(values) == 3
    values.put(4, 5)
    assert values.get(4) == 5 and len(values) == 3
    values.clear()
    assert len(values) == 0 and values.get(4) is None


def test_tensors_count_once_an_entry_and_the_last_entry_stays() -> None:
    values: BoundedCache[Holder] = BoundedCache(limit_bytes=4 * ENTRY_BYTES + 1)
    tensor = torch.empty(2 * ENTRY_BYTES, dtype=torch.uint8)
    values.put("small", Holder(tensor[:1], ()))
    values.put("once", Holder(tensor, (tensor, tensor)))
    assert len(values) == 2
    values.put("large", Holder(tensor, (tensor.clone(), tensor.clone())))
    assert len(values) == 1 and values.get("large") is not None


def test_a_function_computes_once_for_each_of_its_arguments() -> None:
    asked: list[int] = []

    @cached
    def half(number: int) -> int | None:
        """Or None."""
        asked.append(number)
        return number // 2 if number % 2 == 0 else None

    assert [half(2), half(4), half(2), half(3), half(3)] == [1, 2, 1, None, None]
    assert asked == [2, 4, 3, 3] and half.__doc__ == "Or None."
    half.cache_clear()
    assert half(2) == 1 and asked[-1] == 2


def test_threads_may_share_a_cache() -> None:
    values: BoundedCache[int] = BoundedCache(limit_bytes=8 * ENTRY_BYTES)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(2_000):
            key = (seed + 7 * step) % 12
            found = values.get(key)
            if found not in (None, key):
                wrong.append(found)
            values.put(key, key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(values) == 8


@WITH_TRITON
def test_hundreds_of_patterns_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers with patterns of their own ask for them in turn, step after step."""
    from longstride.kernels.backends import triton as backend
    from longstride.kernels.backends.triton import decode, packing
    from longstride.kernels.backends.triton.launch_plan import LaunchPlan

    q = torch.empty(1, 1, 4_096, 16)
    monkeypatch.setattr(backend, "PLANS", BoundedCache())
    monkeypatch.setattr(LaunchPlan, "run", lambda plan, inputs: (None,) * len(plan.results))
    planned: list[object] = []
    for module in (packing, decode):
        fields = module.view_fields
        monkeypatch.setattr(module, "view_fields", lambda *given, fields=fields: planned.append(1) or fields(*given))

    def cycle() -> int:
        planned.clear()
        for window in range(1_001, 1_261):
            backend.forward(q, q, q, (Local(window),), 1.0)
            backend.backward(Saved(q, q, q, q, q, q[..., 0], None), (Local(window),), 1.0)
            decode.plan_layout((Local(window),), 4_096, 256, torch.device("cpu"))
            assert plan.num_pairs(Local(window), 4_096) > 0
        return len(planned)

    assert cycle() == 4 * 260  # passes forward, over keys and over queries, and those of single queries
    assert cycle() == 0
