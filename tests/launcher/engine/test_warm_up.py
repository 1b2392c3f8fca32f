"""What is compiled before the processes meet is what a step launches: held launch by launch, of which none is made."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from longstride.kernels.backends.triton import PLANS
from longstride.kernels.backends.triton.launch_plan import Planner
from longstride.launcher.engine import device as device_module
from longstride.launcher.engine.device import compile_kernels, run_parts
from longstride.launcher.ranks import LoneDivision
from longstride.sparse_model import Division, ModelConfig, SparseTransformer

PATTERNS: dict[str, dict[str, Any]] = {
    "fixed": {"type": "fixed", "stride": 8, "summary": 2, "combine": "interleaved"},
    "merged": {"type": "fixed", "stride": 8, "summary": 2, "combine": "merged"},
    "strided": {"type": "strided", "stride": 8},
    "routing": {"type": "routing", "clusters": 2, "window": 24},
    "columns": {"type": "strided", "stride": 8, "combine": "interleaved"},
}
Key = tuple[object, ...]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Key]]:
    """What a compiler would tell apart of all launches: the kernel, its constants, its types, and kinds of integers.

    The launches themselves are left out, as the interpreter takes its time: what they compute decides nothing here.
    """
    found: set[Key] = set()

    def record(
        self: Planner, kernel: Any, programs: int, tensors: Any, strided: Any, sizes: Any, tiles: Any, **constants: Any
    ) -> None:
        integers = [stride for slot in strided for stride in slot.strides[:3]]
        integers += [self.heads, self.context, *sizes]
        kinds = tuple((number == 1, number % 16 == 0) for number in integers)
        types = tuple(getattr(tensor, "dtype", None) for tensor in tensors)
        found.add((kernel.fn.__name__, tiles, tuple(sorted(constants.items())), types, kinds))

    monkeypatch.setattr(Planner, "launch", record)
    monkeypatch.setattr(PLANS, "get", lambda key: None)  # so that each call is planned
    yield found


def model_config(attention: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "context": 48,
            "layers": 3,
            "heads": 2,
            "width": 32,
            "attention": attention,
            "embedding": {"type": "text", "row_width": 8},
            "dropout": 0.0,
            "backend": "triton",
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("recomputed", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_warm_up_launches_what_a_step_and_an_evaluation_launch(
    pattern: str, dtype: torch.dtype, recomputed: bool, launches: set[Key]
) -> None:
    config = model_config(PATTERNS[pattern])
    run_parts(config, 2, dtype, torch.device("cpu"))
    warm = set(launches)
    launches.clear()
    model = SparseTransformer(config).to(dtype)
    if recomputed:
        model.activation_checkpoint = lambda *inputs: torch.utils.checkpoint.checkpoint(*inputs, use_reentrant=False)
    tokens = torch.arange(96).reshape(2, 48)
    model(tokens, return_nats=True).sum().backward()
    assert launches == warm and len({key[0] for key in warm}) > 2
    launches.clear()
    with torch.no_grad():
        model.eval()(tokens, return_nats=True)
    assert launches and launches < warm
    scored = set(launches)
    launches.clear()
    run_parts(config, 2, dtype, torch.device("cpu"), training=False)
    assert launches == scored


@pytest.mark.parametrize(
    ("pattern", "exchange", "apart"),
    [
        *((pattern, "auto", False) for pattern in PATTERNS),
        *(pytest.param(pattern, "keys", False, marks=pytest.mark.campaign) for pattern in PATTERNS),
        *(
            pytest.param(pattern, "heads", apart, marks=pytest.mark.campaign)
            for pattern in PATTERNS
            for apart in (False, True)
            if not (apart and pattern == "routing")  # which reads whole contexts
        ),
    ],
)
def test_warm_up_launches_what_a_step_of_a_group_launches(
    pattern: str, exchange: Literal["heads", "keys", "auto"], apart: bool, launches: set[Key]
) -> None:
    """Each process of it that which it computes itself, and as all together would: of whole contexts, fewer heads."""
    config = model_config(PATTERNS[pattern])
    found = []
    for rank in range(2):
        run_parts(
            config, 2, torch.float32, torch.device("cpu"), apart=apart, division=Division(rank, 2, exchange=exchange)
        )
        warm = set(launches)
        launches.clear()
        model = SparseTransformer(config)
        model.divide(LoneDivision(rank, 2, exchange=exchange))
        tokens = torch.arange(96).reshape(2, 48)
        model(tokens, return_nats=True, begins=tokens % 48 == 0 if apart else None).sum().backward()
        assert launches == warm and len({key[0] for key in warm}) > 2
        found.append(warm)
        launches.clear()
    run_parts(config, 2, torch.float32, torch.device("cpu"), apart=apart)
    assert launches != found[0]


def test_other_batches_are_other_kernels(launches: set[Key]) -> None:
    """So the warm-up has the run's own sizes: this is what the test above can see."""
    config = model_config(PATTERNS["merged"])
    run_parts(config, 2, torch.float32, torch.device("cpu"))
    two = set(launches)
    launches.clear()
    run_parts(config.model_copy(update={"context": 40}), 2, torch.float32, torch.device("cpu"))
    assert launches != two


def test_nothing_is_compiled_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "run_parts", pytest.fail)
    compile_kernels(model_config(PATTERNS["fixed"]), 2, "fp32", torch.device("cpu"))


def test_one_process_compiles_at_a_time_by_a_lock_in_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with device_module._one_at_a_time():
        [path] = (tmp_path / "cache").iterdir()
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    with device_module._one_at_a_time():
        assert [path.name for path in (tmp_path / "home/.triton/cache").iterdir()] == [path.name]


def test_kernels_are_compiled_where_nothing_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(FileNotFoundError, match="inside"), device_module._one_at_a_time():
        raise FileNotFoundError("inside")  # what fails there is not passed over
