"""`data index`, training on what it makes, and what becomes of runs of the streaming order, whose place it takes."""

import json
from pathlib import Path

import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.kernels.errors import ConfigError
from longstride.launcher import cli
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.checkpoints.manifest import CheckpointManifest
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.identity import check_matches, trained_on
from longstride.launcher.models.model_data import ModelData
from longstride.launcher.ranks import Ranks
from tests.harness.data.tars import write_shards
from tests.harness.runs import Run, metrics, spawn_series
from tests.launcher.conftest import Refusal


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """A folder of tars for both splits."""
    write_shards(tmp_path / "tars", samples=(20, 30, 10), sizes=(300, 900))
    write_shards(tmp_path / "tars", samples=(10,), prefix="validation-", sizes=(300, 900), seed=1)
    return tmp_path / "tars"


def test_the_verb_makes_a_data_folder_that_every_other_verb_reads(
    tars: Path, tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    output = tmp_path / "index"
    words = ["data", "index", str(tars), "--output", str(output)]
    assert cli.main(words) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{output}: train ") and " bytes of 60 documents, validation " in line
    assert cli.main(["data", "verify", str(output)]) == 0
    assert capsys.readouterr().err.endswith(f"{output}: whole\n")
    assert cli.main(["data", "show", str(output), "--count", "1"]) == 0
    assert ".tar: " in capsys.readouterr().out.splitlines()[0]
    assert cli.main(["plan", str(config_file), f"data.path={output}"]) == 0
    assert f"in {output}" in capsys.readouterr().out
    assert refusal(*words) == f"{output}/manifest.json: already exists and is not overwritten; name another output"


def test_a_run_on_an_index_goes_on_at_the_very_batch(tars: Path, tmp_path: Path, config_file: Path) -> None:
    assert cli.main(["data", "index", str(tars), "--output", str(tars)]) == 0
    words = ["--config", str(config_file), f"data.path={tars}", "train.checkpoint_every=3", "train.schedule=constant"]
    runs = [
        Run([*words, f"train.output={tmp_path / 'resumed'}", "train.steps=4"], 1),
        Run([*words, f"train.output={tmp_path / 'resumed'}", "train.steps=9", "--resume", "auto"], 2),
        Run([*words, f"train.output={tmp_path / 'whole'}", "train.steps=9"], 1),
    ]
    for ended in spawn_series(runs):
        assert not any(ended.codes), ended.stderr
    ids = [
        {line["step"]: line["sample_ids_crc32"] for line in metrics(tmp_path / name) if line["split"] == "train"}
        for name in ("resumed", "whole")
    ]
    assert ids[0] == ids[1] and set(ids[0]) == set(range(1, 10))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--extension", "a/b"], "--extension='a/b': must be what follows a member's first dot, such as txt"),
        (["--split", "train"], "--split=train: must be NAME=PATTERN, such as validation='val-*.tar'"),
        (["--validation-fraction", "2"], "--validation-fraction=2.0: must be at least 0 and less than 1, such as 0.05"),
        (["--output", "s3://b/c"], "--output='s3://b/c': must be a folder on this machine, such as data/mine; then"),
    ],
)
def test_options_are_told_by_their_names(
    tars: Path, tmp_path: Path, options: list[str], line: str, refusal: Refusal
) -> None:
    assert refusal("data", "index", tars, "--output", tmp_path / "index", *options).startswith(line)


# Runs of the streaming order.


@pytest.fixture
def streaming(config_file: Path, tars: Path) -> RunConfig:
    """The configuration that a streaming run has saved."""
    content = load_config(str(config_file)).to_json()
    content["data"] |= {"path": str(tars), "order": "streaming", "modality": "text", "extension": "txt"}
    return RunConfig.model_validate(json.loads(json.dumps(content)))


def test_a_streaming_run_is_still_exported_and_scored_on_an_index(streaming: RunConfig, tars: Path) -> None:
    checkpoint = Checkpoint(Path("run/checkpoints/step-00000004"), CheckpointManifest.model_construct(stream={}))
    vars(checkpoint)["config"] = streaming
    assert trained_on(checkpoint) == ModelData(MODALITIES["text"], {})
    with pytest.raises(ConfigError, match=r'^data\.order="streaming": is no longer supported'):
        TrainingData(streaming, Ranks())
    assert cli.main(["data", "index", str(tars), "--output", str(tars)]) == 0
    assert next(TrainingData(streaming, Ranks(), str(tars)).evaluation()).lengths.sum() > 0


def test_a_streaming_run_is_not_gone_on_with(config_file: Path, streaming: RunConfig) -> None:
    class Saved(Checkpoint):
        config = streaming  # type: ignore[assignment]

    state = {"fingerprint": "0" * 64, "seed": 0, "epoch": 0, "step": 4, "global_batch": 8}
    manifest = CheckpointManifest.model_construct(stream=state)
    config = load_config(str(config_file))
    saved = Saved(Path("run/checkpoints/step-00000004"), manifest)
    with pytest.raises(ConfigError) as caught:
        check_matches(saved, config, TrainingData(config, Ranks()).identity)
    (line,) = str(caught.value).splitlines()
    assert line.startswith('data.order="exact": the checkpoint run/checkpoints/step-00000004 counts steps of the order')
    assert "index its tars with `longstride data index`, and start a run in another folder" in line
