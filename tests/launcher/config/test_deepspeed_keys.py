"""What the `deepspeed` section may hold: keys, types and ranges, and the packages of its monitors."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("override", "lines"),
    [
        ('fp16.enabled="false"', ['fp16.enabled="false": must be true or false']),
        ("fp16.loss_scale=-1", ["fp16.loss_scale=-1: fp16.loss_scale must be >= 0 (0 enables dynamic loss scaling)"]),
        (
            "zero_optimization.reduce_bucket=1",
            ["zero_optimization.reduce_bucket: unknown key; nearest reduce_bucket_size"],
        ),
        ("gradient_clipping=-1", ["gradient_clipping=-1: must be greater than or equal to 0"]),
        ("log_level=loud", ["log_level=\"loud\": must be 'debug', 'info', 'warning', 'error' or 'critical'"]),
        ("data_types.grad_accum_dtype=fp8", ["data_types.grad_accum_dtype=\"fp8\": must be 'fp32', 'fp16' or 'bf16'"]),
        ("aio=3", ["aio=3: must be an object"]),
        ("activation_checkpointing.profil=true", ["activation_checkpointing.profil: unknown key; nearest profile"]),
        (
            "activation_checkpointing.contiguous_memory_optimization=true",
            [
                "activation_checkpointing.contiguous_memory_optimization=true: needs partition_activations; set that "
                "to true, or leave this out"
            ],
        ),
        (
            'activation_checkpointing={"contiguous_memory_optimization": true, "partition_activations": true}',
            [
                "activation_checkpointing.number_checkpoints=null: must be model.layers 2: every residual block is a "
                "checkpoint"
            ],
        ),
        ("data_types.grad_accum=fp32", ["data_types.grad_accum: unknown key; nearest grad_accum_dtype"]),
        ("timers.throughput.enabled=1", ["timers.throughput.enabled=1: must be a valid boolean"]),
        ("zero_optimization.stage=1.0", ["zero_optimization.stage=1.0: must be 0, 1, 2 or 3"]),
        *(
            (f"zero_optimization.{name}={value}", [f"zero_optimization.{name}={value}: must be a valid number"])
            for name in ("reduce_bucket_size", "stage3_max_live_parameters")
            for value in ("null", '""', "[]", "true")
        ),
        ("zero_optimization.overlap_comm=1", ["zero_optimization.overlap_comm=1: must be true or false"]),
        (
            'zero_optimization.offload_optimizer={"device": "cpu", "pin_memory": "no"}',
            ['zero_optimization.offload_optimizer.pin_memory="no": must be true or false'],
        ),
        (
            "zero_optimization.offload_optimizer.device=nvme",
            ['zero_optimization.offload_optimizer.device="nvme": must be none or cpu'],
        ),
        ("zero_optimization.zenflow={}", ["zero_optimization.zenflow: needs DeepSpeed's own optimiser; leave it out"]),
        (
            "zero_optimization.offload_optimizer.ratio=0.5",
            ["zero_optimization.offload_optimizer.ratio=0.5: must be 1: a part alone needs DeepSpeed's own optimiser"],
        ),
        ('fp16.loss_scale_window="9"', ['fp16.loss_scale_window="9": must be a number']),
        (
            "bf16.bf16_master_weights_and_grads=true",
            ["bf16.bf16_master_weights_and_grads=true: must be false: master weights are fp32"],
        ),
        (
            "zero_force_ds_cpu_optimizer=true",
            ["zero_force_ds_cpu_optimizer: is always false: the optimiser is torch's, offloaded or not"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_value_in_the_deepspeed_section(
    refused: Callable[..., list[str]], config_file: Path, override: str, lines: list[str]
) -> None:
    assert refused("--config", str(config_file), f"deepspeed.{override}") == [f"deepspeed.{line}" for line in lines]


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("tensorboard", "tensorboard"), ("comet", "comet_ml")]
)
def test_monitor_without_its_package(
    refused: Callable[..., list[str]], config_file: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr("longstride.launcher.config.deepspeed_keys.importlib.util.find_spec", lambda name: None)
    (line,) = refused("--config", str(config_file), f"deepspeed.{name}.enabled=true")
    assert line.startswith(f"deepspeed.{name}.enabled=true: needs the package {package}, which is not installed")
