"""Ranks begin at the same checkpoint, in one folder, whatever each of them sees there."""

import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.checkpoints.checkpoint import (
    Checkpoint,
    agreed_checkpoints,
    checkpoint_folder,
    first_undamaged,
    list_checkpoints,
)
from longstride.launcher.checkpoints.manifest import read_manifest, record_files, write_json, write_manifest
from longstride.launcher.checkpoints.saving import put_in_place
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run import RunSetup
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks import waiting
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training import resume
from longstride.launcher.training.guards import last_undamaged_checkpoint
from longstride.launcher.training.resume import begin, choose_start
from tests.launcher.checkpoints.test_retention import make_checkpoint
from tests.launcher.checkpoints.test_trust import Touching, poison
from tests.launcher.data.test_batches import Meeting

WEIGHTS_FILE = "deepspeed/mp_rank_00_model_states.pt"

OnRanks = Callable[[Callable[[Ranks], Any]], list[Future[Any]]]


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> OnRanks:
    """A function of what each of two ranks, which are threads, does -> what came of it; none waits for long."""
    meeting = Meeting(2)
    meeting.replace_collectives(monkeypatch)
    monkeypatch.setattr(waiting, "_VISIBLE_SECONDS", 0.1)

    def run(work: Callable[[Ranks], Any]) -> list[Future[Any]]:
        with ThreadPoolExecutor(2) as pool:
            return [pool.submit(work, Ranks(rank, rank, 2)) for rank in range(2)]

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints."""
    for step in (4, 8, 12):
        make_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def asked(config: RunConfig, **rest: Any) -> RunSetup:
    """A run of one process."""
    return RunSetup(config, Ranks(), TrainingData(config, Ranks()), **rest)


def test_first_ranks_list_counts(run: Path, on_ranks: OnRanks) -> None:
    """Another host may list a folder as it was before."""
    found, _ = list_checkpoints(run)
    for seen_by_second in (found[1:], found[::-1], []):
        lists = (found, seen_by_second)
        for each in on_ranks(lambda ranks, lists=lists: first_undamaged(run, lists[ranks.rank], ranks)):
            chosen, damaged = each.result()
            assert chosen.manifest.step == 12 and damaged == []


def test_damaged_checkpoint_is_passed_over_by_all(run: Path, on_ranks: OnRanks) -> None:
    found, _ = list_checkpoints(run)
    path = found[0].folder / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    first, second = [each.result() for each in on_ranks(lambda ranks: first_undamaged(run, found, ranks))]
    assert first == second
    assert first[0].manifest.step == 8
    (line,) = first[1]
    assert line.startswith(f"{path}: ")


@pytest.mark.parametrize("spoil", ["none", "another", "torn"])
def test_checkpoint_that_one_rank_does_not_see_ends_all(
    run: Path, tmp_path: Path, spoil: str, on_ranks: OnRanks
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    shutil.rmtree(checkpoint_folder(other, 12))
    if spoil != "none":
        make_checkpoint(other, 12, spoil)
    if spoil == "torn":
        (checkpoint_folder(other, 12) / "config.json").unlink()
    found, _ = list_checkpoints(run)
    for each in on_ranks(lambda ranks: agreed_checkpoints((run, other)[ranks.rank], found, ranks)):
        with pytest.raises(AgreedError) as caught:
            each.result()
        folder = checkpoint_folder(other, 12)
        rule = f"differs on {socket.gethostname()} from what the first process reads; all hosts must share {other}"
        assert str(caught.value) == f"{folder}: {rule}"


def test_checkpoint_that_one_rank_sees_late_is_waited_for(
    run: Path, tmp_path: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_VISIBLE_SECONDS", 20.0)
    other = tmp_path / "other"
    found, _ = list_checkpoints(run)
    copy = threading.Timer(0.3, shutil.copytree, (run, other))
    copy.start()
    for each in on_ranks(lambda ranks: agreed_checkpoints((run, other)[ranks.rank], found, ranks)):
        assert [checkpoint.manifest.step for checkpoint in each.result()] == [12, 8, 4]
    copy.join()


@pytest.mark.parametrize("as_zip", [True, False])
def test_code_in_a_checkpoint_is_refused_by_all_before_it_is_read(
    run: Path, tmp_path: Path, as_zip: bool, on_ranks: OnRanks
) -> None:
    mark = tmp_path / "made"
    folder = make_checkpoint(run, 16)
    torch.save(Touching(mark), folder / WEIGHTS_FILE, _use_new_zipfile_serialization=as_zip)
    (manifest,) = [each.manifest for each in list_checkpoints(run)[0] if each.folder == folder]
    (folder / "manifest.json").unlink()
    write_manifest(folder, manifest.model_copy(update={"files": record_files(folder)}))
    found, _ = list_checkpoints(run)
    what = "posix.system" if as_zip else "not a zip archive"
    for each in on_ranks(lambda ranks: first_undamaged(run, found, ranks)):
        with pytest.raises(AgreedError, match=rf"{WEIGHTS_FILE}: holds more than tensors and numbers \({what}"):
            each.result()
    trusted, _ = list_checkpoints(run, trusted=True)
    for each in on_ranks(lambda ranks: first_undamaged(run, trusted if ranks.is_first else [], ranks)):
        assert each.result()[0].manifest.step == 16
    assert not mark.exists()


def test_rewind_trusts_what_the_run_was_told_to_trust(
    trained: Callable[..., Path], config_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained("alone", 1), run)
    poison(checkpoint_folder(run, 8), "deepspeed/mp_rank_00_model_states.pt", tmp_path / "made")
    config = load_config(str(config_file), [])
    with pytest.raises(AgreedError, match="holds more than tensors and numbers"):
        last_undamaged_checkpoint(asked(config), 12)
    chosen = last_undamaged_checkpoint(asked(config, trusted=True), 12)
    assert chosen is not None and chosen.manifest.step == 8 and chosen.trusted


def test_folder_that_is_not_shared_is_refused_with_nothing_written(tmp_path: Path, on_ranks: OnRanks) -> None:
    runs = (tmp_path / "one", tmp_path / "two")
    for folder in runs:
        folder.mkdir()
    (runs[0] / ".start-of-a-killed-process").touch()
    rule = (
        f"{socket.gethostname()} does not see what the first process writes there; name a folder that all hosts share"
    )
    for own, each in zip(runs, on_ranks(lambda ranks: resume.check_shared(runs[ranks.rank], ranks)), strict=True):
        with pytest.raises(AgreedError) as caught:
            each.result()
        assert str(caught.value) == f'train.output="{own}": {rule}'
    for each in on_ranks(lambda ranks: resume.check_shared(runs[0], ranks)):
        each.result()
    assert not list(tmp_path.glob("*/*"))


def test_begin_goes_on_from_what_was_saved_since_the_start(
    trained: Callable[..., Path], config_file: Path, tmp_path: Path
) -> None:
    """A run that still held the folder's lock has saved meanwhile, or has begun there."""
    config = load_config(str(config_file), [])
    run = tmp_path / "run"
    choose_start(asked(config))
    shutil.copytree(trained("alone", 1), run)
    with pytest.raises(AgreedError, match=r"train\.output=.*already holds a run"):
        begin(asked(config))
    checkpoint_folder(run, 8).rename(tmp_path / "later")
    start = choose_start(asked(config, resume="auto"))
    assert [each.manifest.step for each in start.candidates] == [4]
    (tmp_path / "later").rename(checkpoint_folder(run, 8))
    chosen = begin(asked(config, resume="auto"))
    assert chosen is not None and chosen.manifest.step == 8
    short = load_config(str(config_file), ["train.steps=6"])
    with pytest.raises(AgreedError, match=r"train\.steps=6: the checkpoint .*step-00000008 is already beyond it"):
        begin(asked(short, resume="auto"))


def test_checkpoint_without_a_file_of_another_rank_is_not_put_in_place(run: Path, tmp_path: Path) -> None:
    """It was written to another folder of the same name."""
    manifest = list_checkpoints(run)[0][0].manifest
    partial, final = run / "checkpoints/.step-00000016.partial", checkpoint_folder(run, 16)
    (partial / "deepspeed").mkdir(parents=True)
    (partial / "deepspeed/model.pt").write_bytes(b"x" * 10)
    (partial / "deepspeed/more.txt").write_bytes(b"by deepspeed itself")
    write_json(partial / "config.json", {})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "random-00001.pt").write_bytes(b"y" * 10)
    unlisted = manifest.model_dump(exclude={"files"}) | {"step": 16}
    with pytest.raises(OSError, match="is missing or incomplete on the first process") as caught:
        put_in_place(run, unlisted, record_files(elsewhere))
    assert caught.value.filename == str(partial / "random-00001.pt")
    assert not final.exists()
    (elsewhere / "random-00001.pt").rename(partial / "random-00001.pt")
    put_in_place(run, unlisted, {})  # what no rank has told of is found
    saved = Checkpoint(final, read_manifest(final))
    assert len(saved.manifest.files) == 4
    assert saved.find_damage(Ranks()) == []
