"""What is left to go on with: numbers of processes that divide the batch, GPUs, hosts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster import start
from longstride.launcher.cluster.remaining import count_accelerators, fewer_slots, first_visible, usable_world_sizes
from longstride.launcher.config.run_config import RunConfig, load_config

OPTIONS = argparse.Namespace(
    config="X.json", resume="never", overrides=[], master_port=None, trust_checkpoint=False, replay=None
)


@pytest.fixture
def config(config_file: Path) -> RunConfig:
    """A batch of eight in micro-batches of two."""
    return load_config(config_file)


def test_world_sizes_divide_the_batch(config: RunConfig) -> None:
    assert usable_world_sizes(config, 7) == [4, 2, 1]
    assert usable_world_sizes(config, 3) == [2, 1]
    assert usable_world_sizes(config, 0) == []


@pytest.mark.campaign
def test_accelerators_are_counted_by_a_new_process() -> None:
    import torch

    assert count_accelerators() == torch.accelerator.device_count()


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, "0,1"), ({"CUDA_VISIBLE_DEVICES": "3,5,6"}, "3,5"), ({"CUDA_VISIBLE_DEVICES": ""}, "0,1")],
)
def test_first_visible_gpus_are_kept(before: dict[str, str], after: str) -> None:
    assert first_visible(before, 2)["CUDA_VISIBLE_DEVICES"] == after


def test_gpus_must_be_named_by_numbers() -> None:
    with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES=GPU-8932f937: the deepspeed launcher takes numbers"):
        first_visible({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}, 1)


def test_asked_processes_take_the_first_of_the_gpus_that_may_be_seen(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    launch = start.LocalRanks(config, 2).launch(OPTIONS, "auto", Path("/run"), 1.5)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--num_gpus" not in launch.command  # beside which the launcher passes over the variable
    with pytest.raises(ConfigError, match=r"^--processes=4: each takes a GPU, and 3 can be seen$"):
        start.LocalRanks(config, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "--num_gpus" in start.LocalRanks(config, 2).launch(OPTIONS, "auto", Path("/run"), 1.5).command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launch = start.LocalRanks(config, 4).launch(OPTIONS, "auto", Path("/run"), 1.5)
    assert launch.command[launch.command.index("--num_gpus") + 1] == "4"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "2,3,5"


def test_lost_gpu_makes_a_smaller_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    counted = iter([4, 3, 0])
    monkeypatch.setattr(start, "count_accelerators", lambda: next(counted))
    ranks = start.LocalRanks(config, None)
    assert ranks.after_loss() == "with 4 processes"
    assert ranks.after_loss() == "with 2 processes, as 3 GPUs are left of 4"
    launch = ranks.launch(OPTIONS, "auto", Path("/run"), 1.5)
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "--num_gpus" not in launch.command
    assert launch.command[-2:] == [f"--stop-file={launch.stop_file}", "--started=1.5"]
    with pytest.raises(ConfigError, match="0 of 2 GPUs are left"):
        ranks.after_loss()


def test_slots_of_fewer_processes() -> None:
    slots = {"a": [0, 1], "b": [0, 1, 2], "c": [0]}
    assert fewer_slots(slots, 4) == {"a": [0, 1], "b": [0, 1]}
    assert fewer_slots(slots, 6) == slots
