"""What follows from seconds."""

import pytest

from benchmarks.attention.cases import Group
from benchmarks.attention.figures import PHASES, compulsory_bytes, derived, fastest, ideal, ideals, operations
from benchmarks.report import rounded

GROUP = Group(context=1_000, stride=32, head_width=64, dtype="bfloat16", heads=4, batch=2)


def test_operations_count_two_products_forward_and_five_backward() -> None:
    assert operations(GROUP, 10, "forward") == 2 * 4 * 10 * (2 * 2 * 64)
    assert operations(GROUP, 10, "backward") == 2 * 4 * 10 * (5 * 2 * 64)


def test_compulsory_bytes_count_every_tensor_once() -> None:
    row, lse = 64 * 2, 4
    assert compulsory_bytes(GROUP, "forward") == 2 * 4 * 1_000 * (4 * row + lse)
    assert compulsory_bytes(GROUP, "backward") == 2 * 4 * 1_000 * (8 * row + lse)


@pytest.mark.parametrize(
    "density, num_bytes, wanted",
    [(0.5, 10, (1.0, "operations")), (0.01, 300, (3.0, "bytes")), (0.5, 100, (1.0, "operations"))],
)
def test_ideal_is_what_takes_longer(density: float, num_bytes: int, wanted: tuple[float, str]) -> None:
    assert ideal(2.0, density, num_bytes, 100.0) == wanted


def test_ideal_is_unknown_without_dense_attention() -> None:
    assert ideal(None, 0.5, 10, 100.0) == (None, None)
    seconds, bound = ideals(GROUP, dict.fromkeys(PHASES), 0.5, 1e9)
    assert set(seconds.values()) == set(bound.values()) == {None}


def test_ideal_of_both_phases_is_the_sum() -> None:
    bandwidth = compulsory_bytes(GROUP, "forward") / 3.0
    seconds, bound = ideals(GROUP, {"forward": 2.0, "backward": 40.0, "both": 42.0}, 0.5, bandwidth)
    assert seconds == {"forward": 3.0, "backward": 20.0, "both": 23.0}
    assert bound == {"forward": "bytes", "backward": "operations", "both": "mixed"}


def test_dense_is_the_fastest_kernel_of_each_phase() -> None:
    kernels = {
        "flash": {"forward": 1.0, "backward": 5.0, "both": 6.0},
        "cudnn": {"forward": 2.0, "backward": 3.0, "both": 5.0},
    }
    assert fastest(kernels) == (
        {"forward": 1.0, "backward": 3.0, "both": 5.0},
        {"forward": "flash", "backward": "cudnn", "both": "cudnn"},
    )
    assert fastest({}) == (dict.fromkeys(PHASES), dict.fromkeys(PHASES))


def test_a_row_tells_all_that_follows() -> None:
    seconds = {"forward": 0.5, "backward": 1.0, "both": 1.5}
    dense = {"forward": 2.0, "backward": 4.0, "both": 6.0}
    flex = {"forward": 1.0, "backward": None, "both": None}
    allowed = 1_000 * 1_001 // 8
    found = derived(GROUP, seconds, dense, flex, allowed, {"forward": 2 * allowed, "backward": None}, 1e30)
    assert found["density"] == 0.25
    assert found["ratio_to_dense"] == {"forward": 4.0, "backward": 4.0, "both": 4.0}
    assert found["ratio_to_flex"] == {"forward": 2.0, "backward": None, "both": None}
    assert found["fraction_of_ideal"] == {"forward": 1.0, "backward": 1.0, "both": 1.0}
    assert found["bound"]["both"] == "operations"
    assert found["tflops_on_visited"]["forward"] == rounded(2 * operations(GROUP, allowed, "forward") / 0.5 / 1e12)
    assert found["tflops_on_visited"]["backward"] is None
    assert found["gigabytes_per_second"]["forward"] == rounded(compulsory_bytes(GROUP, "forward") / 0.5 / 1e9)
