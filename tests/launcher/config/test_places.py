"""The data of a run is found from any folder, and where the run was moved with it."""

from pathlib import Path

import pytest

from longstride.launcher.config import RunConfig, load_config
from tests.harness.runs import configuration


def saved(data: str, output: str) -> RunConfig:
    """As a run that is started here saves it, read back."""
    config = RunConfig.model_validate(
        configuration(Path("x"), Path("y")) | {"deepspeed": {"zero_optimization": {"stage": 0}}}
    )
    content = config.to_json()
    content["data"]["path"], content["train"]["output"] = data, output
    return RunConfig.model_validate(RunConfig.model_validate(content).with_lasting_data().to_json())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, and the working directory."""
    (tmp_path / "project/data/text").mkdir(parents=True)
    (tmp_path / "project/runs/one").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_data_is_found_from_any_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved("data/text", "runs/one")
    assert config.data.path == "data/text"  # as it was given
    for folder, run in (("elsewhere", "../project/runs/one"), ("project/runs", "one"), ("project/runs/one", ".")):
        monkeypatch.chdir(project.parent / folder)
        assert Path(config.with_data_of(Path(run)).data.path) == project / "data/text"


def test_data_is_found_where_the_project_was_moved(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved("data/text", "./runs/one")
    monkeypatch.chdir(project.parent)
    project.rename(project.parent / "moved")
    assert Path(config.with_data_of(Path("moved/runs/one")).data.path) == project.parent / "moved/data/text"


@pytest.mark.parametrize("output", ["ABSOLUTE", "../elsewhere/one", "scratch/one", "."])
def test_a_run_folder_that_does_not_tell_its_start_has_the_whole_path(project: Path, output: str) -> None:
    (project / "scratch").symlink_to(project.parent / "elsewhere")
    output = str(project / "runs/one") if output == "ABSOLUTE" else output
    config = saved("data/text", output)
    assert config.data.path == str(project / "data/text")
    assert config.with_data_of(Path(output)) == config


def test_what_is_absolute_remote_or_nowhere_stays(project: Path, tmp_path: Path) -> None:
    for path in ("https://example.org/data", "s3://bucket/data", str(tmp_path / "none"), "data/none"):
        config = saved(path, "runs/one")
        assert config.data.path == path
        assert config.with_data_of(project / "runs/one") == config


def test_a_file_keeps_its_path_until_a_run_is_started(project: Path) -> None:
    assert load_config("enwik8_fixed").data.path == "data/enwik8"
