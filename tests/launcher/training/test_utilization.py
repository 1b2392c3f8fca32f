"""The operations of a step against those that torch counts, and what they are divided by."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstride.kernels import num_pairs
from longstride.kernels.backends.cpu import attention as cpu
from longstride.kernels.patterns import Dense, Fixed, Local, Pattern, Strided
from longstride.launcher.config import load_config
from longstride.launcher.ranks import Ranks
from longstride.launcher.training import profile as module
from longstride.launcher.training.profile import Utilization, context_work, measure_peak
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import small

CPU = torch.device("cpu")


@pytest.mark.parametrize("pattern", [Local(40), Strided(16), Fixed(16, 4), Dense()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_visited_pairs_are_those_that_the_cpu_multiplies(pattern: Pattern, dtype: torch.dtype) -> None:
    """The forward pass has 2 D operations a visited pair for the scores, and 2 D for the sum of values."""
    context, width = 256, 16
    q = torch.randn(1, 1, context, width, dtype=dtype)

    def of_baddbmm(_: Any, left: torch.Size, right: torch.Size, **__: Any) -> int:
        return 2 * left.numel() * right[-1]

    in_place = {torch.ops.aten.baddbmm_: of_baddbmm}  # which torch leaves out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counted:
        cpu.forward(q, q, q, (pattern,), 0.25)
    visited = num_pairs(pattern, context, q[:0])
    assert visited >= num_pairs(pattern, context)
    if cpu.dense.fits(q, q, (pattern,)):  # whose tiles torch does not tell
        assert visited == context * (context + 1) // 2
    else:
        assert counted.get_total_flops() == 4 * width * visited


def test_the_reference_visits_every_pair() -> None:
    assert num_pairs(Local(3), 64, torch.empty(0, 8), "reference") == 64**2


def test_operations_of_a_context_are_three_times_those_that_torch_counts_forward() -> None:
    """By the reference, whose products torch sees: it visits all pairs."""
    config = small(backend="reference", attention={"type": "local", "window": 5, "key_value_heads": 2})
    model, tokens = SparseTransformer(config), torch.randint(256, (1, 40))
    with FlopCounterMode(display=False) as forward:
        model(tokens, return_nats=True)
    assert context_work(config, torch.empty(0)) == 3 * forward.get_total_flops()
    allowed = context_work(config)
    beyond = 3 * 4 * (40**2 - num_pairs(Local(5), 40))  # pairs of all layers and heads that are masked
    assert context_work(config, torch.empty(0)) == allowed + 3 * beyond * 4 * config.width // 4


def test_dense_equivalent_counts_every_earlier_position(config_file: Path) -> None:
    config = load_config(config_file, ["model.backend=auto", "model.context=64"])
    work = Utilization(config, Ranks(), CPU)
    network, context = config.model, config.model.context
    weights = sum(
        module.weight.numel() for module in SparseTransformer(network).modules() if isinstance(module, torch.nn.Linear)
    )
    pairs = network.layers * network.heads * context * (context + 1) // 2
    assert work.dense == 3 * 8 * (2 * context * weights + 4 * pairs * network.width // network.heads)
    assert work.visited < work.dense


def test_utilization_is_operations_by_time_and_the_peak_of_all_devices(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_peak", lambda *_: 1e9)
    found = Utilization(load_config(config_file), Ranks(), CPU)
    assert found.peak == 1e9
    fields = found.fields(0.5)
    assert fields == {"mfu": found.visited / 0.5e9, "mfu_dense_equivalent": found.dense / 0.5e9}


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [("NVIDIA H200", "bf16", 989), ("NVIDIA H100 PCIe", "fp16", 756), ("NVIDIA A100-SXM4-80GB", "fp32", 19.5)],
)
def test_peaks_of_known_cards(name: str, precision: str, tera: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert module.listed_peak(torch.device("cuda"), precision) == tera * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another")
    assert module.listed_peak(torch.device("cuda"), precision) is None
    assert module.listed_peak(CPU, precision) is None


def test_the_measured_peak_is_that_of_a_product_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    peak = measure_peak(CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    with FlopCounterMode(display=False) as counted:
        torch.mm(torch.ones(256, 256), torch.ones(256, 256))
    assert counted.get_total_flops() == 2 * 256**3
    assert 1e8 < peak < 1e14


def test_a_slow_first_product_does_not_lower_the_measured_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a process that loads code for it: every later product takes a millisecond."""
    times = iter([0.0, 0.07] + [each for number in range(1, 40) for each in (number, number + 0.001)])
    monkeypatch.setattr(module, "device_seconds", lambda _: next(times))
    assert measure_peak(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.001)


def test_a_busy_machine_is_measured_by_large_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product waits seven milliseconds for its turn, and takes next to nothing of its own."""
    times = iter([each for number in range(40) for each in (number, number + 0.007)])
    monkeypatch.setattr(module, "device_seconds", lambda _: next(times))
    assert measure_peak(CPU, torch.float32) == pytest.approx(2 * 512**3 / 0.007)  # a tenth of a second is enough


def test_a_run_records_its_utilization_and_memory(trained: Any) -> None:
    lines = [json.loads(line) for line in (trained("alone", 1) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["split"] == "train"]
    for line in steps:
        assert 0 < line["mfu"] < 1.5 and 0 < line["mfu_dense_equivalent"] < 1.5
        assert line["peak_memory_bytes"] > 10**8
    shares = {round(line["mfu"] * line["seconds"] / steps[0]["mfu"] / steps[0]["seconds"], 9) for line in steps}
    assert shares == {1.0}  # every step has as many operations
    assert all("mfu" not in line for line in lines if line["split"] != "train")
