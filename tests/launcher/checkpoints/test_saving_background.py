"""A checkpoint that is written while training goes on is the one that would have been written at once."""

import json
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from longstride.launcher.checkpoints.checkpoint import list_checkpoints
from longstride.launcher.checkpoints.pickles import host_copy, write_pickle
from longstride.launcher.output.file_names import CONFIG
from longstride.launcher.ranks.processes import Ranks
from tests.harness.runs import complete, metrics, spawn


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


@pytest.mark.parametrize("background", ["false", pytest.param("true", marks=pytest.mark.campaign)])
def test_lines_are_on_the_disk_before_their_checkpoint(config_file: Path, tmp_path: Path, background: str) -> None:
    """Whenever the power fails: lines up to a checkpoint's step, but for its own evaluation, which is made up for."""
    run, log = tmp_path / "new/run", tmp_path / "flushes"
    changes = [f"train.output={run}", "train.checkpoint_every=2", "train.evaluate_every=1"]
    changes += [f"train.checkpoint_in_background={background}"]
    ended = spawn(["--config", str(config_file), *changes], 1, {"FLUSHES": str(log)})
    assert ended.codes == [0], ended.stderr
    content, safe, saved = (run / "metrics.jsonl").read_bytes(), 0, []
    done = [line.split(maxsplit=2) for line in log.read_text().splitlines()]
    for word, size, path in done:
        if (word, path) == ("flush", str(run / "metrics.jsonl")):
            safe = int(size)
        if word == "rename" and (step := re.fullmatch(rf"{run}/checkpoints/step-(\d+)", path)):
            saved.append(int(step[1]))
            lines = [json.loads(line) for line in content[:safe].splitlines()]
            found = {(line["split"], line["step"]) for line in lines}
            assert found >= {("train", number) for number in range(1, saved[-1] + 1)}
            assert found >= {("validation", number) for number in range(1, saved[-1])}
    assert saved == [2, 4, 6, 8]
    flushed = [path for word, _, path in done if word == "flush"]
    for folder in (run / "checkpoints", run, run.parent, run.parent.parent):  # their names, too
        assert str(folder) in flushed[: flushed.index(str(run / "checkpoints/.step-00000002.partial"))]


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
    config_file: Path, tmp_path: Path, names: list[str], sharing: str
) -> None:
    """``sharing``: train.sequence_parallel of two processes, of which one or both write random states."""
    for name in names:
        files = {}
        for background in ("false", "true"):
            run = tmp_path / f"{name}-{background}"
            arguments = ["--config", str(config_file), f"deepspeed={name}", f"train.output={run}"]
            arguments += ["train.checkpoint_every=1", f"train.checkpoint_in_background={background}"]
            arguments += ["train.steps=4", "train.keep_last=3", f"train.sequence_parallel={sharing}"]
            complete(arguments, 2)
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
