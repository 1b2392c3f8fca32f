"""The universal form of a checkpoint: whole or not there, made once, and of what the checkpoint holds."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longstride.launcher.checkpoints import universal
from longstride.launcher.checkpoints.checkpoint import Checkpoint, open_checkpoint
from longstride.launcher.checkpoints.manifest import find_damage
from longstride.launcher.checkpoints.saved_state import KINDS, MASTER, SavedState
from longstride.launcher.checkpoints.universal import open_universal, ready_universal, universal_folder
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE
from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks.processes import Ranks
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import files_under, metrics
from tests.launcher.training.test_training import EVERY_RUN, MUON, OTHER_RUNS, RUNS

Trained = Callable[..., Path]
ALONE = Ranks()


def copy_of(run: Path, folder: Path) -> Checkpoint:
    """The checkpoint of step 4 in a run folder of its own."""
    shutil.copytree(run / "checkpoints/step-00000004", folder / "run/checkpoints/step-00000004")
    return open_checkpoint(folder / "run", 4)


@pytest.fixture
def checkpoint(trained: Trained, tmp_path: Path) -> Checkpoint:
    """A checkpoint of one process, to be spoilt."""
    return copy_of(trained("alone", 1), tmp_path)


def kept_by(run: Path, shape: torch.Size | None = None, part: str = "") -> set[str]:
    """What a run's optimiser keeps: of a parameter of a part, or of any and the average."""
    optimizer = json.loads((run / "config.json").read_text())["train"].get("optimizer", {"type": "adamw"})["type"]
    adam, muon, matrices, vectors = map(set, states.MOMENTS)
    if shape is None:
        return {"adamw": adam, "muon": adam | muon, "adafactor": matrices | vectors}[optimizer] | {AVERAGE}
    return {
        "adamw": adam,
        "muon": muon if part == "matrices" else adam,
        "adafactor": matrices if len(shape) > 1 else vectors,
    }[optimizer]


@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.campaign) for name in OTHER_RUNS)])
def test_form_holds_every_tensor_and_number(name: str, trained: Trained, tmp_path: Path) -> None:
    run = trained(name, 2, *EVERY_RUN[name])
    checkpoint = copy_of(run, tmp_path)
    form, _ = ready_universal(checkpoint, ALONE)
    lines = {line["step"]: line for line in metrics(run) if line["split"] == "train"}
    skipped = lines[4]["skipped_steps"]
    assert form.manifest.adam_step == (4 - skipped or None)
    begun = [kind for kind in KINDS if kind in kept_by(run)] if skipped < 4 else []
    assert form.kinds == (MASTER, *begun)
    assert form.manifest.numbers == {"global_steps": 4, "global_samples": 32, "skipped_steps": skipped}
    assert form.manifest.schedule["last_epoch"] == 4 - skipped
    if "fp16" in name:
        assert form.manifest.loss_scale is not None
        assert form.manifest.loss_scale["cur_scale"] == lines[5]["loss_scale"]
    state = SavedState(checkpoint)
    model = SparseTransformer(checkpoint.config.model.model_copy(update={"ngrams": None}))
    shapes, roles = {key: each.shape for key, each in model.named_parameters()}, model.parameter_roles()
    for kind in form.kinds:
        held = load_file(form.folder / f"{kind}.safetensors")
        keeping = [
            key for key in shapes if kind in (MASTER, AVERAGE) or kind in kept_by(run, shapes[key], roles[key].part)
        ]
        assert {key: tensor.shape for key, tensor in held.items()} == {
            key: states.shape_of(kind, shapes[key]) for key in keeping
        }
        for key, tensor in held.items():
            assert torch.equal(tensor, state.tensor(key, kind))
            assert torch.equal(tensor.flatten(), form.flat(key, kind))


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", [name for name, settings in EVERY_RUN.items() if "zero0" not in name and MUON not in settings]
)
def test_form_is_what_deepspeeds_own_tool_makes(name: str, trained: Trained, tmp_path: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    checkpoint = copy_of(trained(name, 2, *EVERY_RUN[name]), tmp_path)
    form, _ = ready_universal(checkpoint, ALONE)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(checkpoint.folder / "deepspeed"), "output_folder": str(tmp_path / "theirs")}
    main(SimpleNamespace(**folders, **options, inject_missing_state=True))
    for kind in [kind for kind in form.kinds if kind != "ema"]:  # which it does not know
        for key in SavedState(checkpoint).shapes:
            theirs = torch.load(tmp_path / f"theirs/zero/{key}/{kind}.pt", weights_only=False)
            theirs = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(theirs.flatten().float(), form.flat(key, kind)), (key, kind)


def test_form_is_made_once(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    _, seconds = ready_universal(checkpoint, ALONE)
    assert seconds > 0
    before = files_under(universal_folder(checkpoint.folder))
    _, seconds = ready_universal(checkpoint, ALONE)
    assert seconds == 0
    assert files_under(universal_folder(checkpoint.folder)) == before
    assert capsys.readouterr().err == ""
    assert find_damage(checkpoint.folder, checkpoint.manifest.files, checkpoint.manifest.files) == []


@pytest.mark.parametrize("spoil", ["flip", "cut", "remove"])
@pytest.mark.parametrize("name", ["manifest.json", "fp32.safetensors", "ema.safetensors"])
def test_damaged_form_is_made_again(
    checkpoint: Checkpoint, name: str, spoil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    form, _ = ready_universal(checkpoint, ALONE)
    wanted = {path.name: path.read_bytes() for path in form.folder.iterdir()}
    content = bytearray(wanted[name])
    content[len(content) // 2] ^= 4
    (form.folder / name).write_bytes(content if spoil == "flip" else content[:-1])
    if spoil == "remove":
        (form.folder / name).unlink()
    form, seconds = ready_universal(checkpoint, ALONE)
    assert seconds > 0
    assert {path.name: path.read_bytes() for path in form.folder.iterdir()} == wanted
    told = capsys.readouterr().err
    if name == "manifest.json":  # by which it is no form at all
        assert told == ""
    else:
        assert told.startswith(f"longstride: converted again: {form.folder / name}: ")


def test_form_of_another_checkpoint_is_made_again(checkpoint: Checkpoint, trained: Trained) -> None:
    first, _ = ready_universal(checkpoint, ALONE)
    assert first.manifest.numbers["global_steps"] == 4
    later = checkpoint.folder.with_name("step-00000008")
    shutil.copytree(trained("alone", 1) / "checkpoints" / later.name, later)
    first.folder.rename(universal_folder(later))
    again = open_checkpoint(checkpoint.folder.parent.parent, 8)
    assert open_universal(again) is None
    assert ready_universal(again, ALONE)[0].manifest.numbers["global_steps"] == 8


def test_what_a_killed_process_left_is_cleared(checkpoint: Checkpoint) -> None:
    """Its half of a form goes."""
    folder = checkpoint.folder.parent
    partial = folder / ".step-00000002.universal.partial"
    partial.mkdir()
    (partial / "fp32.safetensors").write_bytes(b"half")
    ready_universal(checkpoint, ALONE)
    assert {path.name for path in folder.iterdir()} == {".step-00000004.universal", "step-00000004"}


def test_full_disk_is_told_and_leaves_nothing(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint.folder.parent
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(AgreedError, match=r"converting takes 0\.0 GB, and 0\.0 GB are free; free some space"):
            ready_universal(checkpoint, ALONE)

    def fail(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(universal, "write_tensors", fail)
    with pytest.raises(AgreedError, match="No space left on device"):
        ready_universal(checkpoint, ALONE)
    assert {path.name for path in folder.iterdir()} == {"step-00000004"}


def test_checkpoint_without_a_shard_is_refused(trained: Trained, tmp_path: Path) -> None:
    checkpoint = copy_of(trained("zero2-fp16", 2, *EVERY_RUN["zero2-fp16"]), tmp_path)
    (gone,) = [name for name in checkpoint.manifest.files if "rank_1_" in name]
    del checkpoint.manifest.files[gone]
    with pytest.raises(AgreedError, match=r"step-00000004: optimiser's files of the ranks \[0\], not of 2"):
        ready_universal(checkpoint, ALONE)
