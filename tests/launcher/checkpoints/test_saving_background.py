"""A checkpoint that is written while training goes on is the one that would have been written at once."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from longstride.launcher.checkpoints.checkpoint import list_checkpoints
from longstride.launcher.checkpoints.pickles import host_copy, write_pickle
from longstride.launcher.output.file_names import CONFIG
from longstride.launcher.ranks.processes import Ranks
from tests.harness.processes.forked import ForkServer
from tests.harness.runs import metrics


def test_host_copy_is_saved_as_the_original_and_follows_it_no_more(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    original = {
        "views": [flat[:4], flat[4:].view(2, 3)],
        "ordered": OrderedDict(weight=parameter, also=parameter, transposed=parameter.detach().t()),
        "numbers": (1, 2.5, "text", None, True),
        "size": torch.Size([3, 2]),
        "state": {"step": torch.tensor(3), "betas": (0.9, 0.99)},
    }
    vars(original["ordered"])["_metadata"] = OrderedDict(version=1)
    original["views"][0].partition = 3
    copied = host_copy(original)
    record = write_pickle(original, tmp_path / "original.pt")
    flat.zero_()
    with torch.no_grad():
        parameter.zero_()
    assert write_pickle(copied, tmp_path / "copied.pt") == record
    assert copied["views"][0].tolist() == [0, 1, 2, 3]
    assert copied["views"][0].untyped_storage().data_ptr() == copied["views"][1].untyped_storage().data_ptr()
    assert copied["ordered"]["weight"] is copied["ordered"]["also"]
    assert isinstance(copied["ordered"]["weight"], torch.nn.Parameter)


@pytest.mark.parametrize(
    ("names", "sharing"),
    [
        (["zero1_bf16"], "2"),
        *(
            pytest.param(
                [f"zero{stage}_{precision}" for stage in range(4) for precision in ("fp32", "fp16", "bf16")],
                sharing,
                marks=pytest.mark.campaign,
            )
            for sharing in ("null", "2")
        ),
    ],
)
def test_background_writes_the_same_bytes_and_changes_no_loss(
    server: ForkServer, config_file: Path, tmp_path: Path, names: list[str], sharing: str
) -> None:
    """``sharing``: train.sequence_parallel of two processes, of which one or both write random states."""
    for name in names:
        files = {}
        for background in ("false", "true"):
            run = tmp_path / f"{name}-{background}"
            arguments = ["--config", str(config_file), f"deepspeed={name}", f"train.output={run}"]
            arguments += ["train.checkpoint_every=1", f"train.checkpoint_in_background={background}"]
            arguments += ["train.steps=4", "train.keep_last=3", f"train.sequence_parallel={sharing}"]
            assert server.run(arguments, 2) == [0, 0], server.stderr()
            found, refused = list_checkpoints(run)
            assert not refused
            assert [each.manifest.step for each in found] == [4, 3, 2]
            assert not any(each.find_damage(Ranks()) for each in found)
            assert not list((run / "checkpoints").glob(".*"))
            manifests = [each.manifest.model_dump() for each in found]
            for manifest in manifests:
                del manifest["files"][CONFIG]
            files[background] = manifests
        assert files["true"] == files["false"], name
        assert metrics(tmp_path / f"{name}-true") == metrics(tmp_path / f"{name}-false")
