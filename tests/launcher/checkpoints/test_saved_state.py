"""The state in a checkpoint's files, by parameter: all that an optimiser keeps, wherever the files hold it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import saved_state
from longstride.launcher.checkpoints.checkpoint import open_checkpoint
from longstride.launcher.checkpoints.saved_state import KINDS, MASTER, SavedState, SavedTables, share_name
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import metrics
from tests.launcher.training.test_training import EVERY_RUN, MUON, OTHER_RUNS, RUNS

Trained = Callable[..., Path]


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
def test_state_has_every_tensor_and_number(name: str, trained: Trained) -> None:
    run = trained(name, 2, *EVERY_RUN[name])
    checkpoint = open_checkpoint(run, 4)
    state = SavedState(checkpoint)
    lines = {line["step"]: line for line in metrics(run) if line["split"] == "train"}
    skipped = lines[4]["skipped_steps"]
    assert state.adam_step == (4 - skipped or None)
    assert state.kinds == (MASTER, *(kind for kind in KINDS if skipped < 4 and kind in kept_by(run)))
    assert state.numbers == {"global_steps": 4, "global_samples": 32, "skipped_steps": skipped}
    assert state.schedule["last_epoch"] == 4 - skipped
    if "fp16" in name:
        assert state.loss_scale is not None and state.loss_scale["cur_scale"] == lines[5]["loss_scale"]
    model = SparseTransformer(checkpoint.config.model.model_copy(update={"ngrams": None}))
    shapes, roles = {key: tensor.shape for key, tensor in model.named_parameters()}, model.parameter_roles()
    for kind in state.kinds:
        shapes_of_kind = {
            key: states.shape_of(kind, shape)
            for key, shape in shapes.items()
            if kind in (MASTER, AVERAGE) or kind in kept_by(run, shape, roles[key].part)
        }
        assert {key for key in state.shapes if state.has(key, kind)} == shapes_of_kind.keys()
        for key, shape in shapes_of_kind.items():
            tensor, cut = state.tensor(key, kind), shape.numel() // 3
            assert tensor.shape == shape and tensor.dtype == torch.float32
            parts = [state.elements(key, kind, *ends) for ends in ((0, cut), (cut, 2 * cut + 1), (2 * cut + 1, 10**9))]
            assert torch.equal(torch.cat(parts), tensor.flatten())


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name", [name for name, settings in EVERY_RUN.items() if "zero0" not in name and MUON not in settings]
)
def test_state_is_what_deepspeeds_own_tool_reads(name: str, trained: Trained, tmp_path: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    checkpoint = open_checkpoint(trained(name, 2, *EVERY_RUN[name]), 4)
    state = SavedState(checkpoint)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(checkpoint.folder / "deepspeed"), "output_folder": str(tmp_path / "theirs")}
    main(SimpleNamespace(**folders, **options, inject_missing_state=True))
    for kind in [kind for kind in state.kinds if kind != AVERAGE]:  # which it does not know
        for key in state.shapes:
            theirs = torch.load(tmp_path / f"theirs/zero/{key}/{kind}.pt", weights_only=False)
            theirs = theirs["param"] if isinstance(theirs, dict) else theirs
            assert torch.equal(theirs.flatten().float(), state.tensor(key, kind).flatten()), (key, kind)


def test_checkpoint_without_a_shard_is_refused(trained: Trained) -> None:
    checkpoint = open_checkpoint(trained("zero2-fp16", 2, *EVERY_RUN["zero2-fp16"]), 4)
    (missing,) = [name for name in checkpoint.manifest.files if "rank_1_" in name]
    del checkpoint.manifest.files[missing]
    with pytest.raises(ConfigError, match=r"step-00000004: optimiser's files of the ranks \[0\], not of 2"):
        SavedState(checkpoint)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the optimiser's files that are opened."""
    names: list[str] = []
    read = saved_state.read_pickle

    def read_and_note(path: Path, **options: Any) -> Any:
        if "optim_states" in path.name:
            names.append(path.name)
        return read(path, **options)

    monkeypatch.setattr(saved_state, "read_pickle", read_and_note)
    return names


@pytest.mark.parametrize("name", ["zero2-fp16", "zero3-bf16"])
def test_files_are_opened_when_their_part_is_read(name: str, trained: Trained, reads: list[str]) -> None:
    state = SavedState(open_checkpoint(trained(name, 2, *EVERY_RUN[name]), 4))
    first = next(iter(state.shapes))
    state.elements(first, MASTER, 0, 1)
    assert len(reads) == 1 and "rank_0_" in reads[0]
    for key in state.shapes:
        state.tensor(key)
    assert len(reads) == 2 and "rank_1_" in reads[1]


def test_a_shard_with_other_kinds_than_the_first_is_refused(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    read = saved_state.read_pickle

    def read_without_moment(path: Path, **options: Any) -> Any:
        content = read(path, **options)
        if "rank_1_" in path.name:
            del content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        return content

    checkpoint = open_checkpoint(trained("zero2-fp16", 2, *EVERY_RUN["zero2-fp16"]), 8)
    monkeypatch.setattr(saved_state, "read_pickle", read_without_moment)
    state = SavedState(checkpoint)
    with pytest.raises(ConfigError, match="state of rank 1 has other kinds or steps than that of rank 0"):
        for key in state.shapes:
            state.tensor(key)


def test_tables_that_are_missing_or_of_another_model_are_refused(trained: Trained, tmp_path: Path) -> None:
    run = shutil.copytree(trained("zero3-bf16", 2, *RUNS["zero3-bf16"]), tmp_path / "run")
    checkpoint = open_checkpoint(run, 8)
    second = checkpoint.folder / share_name("tables", 1)
    content = load_file(second)
    table = SavedTables(checkpoint).tensor("fp32")
    assert table[1::2].equal(content["fp32"]) and bool(table.any())
    for spoilt in (
        content | {"fp32": content["fp32"][:-1]},
        content | {"touches": content["touches"].double()},
        {name: tensor for name, tensor in content.items() if name != "steps"},
        content | {"other": content["steps"].clone()},
    ):
        save_file({name: tensor.contiguous() for name, tensor in spoilt.items()}, second)
        with pytest.raises(ConfigError, match=r"tables-00001.safetensors: its tensors are not those of the model's"):
            SavedTables(checkpoint).tensor("fp32")
    second.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"tables-00001.safetensors: cannot be read"):
        SavedTables(checkpoint).tensor("fp32")
    del checkpoint.manifest.files[second.name]
    with pytest.raises(ConfigError, match=r"lacks tables-00001.safetensors"):
        SavedTables(checkpoint)
