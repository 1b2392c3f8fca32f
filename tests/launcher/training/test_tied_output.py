"""A token table that is also the output's weight, through training in every layout, checkpoints, exports, `--from`."""

from pathlib import Path
from typing import Any

import torch

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.config import load_config
from longstride.launcher.engine.optimizer import parameter_groups
from longstride.launcher.models import AVERAGE, Exported, load_model
from longstride.launcher.planning.plan import make_plan
from longstride.sparse_model import SparseTransformer
from tests.harness.layouts import Leg, train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_training import MUON

BERT = (
    'model.norm_position="after"', "model.embedding_norm=true", 'model.feed_forward={"activation": "gelu"}',
    'model.output={"tied": true, "transform": true, "bias": true}', "model.dropout=0", MUON,
)  # fmt: skip
# A model this small would stay gathered: ZeRO 3 keeps tensors below a size on all processes.
GATHERED = "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
LEGS: list[Leg] = [  # processes, and the layout of two steps
    (2, ("deepspeed=zero3_fp32", GATHERED, "train.activation_checkpointing=true")),
    (2, ("deepspeed=zero2_fp32", "train.sequence_parallel=2")),
    (2, ("deepspeed=zero3_bf16", GATHERED)),
]
TABLE = "embedding.tokens.weight"


def test_a_tied_output_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    """Losses in fp32 are those of one process, and the table is one tensor wherever tensors have names."""
    run, model = tmp_path / "run", tmp_path / "model"
    trained, drawn = train_through(config_file, run, BERT, LEGS, 2)
    checkpoint = open_checkpoint(run, 6)
    config = load_config(run / "config.json", [])
    names = [name for name, _ in SparseTransformer(config.model).named_parameters()]
    for tensors in (trained, drawn, master_weights(checkpoint, AVERAGE)):
        assert sorted(tensors) == sorted(names)
    assert TABLE in names and "logits.bias" in names and "logits.weight" not in names
    assert not torch.equal(trained[TABLE], drawn[TABLE]) and not torch.equal(trained["logits.bias"], torch.zeros(256))
    planned = make_plan(config, [2], contexts=100)["parameters"]["total"]
    assert planned == sum(tensor.numel() for tensor in trained.values())

    assert main(["export", str(run), "--weights", "trained", "--output", str(model)]) == 0, capsys.readouterr()
    assert sorted(Exported(model).names) == sorted(names)
    loaded, expected = load_model(model), SparseTransformer(checkpoint.config.model).eval()
    expected.load_state_dict(trained)
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens), expected(tokens))

    file, packed, again = (tmp_path / name for name in ("file", "file.lsz", "again"))
    file.write_bytes(bytes(range(97)))
    for words in (
        ["compress", str(file), "--model", str(model), "--output", str(packed)],
        ["decompress", str(packed), "--model", str(model), "--output", str(again)],
        ["show", "attention", str(run), "--output", str(tmp_path / "attention.png")],
    ):
        assert main(words) == 0, capsys.readouterr()
    assert again.read_bytes() == file.read_bytes()

    # Another run from these weights checks the loss on the probe.
    layout = (f"train.output={tmp_path / 'following'}", "train.steps=1", "deepspeed=zero3_fp32", GATHERED)
    complete(["--config", str(config_file), "--from", str(run), *BERT, *layout], 2)
    first, *_ = (line["loss_nats"] for line in metrics(tmp_path / "following") if "grad_norm" in line)
    assert first < next(line["loss_nats"] for line in metrics(run) if "grad_norm" in line)


def test_an_output_without_weights_has_no_group_of_the_optimizer(config_file: Path) -> None:
    model = SparseTransformer(load_config(config_file, ['model.output={"tied": true, "bias": true}']).model)
    groups = {group.part: group.names for group in parameter_groups(model, split=True)}
    assert list(groups) == ["matrices", "embeddings", "vectors"]
    assert TABLE in groups["embeddings"] and "logits.bias" in groups["vectors"]
