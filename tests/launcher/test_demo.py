"""The demo's own parts; its stages are commands with tests of their own."""

import lzma
import random
import sys
from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from longstride.launcher import demo


def test_each_demo_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    made = [demo.new_folder(tmp_path / "runs") for _ in range(3)]
    assert [folder.name for folder in made] == ["demo-1", "demo-2", "demo-3"]


def test_a_failed_stage_ends_the_demo(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="export failed with exit code 2"):
        demo.stage("export")
    assert "longstride: error: the following arguments are required: RUN" in capfd.readouterr().err


def test_a_stage_hands_back_what_it_printed() -> None:
    assert demo.stage("export", "--help", capture=True).startswith("A checkpoint as safetensors.\n")


def test_loss_by_position_is_the_mean_over_the_bytes_of_each_eighth() -> None:
    first = [0, *range(8, 16), *range(16, 64, 8)]
    scored = {
        "first": first,
        "end": [*first[1:], 64],
        "bytes": [8, 3, *[1] * 7, *[24] * 6],  # the first eighth by one context alone
        "bits_per_byte": [9.0, 8.0, *[4.0] * 7, *[2.0] * 6],
    }
    lines = [line.split() for line in demo.by_position({"positions": scored})]
    assert lines[0] == ["8", "to", "15", "5.200"]
    assert lines[-1] == ["56", "to", "63", "2.000"]
    assert len(lines) == 7


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight texts that share most of their bytes."""
    folder = tmp_path_factory.mktemp("demo")
    rng = random.Random(0)
    texts = folder / "texts"
    texts.mkdir()
    shared = rng.randbytes(4_000).hex()
    for number in range(8):
        (texts / f"{number}.txt").write_text(shared + rng.randbytes(50).hex())
    build([texts], folder / "data", validation_fraction=0.25)
    return folder / "data"


def test_compressors_that_have_read_the_train_split_need_less(repetitive: Path) -> None:
    sizes = demo.compressors(repetitive)
    held_out = demo.content(repetitive, "validation")
    assert sizes["xz -9"] == 8 * len(lzma.compress(held_out, preset=9)) / len(held_out)
    names = {"xz -9", "PPMd"} & set(sizes)
    assert {f"{name}{demo.PRIMED}" for name in names} <= set(sizes)
    for name in names:
        assert sizes[f"{name}{demo.PRIMED}"] < 0.5 * sizes[name]


def test_ppmd_is_left_out_with_a_word_if_it_is_not_installed(
    repetitive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    assert set(demo.compressors(repetitive)) == {"gzip -9", "xz -9", f"xz -9{demo.PRIMED}"}
    assert 'pip install -e ".[demo]"' in capsys.readouterr().err


def test_samples_on_the_way_are_shown_behind_their_prompt(tmp_path: Path) -> None:
    for step, text in ((430, "return 1\n" * 9), (215, "x\x07y")):
        (tmp_path / f"step-{step:08d}.txt").write_text(demo.PROMPT + text)
    lines = demo.samples_on_the_way(tmp_path)
    assert lines[:3] == ["  step 215:", "      | x\ufffdy", "  step 430:"]
    assert lines[3:] == ["      | return 1"] * 6
