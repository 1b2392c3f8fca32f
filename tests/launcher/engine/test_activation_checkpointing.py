"""Recomputing activations by DeepSpeed's own function: the same dropout, hence the same gradients, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor

from longstride.launcher.config import RunConfig
from longstride.launcher.engine.build import checkpoint_activations, engine_section
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import configuration


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, and nothing left of it."""
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    prepare_accelerator()
    with process_group(Ranks(), 60):
        yield
    deepspeed.checkpointing.reset()


def gradients(recomputed: bool, **section: Any) -> list[Tensor | None]:
    """Of a small model with dropout at one seed."""
    content = configuration(Path("data"), Path("run"))
    content["model"] |= {"dropout": 0.3, "layers": 4}
    config = RunConfig.model_validate(content | {"deepspeed": {"activation_checkpointing": section}})
    torch.manual_seed(1)
    model = SparseTransformer(config.model).train()
    torch.nn.init.normal_(model.logits.weight)
    if recomputed:
        checkpoint_activations(model, engine_section(config, 1))
    tokens = torch.randint(256, (2, 64))
    model(tokens, return_nats=True).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("section", [{}, {"number_checkpoints": 4}, {"synchronize_checkpoint_boundary": True}], ids=str)
def test_recomputed_gradients_are_bitwise_equal_under_dropout(section: dict[str, Any]) -> None:
    plain, recomputed = gradients(False), gradients(True, **section)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
