"""The loss on one context, saved with a checkpoint and held against the loaded model's."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.probe import PROBE, take_probe
from longstride.launcher.config import RunConfig
from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.lines import manifest_of
from tests.harness.runs import configuration

ALONE = Ranks()


class Engine:
    """What of an engine computes a loss."""

    def __init__(self, config: RunConfig) -> None:
        torch.manual_seed(0)
        self.module, self.device = SparseTransformer(config.model), torch.device("cpu")

    def __call__(self, tokens: Tensor, return_nats: bool) -> Tensor:
        return self.module(tokens, return_nats)

    def train(self, mode: bool = True) -> None:
        """Training or not."""
        self.module.train(mode)

    def eval(self) -> None:
        """Not training."""
        self.module.eval()


def config_with(**changes: Any) -> RunConfig:
    content = configuration(Path("data"), Path("run")) | {"deepspeed": {}}
    for name, value in changes.items():
        section, key = name.split("_", 1)
        content[section][key] = value
    return RunConfig.model_validate(content)


def saved(folder: Path, probe: dict[str, Any] | None) -> Any:
    """The probe of a checkpoint of which there is nothing else."""
    return Checkpoint(folder, manifest_of(None, probe=json.loads(json.dumps(probe)))).probe


def test_same_weights_agree_and_nothing_else_changes(tmp_path: Path) -> None:
    config = config_with()
    engine: Any = Engine(config)
    engine.train()
    before = torch.get_rng_state()
    probe = take_probe(engine, config, tmp_path, ALONE)
    assert probe is not None
    content = np.load(tmp_path / PROBE)
    assert content.shape == (64,) and content.dtype == np.uint8
    assert 5 < probe["loss_nats"] < 6  # 256 equal guesses: 5.55
    saved(tmp_path, probe).check(engine, config, ALONE)
    assert take_probe(engine, config, tmp_path, ALONE) == probe  # bit for bit
    assert engine.module.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_weights_that_are_a_little_off_are_refused(tmp_path: Path) -> None:
    config = config_with()
    engine: Any = Engine(config)
    probe = take_probe(engine, config, tmp_path, ALONE)
    with torch.no_grad():
        engine.module.logits.weight += 0.001 * torch.randn_like(engine.module.logits.weight)
    with pytest.raises(
        AgreedError, match=r"loss on probe\.npy is 5\.\d+ nats, but was 5\.\d+ .* and rounding explains 1e-06"
    ):
        saved(tmp_path, probe).check(engine, config, ALONE)
    # Computed in another precision, or by another backend, more is rounding.
    assert probe is not None
    for other in (probe | {"precision": "bf16"}, probe | {"backend": "cpu"}, probe | {"device": "cuda"}):
        saved(tmp_path, other).check(engine, config, ALONE)
    with torch.no_grad():
        engine.module.logits.weight.fill_(float("nan"))
    with pytest.raises(AgreedError, match="nan nats"):
        saved(tmp_path, probe | {"precision": "bf16"}).check(engine, config, ALONE)
    assert take_probe(engine, config, tmp_path, ALONE) is None


def test_run_may_have_none(tmp_path: Path) -> None:
    config = config_with(train_probe=False)
    engine: Any = Engine(config)
    assert take_probe(engine, config, tmp_path, ALONE) is None
    assert not list(tmp_path.iterdir())
    probe = take_probe(engine, config_with(), tmp_path, ALONE)
    torch.nn.init.normal_(engine.module.logits.weight)
    saved(tmp_path, probe).check(engine, config, ALONE)
    assert saved(tmp_path, None) is None


def test_bytes_that_are_not_the_manifests_are_refused(tmp_path: Path) -> None:
    config = config_with()
    engine: Any = Engine(config)
    probe = take_probe(engine, config, tmp_path, ALONE)
    np.save(tmp_path / PROBE, np.zeros(64, np.uint8))
    with pytest.raises(AgreedError, match="its bytes do not have"):
        saved(tmp_path, probe).check(engine, config, ALONE)
    shorter = np.zeros(63, np.uint8)
    np.save(tmp_path / PROBE, shorter)
    with pytest.raises(AgreedError, match="is not a context of 64 bytes below 256"):
        saved(tmp_path, (probe or {}) | {"crc32": zlib.crc32(shorter.tobytes())}).check(engine, config, ALONE)
    header = (tmp_path / PROBE).read_bytes()[:-63]
    for content in (b"no array", header.replace(b"(63,)", b"(9" + b"9" * 12 + b",)"), header.replace(b"|u1", b"|O8")):
        (tmp_path / PROBE).write_bytes(content + bytes(63))
        with pytest.raises(AgreedError, match=r"is not a context of 64 bytes below 256|at most 192 are allowed"):
            saved(tmp_path, probe).check(engine, config, ALONE)
    (tmp_path / PROBE).unlink()
    os.mkfifo(tmp_path / PROBE)
    with pytest.raises(AgreedError, match="cannot be read: is a pipe"):
        saved(tmp_path, probe).check(engine, config, ALONE)
