"""A product-key memory beside n-gram tables, through training in every layout, checkpoints, exports and `--from`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.cli import main
from longstride.launcher.models import AVERAGE, load_model
from longstride.sparse_model import SparseTransformer
from tests.harness.layouts import train_through
from tests.harness.runs import complete, metrics
from tests.launcher.training.test_tied_output import GATHERED, LEGS
from tests.launcher.training.test_training import MUON, TABLES

MEMORY = (
    'model.feed_forward=[{"type": "product_keys", "keys": 9, "top": 5, "heads": 2, "query_width": 8}, '
    '{"type": "dense"}]',
    "model.dropout=0", TABLES, MUON, "deepspeed.gradient_clipping=0.5",
)  # fmt: skip
VALUES = "blocks.0.feed_forward.values.rows"


def test_a_memory_goes_through_every_layout(config_file: Path, tmp_path: Path, capsys: Any) -> None:
    """Clipped losses in fp32 are those of one process; values are parameters wherever tensors have names."""
    run, model = tmp_path / "run", tmp_path / "model"
    trained, drawn = train_through(config_file, run, MEMORY, LEGS, 2)
    checkpoint = open_checkpoint(run, 6)
    names = [name for name, _ in SparseTransformer(checkpoint.config.model).named_parameters()]
    for tensors in (trained, drawn, master_weights(checkpoint, AVERAGE)):
        assert sorted(tensors) == sorted(names)
    moved = (trained[VALUES] != drawn[VALUES]).any(1)
    assert bool(moved.any()) and VALUES in names
    used = torch.zeros(len(moved), dtype=torch.float64)
    for rank in range(2):
        saved = load_file(checkpoint.folder / f"tables-{rank:05d}.safetensors")
        assert torch.equal(saved[f"{VALUES}.fp32"], trained[VALUES][rank::2])
        assert torch.equal(saved[f"{VALUES}.touches"] > 0, moved[rank::2])  # slots that no row has read stay
        assert torch.equal(saved["fp32"], trained["embedding.ngrams.rows"][rank::2])
        used[rank::2] = saved[f"{VALUES}.touches"].double()
    share = used[moved] / used.sum()
    evaluation = metrics(run)[-1]
    assert evaluation["values_read"] == moved.double().mean().item()
    assert evaluation["values_kl"] == pytest.approx((share * (share * len(used)).log()).sum().item())

    assert main(["export", str(run), "--weights", "trained", "--output", str(model)]) == 0, capsys.readouterr()
    loaded, expected = load_model(model), SparseTransformer(checkpoint.config.model).eval()
    expected.load_state_dict(trained)
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(tokens), expected(tokens))

    file, packed, again = (tmp_path / name for name in ("file", "file.lsz", "again"))
    file.write_bytes(bytes(range(97)))
    for words in (
        ["compress", str(file), "--model", str(model), "--output", str(packed)],
        ["decompress", str(packed), "--model", str(model), "--output", str(again)],
    ):
        assert main(words) == 0, capsys.readouterr()
    assert again.read_bytes() == file.read_bytes()

    # Another run from these weights begins where they end.
    layout = (f"train.output={tmp_path / 'following'}", "train.steps=1", "deepspeed=zero3_fp32", GATHERED)
    complete(["--config", str(config_file), "--from", str(run), *MEMORY, *layout], 1)
    first, *_ = (line["loss_nats"] for line in metrics(tmp_path / "following") if "grad_norm" in line)
    assert first < next(line["loss_nats"] for line in metrics(run) if "grad_norm" in line)
