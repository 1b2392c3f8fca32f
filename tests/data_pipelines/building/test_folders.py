"""Where a build reads and writes: no file is taken twice, and inputs and output do not overlap."""

from pathlib import Path

import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.building.folders import check_apart
from longstride.data_pipelines.errors import DataError
from tests.harness.data.builds import numbered_files, payloads_of, write_files


@pytest.fixture
def texts(tmp_path, monkeypatch) -> Path:
    """Create texts in the working directory, so that all names are relative."""
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "texts", numbered_files(8))
    (tmp_path / "link").symlink_to("texts/0")
    return tmp_path


@pytest.mark.parametrize(
    ("inputs", "output", "rule"),
    [
        (
            ["texts", "texts/0"],
            "data",
            "texts/0: lies inside texts, so its files would be read twice; name only one of the two",
        ),
        (["texts/0/f0.py", "texts"], "data", "texts/0/f0.py: lies inside texts, so its files would be read twice"),
        (["texts", "link"], "data", "link: lies inside texts, so its files would be read twice"),
        (["texts", "texts"], "data", "texts: is named twice; name every input once"),
        (["link", "texts/0"], "data", r"texts/0: is named twice \(as link\); name every input once"),
        (["texts"], "texts/data", "HERE/texts/data: lies inside the input texts; name an output outside it"),
        (["texts"], "link/data", "HERE/texts/0/data: lies inside the input texts; name an output outside it"),
        (["."], "data", r"HERE/data: lies inside the input \.; name an output outside it"),
        (["texts/0"], "texts", "texts/0: lies inside the output, HERE/texts; name an output outside the input"),
        ([".d.unfinished/data"], "d", r"\.d\.unfinished/data: lies inside the output, HERE/\.d\.unfinished; name"),
    ],
)
def test_places_that_overlap_are_refused(texts, inputs, output, rule):
    with pytest.raises(DataError, match=f"^{rule.replace('HERE', str(texts))}") as caught:
        check_apart([Path(name) for name in inputs], Path(output).resolve())
    assert "\n" not in str(caught.value)


def test_build_refuses_places_that_overlap_before_anything_is_written(texts):
    for inputs, output in ((["texts", "texts/0"], "data"), (["texts"], "texts/data")):
        with pytest.raises(DataError, match="lies inside"):
            build([Path(name) for name in inputs], Path(output))
    assert sorted(path.name for path in texts.iterdir()) == ["link", "texts"]


def test_build_takes_folders_that_only_look_alike(texts):
    """A path may begin with the name of another input. Links are followed."""
    write_files(texts / "texts2", numbered_files(8))
    build([Path("link"), Path("texts2")], Path("data"), validation_fraction=0)
    assert len(payloads_of(Path("data"), "train")) == 2 + 8
