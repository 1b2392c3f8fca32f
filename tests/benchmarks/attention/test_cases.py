"""Which cases are measured."""

import torch

from benchmarks.attention import cases
from benchmarks.attention.attention import groups_of, read_options
from benchmarks.attention.bars import CPU_BARS, GPU_BARS, Measured, Results
from benchmarks.attention.measure import allowed_pairs, visited_pairs
from tests.benchmarks.attention.test_bars import PHASES, timing

BY_BYTES = dict.fromkeys(PHASES, "bytes")


def measured_by(preset: list[cases.Group], device_type: str, bars: tuple) -> list[Measured | None]:
    rows = [timing(name, ratio=1.0, bound=BY_BYTES) | group.sizes() for group in preset for name in group.names]
    file = {"device": "a", "device_type": device_type, "copy_bytes_per_second": 1e9, "timings": rows}
    return [bar.measure(Results(device_type, [file])) for bar in bars]


def test_the_bars_preset_holds_every_case_that_a_bar_is_on() -> None:
    on_gpu = measured_by(cases.bars("cuda"), "cuda", GPU_BARS)
    assert [bar.what for bar, found in zip(GPU_BARS, on_gpu, strict=True) if found is None] == [
        bar.what for bar in GPU_BARS if "training step" in bar.what
    ]
    on_cpu = measured_by(cases.bars("cpu"), "cpu", CPU_BARS)
    assert None not in on_cpu


def test_options_reach_the_groups() -> None:
    words = "--device cpu --contexts 64 --stride 4 --heads 3 --batch 2 --summary 1 --output /tmp/none.json"
    (group,) = groups_of(read_options(words.split()))
    assert (group.heads, group.batch, group.stride, group.summary) == (3, 2, 4, 1)


def test_pairs_agree_with_the_mask() -> None:
    position = torch.arange(96)
    for name, pattern in cases.patterns_of(16, 2).items():
        allowed = int(pattern.mask(position[:, None], position[None, :]).sum())
        assert allowed_pairs(pattern, 96) == allowed, name
        for phase in ("forward", "backward"):
            visited = visited_pairs(pattern, 96, phase, device=torch.device("cpu"), dtype=torch.float32, head_width=16)
            assert visited is None or visited >= allowed, name
