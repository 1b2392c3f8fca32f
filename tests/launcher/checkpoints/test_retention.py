"""What keep_last and keep_every leave, and what a removal leaves behind when it is cut short."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longstride.data_pipelines.durable import flush_folder
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import checkpoint_folder, list_checkpoints, open_checkpoint
from longstride.launcher.checkpoints.manifest import Score, collect_scores, rank_scores, write_json
from longstride.launcher.checkpoints.saving import point_to, remove_leftovers, retire, rewind_to, set_aside
from longstride.launcher.output.file_names import CHECKPOINTS
from tests.harness.lines import evaluation_line, manifest_of, write_metrics


def make_checkpoint(run: Path, step: int, content: object = None, best: list[Score] | None = None) -> Path:
    """A folder that is whole by its manifest, with little in it."""
    folder = checkpoint_folder(run, step)
    (folder / "deepspeed").mkdir(parents=True)
    torch.save(content, folder / "deepspeed/mp_rank_00_model_states.pt")
    write_json(folder / "config.json", {})
    manifest_of(folder, step=step, best=best)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 to 60."""
    for step in range(10, 70, 10):
        make_checkpoint(tmp_path, step)
    return tmp_path


def steps(run: Path) -> list[int]:
    return [each.manifest.step for each in list_checkpoints(run)[0]]


def test_everything_stays_unless_asked(run: Path) -> None:
    assert retire(run, 60, None, None) == []
    assert retire(run, 60, 6, None) == []
    assert steps(run) == [60, 50, 40, 30, 20, 10]


def test_last_ones_and_multiples_stay(run: Path) -> None:
    assert retire(run, 60, 2, 20) == [30, 10]
    assert steps(run) == [60, 50, 40, 20]
    assert retire(run, 60, 1, None) == [50, 40, 20]
    assert steps(run) == [60]
    assert [path.name for path in (run / CHECKPOINTS).iterdir()] == ["step-00000060"]


def test_only_whole_ones_are_counted(run: Path) -> None:
    """The newest has lost a file, and the one before it a byte: without them, 40 is the last good one."""
    (checkpoint_folder(run, 60) / "deepspeed/mp_rank_00_model_states.pt").unlink()
    (checkpoint_folder(run, 50) / "deepspeed/mp_rank_00_model_states.pt").write_bytes(b"weight")
    assert retire(run, 60, 1, None) == [30, 20, 10]
    assert steps(run) == [60, 50, 40]


def test_what_was_just_saved_stays_beside_what_lies_beyond(run: Path) -> None:
    """Somebody has put a checkpoint of a later step there: it is not this run's, and counts for nothing."""
    make_checkpoint(run, 90)
    assert retire(run, 60, 1, None) == [50, 40, 30, 20, 10]
    assert steps(run) == [90, 60]


def test_copy_under_another_name_is_no_checkpoint(run: Path) -> None:
    copy, newest = checkpoint_folder(run, 99), checkpoint_folder(run, 60)
    shutil.copytree(checkpoint_folder(run, 30), copy)
    newest.rename(newest.with_name("step-000000060"))  # the right step, not as a run writes it
    found, refused = list_checkpoints(run)
    assert [each.manifest.step for each in found] == [50, 40, 30, 20, 10]
    rule = "which does not match its name; rename it"
    assert [line for _, line in refused] == [
        f"{copy}: holds step 30, {rule} step-00000030, or move it elsewhere",
        f"{newest.with_name('step-000000060')}: holds step 60, {rule} step-00000060, or move it elsewhere",
    ]
    with pytest.raises(ConfigError, match=f"^{copy}: holds step 30, which does not match its name"):
        open_checkpoint(run, 99)
    assert retire(run, 50, 1, None) == [40, 30, 20, 10]
    assert rewind_to(run, 50) == []
    assert copy.is_dir()


def test_without_a_whole_one_nothing_is_removed(run: Path) -> None:
    for folder in (run / CHECKPOINTS).iterdir():
        (folder / "deepspeed/mp_rank_00_model_states.pt").unlink()
    assert retire(run, 60, 1, None) == []
    assert len(steps(run)) == 6


def test_what_is_a_persons_stays(run: Path) -> None:
    """Folders that were set aside, are no checkpoint or cannot be judged."""
    names = ["step-00000010.replaced-1", "mine", ".step-00000010.partial.mine", "step-00000005"]
    for name in names:
        (run / CHECKPOINTS / name).mkdir()
    retire(run, 60, 1, None)
    remove_leftovers(run)
    assert sorted(path.name for path in (run / CHECKPOINTS).iterdir()) == sorted([*names, "step-00000060"])


@pytest.mark.parametrize("operation", range(1, 7))
def test_best_ones_stay_wherever_a_removal_is_cut_short(
    run: Path, operation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at one of the six operations by which step 50 goes first; the next save makes up for it."""
    done = []

    def or_die(work: Callable[..., object]) -> Callable[..., object]:
        def work_or_die(*arguments: object, **named: object) -> object:
            done.append(work)
            if len(done) == operation:
                raise KeyboardInterrupt
            return work(*arguments, **named)

        return work_or_die

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", or_die(Path.rename))
        patch.setattr("longstride.launcher.checkpoints.saving.flush_folder", or_die(flush_folder))
        patch.setattr("longstride.launcher.checkpoints.saving.shutil.rmtree", or_die(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            retire(run, 60, 1, None, [20, 40])
    assert {20, 40, 60} <= set(steps(run))
    retire(run, 60, 1, None, [20, 40])
    remove_leftovers(run)
    assert [path.name for path in sorted((run / CHECKPOINTS).iterdir())] == [
        "step-00000020", "step-00000040", "step-00000060"
    ]  # fmt: skip


def test_a_run_of_a_palettes_tokens_is_ranked_by_bits_per_pixel() -> None:
    lines = [{"step": step, "split": "validation", "tokens": 4, "bits_per_pixel": 2.0 / step} for step in (1, 2)]
    assert [score.step for score in rank_scores(map(Score.of_line, lines))] == [2, 1]


@pytest.mark.parametrize(("newer", "order"), [({"bytes": 64}, [1, 2, 3]), ({"bytes": 48}, [2, 3, 1])])
def test_an_older_line_compares_with_newer_ones_unless_separators_are_between(
    newer: dict[str, int], order: list[int]
) -> None:
    """An older line has its bits over tokens: they are the bytes of content unless some are separators."""
    line = {"split": "validation", "tokens": 64}
    lines = [
        {"step": 1, "bits_per_byte": 2.2, **line},
        {"step": 2, "bits_per_byte": 2.9, **line, **newer},
        {"step": 3, "bits_per_byte": 3.1, **line, **newer},
    ]
    assert [score.step for score in rank_scores(map(Score.of_line, lines))] == order


def test_scores_are_ranked_and_outlive_metrics(tmp_path: Path) -> None:
    """Lower is better, then earlier; what was scored over other bytes comes last, and what is no number not at all."""

    def score(step: int, bits: float | None, tokens: int = 64) -> Score:
        return Score(step=step, split="validation", tokens=tokens, bits_per_byte=bits)

    known = [score(1, 0.5, 32), score(2, 2.0), score(3, None), score(4, 1.5), score(5, 2.0), score(6, 0.7, 32)]
    assert [each.step for each in rank_scores([*known, score(7, 3.0)])] == [4, 2, 5, 7, 1, 6]
    assert [each.step for each in rank_scores(known)] == [1, 6, 4, 2, 5]  # the newest is over 32 bytes
    folder = make_checkpoint(tmp_path, 7, best=[score(4, 1.5), score(2, 2.0)])
    repeated = [list_checkpoints(tmp_path)[0][0].manifest]
    assert collect_scores(tmp_path, "validation", repeated) == {4: score(4, 1.5), 2: score(2, 2.0)}
    assert collect_scores(tmp_path, "test", repeated) == {}
    write_metrics(tmp_path, [evaluation_line(4, 1.25), evaluation_line(9, None)])
    recorded = {4: score(4, 1.25), 9: score(9, None)}
    assert collect_scores(tmp_path, "validation", repeated) == {2: score(2, 2.0)} | recorded
    assert "best" not in (make_checkpoint(tmp_path, 8) / "manifest.json").read_text()
    assert "best" in (folder / "manifest.json").read_text()


def test_removal_cut_short_leaves_no_checkpoint_and_is_made_up_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("longstride.launcher.checkpoints.saving.remove_tree", lambda path: None)
        assert retire(run, 60, 5, None) == [10]
    assert steps(run) == [60, 50, 40, 30, 20]
    assert [path.name for path in (run / CHECKPOINTS).glob(".*")] == [".step-00000010.deleted"]
    for end in ("partial", "universal", "universal.partial", "universal.deleted"):  # three by an earlier version
        (run / CHECKPOINTS / f".step-00000070.{end}" / "weights").mkdir(parents=True)
    remove_leftovers(run)
    assert not list((run / CHECKPOINTS).glob(".*"))


def test_of_a_link_the_link_goes(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A checkpoint may lie elsewhere: what it leads to is a person's."""
    folder, elsewhere = checkpoint_folder(run, 10), tmp_path_factory.mktemp("elsewhere") / "mine"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert retire(run, 60, 5, None) == [10]
    assert not list((run / CHECKPOINTS).glob("*00010*"))
    assert (elsewhere / "manifest.json").exists()


def test_what_lies_beyond_is_set_aside(run: Path) -> None:
    assert [path.name for path in rewind_to(run, 40)] == ["step-00000060.replaced-1", "step-00000050.replaced-1"]
    assert steps(run) == [40, 30, 20, 10]
    assert (run / CHECKPOINTS / "latest").read_text() == "step-00000040\n"


@pytest.mark.parametrize("step", [40, 0])
def test_pointer_never_dangles_wherever_going_back_is_cut_short(
    run: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(run, 60)
    pointer, cuts = run / CHECKPOINTS / "latest", 0

    def cut_short(path: Path) -> Path | None:
        nonlocal cuts
        assert not pointer.exists() or pointer.with_name(pointer.read_text().strip()).is_dir()
        cuts += 1
        if cuts % 2:
            raise KeyboardInterrupt
        return set_aside(path)

    with monkeypatch.context() as patch:
        patch.setattr("longstride.launcher.checkpoints.saving.set_aside", cut_short)
        while True:
            try:
                rewind_to(run, step)
                break
            except KeyboardInterrupt:
                pass
    assert cuts > 1 and steps(run) == list(range(step, 0, -10))
    assert pointer.read_text() == "step-00000040\n" if step else not pointer.exists()


def test_pointer_names_a_folder_and_is_no_checkpoint(run: Path) -> None:
    point_to(run, 60)
    assert (run / CHECKPOINTS / "latest").read_text() == "step-00000060\n"
    assert len(steps(run)) == 6
    assert list_checkpoints(run)[1] == []
