"""Where ranks are placed, and where after a loss: numbers of processes that divide the batch, GPUs, slots."""

import argparse
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.cluster import placement
from longstride.launcher.cluster.placement import LocalRanks, count_accelerators, largest_run
from longstride.launcher.cluster.supervisor import Launch
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.verbs.train import add_train_arguments


def options() -> argparse.Namespace:
    """Return the options of `longstride train --config X.json`."""
    parser = argparse.ArgumentParser()
    add_train_arguments(parser)
    return parser.parse_args(["--config", "X.json"])


def launch(config: RunConfig, processes: int | None) -> Launch:
    return LocalRanks(config, options(), processes, 1.5).launch("auto")


@pytest.fixture
def config(config_file: Path) -> RunConfig:
    """Return a configuration with a batch of eight in micro-batches of two."""
    return load_config(config_file)


def sharing(config: RunConfig, count: int | None) -> RunConfig:
    """Return the same configuration, with so many processes per context."""
    return config.model_copy(update={"train": config.train.model_copy(update={"sequence_parallel": count})})


@pytest.mark.parametrize(
    ("count", "slots", "taken"),
    [
        (None, [7], [4]),
        (None, [3], [2]),
        (None, [2, 3, 1], [2, 2]),
        (2, [7], [4]),
        (2, [2, 3], [2, 2]),
        (4, [2, 2, 2], [2, 2]),
        (4, [2, 4, 4], [2, 2]),  # 8 would cut the second
        (2, [1, 1], [1, 1]),
    ],
)
def test_what_is_left_is_taken_as_far_as_the_run_divides_over_it(
    count: int | None, slots: list[int], taken: list[int], config: RunConfig
) -> None:
    left = {f"node{number}": range(size) for number, size in enumerate(slots)}
    found = largest_run(sharing(config, count), left, "slots")
    assert found == {host: [*range(size)] for host, size in zip(left, taken, strict=False)}


def test_nothing_that_divides_may_be_left(config: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"^0 GPUs are left, and the run cannot be divided over that many"):
        largest_run(config, {"": []}, "0 GPUs")
    with pytest.raises(ConfigError, match=r"^3 slots are left, and the run cannot be divided over that many"):
        largest_run(sharing(config, 4), {"node1": [0, 1, 2]}, "3 slots")


_RULE = "must divide the processes of every host, or equal those of several hosts; "
_BY_HOST = "start ranks host by host, by srun --distribution=block or mpirun --map-by slot"


@pytest.mark.parametrize(
    ("count", "hosts", "problem"),
    [
        (2, "aabb", None),
        (4, "aabb", None),
        (2, "aaaabb", "train.global_batch=8: must be a multiple of micro_batch 2 × 6 processes / 2 that share"),
        (2, "aaaabbccd", "train.sequence_parallel=2: must divide the 9 processes; nearest 1"),
        (4, "aabbcccc", None),
        (4, "abab", None),  # all of both hosts, in whatever order
        (1, "abab", None),
        (4, "aaabbbbb", f"train.sequence_parallel=4: {_RULE}b has ranks 3 to 7; give the hosts other numbers of them"),
        (4, "aabbbbcc", f"train.sequence_parallel=4: {_RULE}b has ranks 2 to 5; nearest 2"),
        (8, "aabbbbccddddddee", None),
        (2, "abab", f"train.sequence_parallel=2: {_RULE}a has ranks 0, 2; {_BY_HOST}"),
        (2, "aba", "train.sequence_parallel=2: must divide the 3 processes; nearest 1"),
    ],
)
def test_no_host_is_cut_through_those_that_share_a_context(
    count: int, hosts: str, problem: str | None, config: RunConfig
) -> None:
    if problem is None:
        sharing(config, count).check_hosts(list(hosts))
        return
    with pytest.raises(ConfigError) as refused:
        sharing(config, count).check_hosts(list(hosts))
    assert str(refused.value).startswith(problem) and "\n" not in str(refused.value)


@pytest.mark.campaign
def test_accelerators_are_counted_by_a_new_process() -> None:
    import torch

    assert count_accelerators() == torch.accelerator.device_count()


def test_processes_take_the_first_of_the_visible_gpus(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    launched = launch(config, 2)
    assert launched.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--num_gpus" not in launched.command  # beside which the launcher passes over the variable
    with pytest.raises(ConfigError, match=r"^--processes=4: each needs a GPU, but only 3 are visible$"):
        launch(config, 4)
    with pytest.raises(ConfigError, match=r"^train\.sequence_parallel=2: must divide the 3 processes; nearest 1"):
        launch(sharing(config, 2), None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(ConfigError, match=r"^CUDA_VISIBLE_DEVICES=GPU-8932f937: the deepspeed launcher accepts only"):
        launch(config, 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "--num_gpus" in launch(config, 2).command
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    launched = launch(config, 4)
    assert launched.command[launched.command.index("--num_gpus") + 1] == "4"
    assert launched.environment["CUDA_VISIBLE_DEVICES"] == "2,3,5"


def test_lost_gpu_makes_a_smaller_run(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    counted = iter([4, 3, 0])
    monkeypatch.setattr(placement, "count_accelerators", lambda: next(counted))
    ranks = LocalRanks(config, options(), None, 1.5)
    assert ranks.shrink() == "with 4 processes"
    assert ranks.shrink() == "with 2 processes, as 3 GPUs are left of 4"
    launched = ranks.launch("auto")
    assert launched.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "--num_gpus" not in launched.command
    assert launched.command[-2:] == [f"--stop-file={launched.stop_file}", "--started=1.5"]
    with pytest.raises(ConfigError, match="0 of 2 GPUs are left"):
        ranks.shrink()
