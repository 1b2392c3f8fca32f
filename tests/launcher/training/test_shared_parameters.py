"""Parameters that all layers share, through training in every layout, checkpoints, exports and `--from`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.checkpoints import open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.models import Exported, load_model
from longstride.sparse_model import SparseTransformer
from tests.harness.configs import MASKED
from tests.harness.layouts import Leg, train_through
from tests.harness.runs import complete, metrics, spawn
from tests.launcher.training.test_tied_output import GATHERED
from tests.launcher.training.test_training import MUON

LAYERS = ("model.layers=2", "model.dropout=0", "model.backend=auto", f"model.objective={json.dumps(MASKED)}")
DENSE = 'model.attention={"type": "dense", "causal": false}'
MIXTURES = ('model.attention={"type": "linformer", "rows": 8, "share": "layers"}',)
BIASES = (DENSE, 'model.relative_bias={"buckets": 8, "distance": 20}')
RECOMPUTED = "train.activation_checkpointing=true"
LEGS: list[Leg] = [  # processes, and the layout of two steps
    (2, ("deepspeed=zero3_fp32", GATHERED, RECOMPUTED)),
    (2, ("deepspeed=zero2_fp32", "train.sequence_parallel=2", RECOMPUTED)),
]


@pytest.mark.parametrize(("changes", "name"), [(MIXTURES, "shared.mixtures"), (BIASES, "shared.biases.weight")])
def test_shared_parameters_go_through_every_layout(
    changes: tuple[str, ...], name: str, config_file: Path, tmp_path: Path, capsys: Any
) -> None:
    """Losses in fp32 are those of one process without ZeRO, and the parameter is one tensor."""
    run, model = tmp_path / "run", tmp_path / "model"
    trained, drawn = train_through(config_file, run, (*LAYERS, *changes), LEGS, 2)
    checkpoint = open_checkpoint(run, 4)
    network = SparseTransformer(checkpoint.config.model).eval()
    assert trained.keys() == network.state_dict().keys() and not torch.equal(trained[name], drawn[name])
    network.load_state_dict(trained)

    assert main(["export", str(run), "--weights", "trained", "--output", str(model)]) == 0, capsys.readouterr()
    assert sorted(Exported(model).names) == sorted(trained)
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(load_model(model)(tokens), network(tokens))

    following = (f"train.output={tmp_path / 'following'}", "train.steps=1", "deepspeed=zero1_fp32")
    complete(["--config", str(config_file), "--from", str(run), *LAYERS, *changes, *following], 1)
    first, *_ = (line["loss_nats"] for line in metrics(tmp_path / "following") if "grad_norm" in line)
    assert first < next(line["loss_nats"] for line in metrics(run) if "grad_norm" in line)


def test_biases_of_queries_go_through_every_layout(config_file: Path, tmp_path: Path) -> None:
    """Transformer-XL's u and w, beside projections of which a layer uses parts, under Muon."""
    kind = 'model.attention={"type": "transformer_xl", "memory": 16}'
    legs: list[Leg] = [(2, ("deepspeed=zero3_fp32", GATHERED, RECOMPUTED)), (1, ("deepspeed=zero2_fp32",))]
    trained, drawn = train_through(
        config_file, tmp_path / "run", (*LAYERS[:3], kind, MUON, "data.shuffle_bytes=0"), legs, 2
    )
    for name in ("shared.for_keys", "shared.for_distances", "blocks.1.attention.distances"):
        assert not torch.equal(trained[name], drawn[name])


def test_a_model_without_a_bias_begins_one_that_has_it(config_file: Path, tmp_path: Path) -> None:
    run, following = tmp_path / "run", (f"train.output={tmp_path / 'following'}", "train.steps=1")
    complete(["--config", str(config_file), *LAYERS, DENSE, f"train.output={run}", "train.steps=1"], 1)
    words = ["--config", str(config_file), "--from", str(run), *LAYERS, *BIASES, *following]
    refused = spawn(words, 1)
    assert refused.codes == [2]
    rule = "shared.biases.weight is [8, 2] in this run and missing in step 1 of"
    assert f'model.relative_bias={{"buckets": 8, "distance": 20}}: {rule}' in refused.stderr[0]
    ended = complete([*words, "--from-partly"], 1)
    assert "newly initialised: shared.biases.weight\n" in ended.stderr[0] + ended.stdout[0]
