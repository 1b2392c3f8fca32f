"""Samples of a model in training: what they hold, that they change nothing else, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longstride.data_pipelines.modalities import MODALITIES
from longstride.kernels import ConfigError
from longstride.launcher.cli import main
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.models import ModelData, load_model
from longstride.launcher.training.samples import draw, num_sampled
from tests.harness.runs import complete, configuration, metrics

CPU = torch.device("cpu")
TEXT = ModelData(MODALITIES["text"], {})
ASKED = ("train.samples_every=4", 'train.samples={"prompt": "sp", "bytes": 30, "count": 2, "top_p": 0.9}')


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "samples").iterdir())


def test_a_run_with_samples_is_the_run_without_them(trained: Any) -> None:
    """Dropout draws what it would have drawn: the same batches, losses and norms, to the bit."""
    run = trained("samples", 1, *ASKED)
    assert metrics(run) == metrics(trained("alone", 1))
    assert names(run) == ["step-00000004.txt", "step-00000008.txt"]


@pytest.mark.parametrize(
    ("name", "processes", "overrides"),
    [
        ("samples", 1, ASKED),
        (
            "samples of shards",  # weights and tables sharded, and two processes to a context
            2,
            (
                *ASKED,
                'model.ngrams={"orders": [2, 3], "rows": 97}',
                "train.sequence_parallel=2",
                "train.samples_every=8",
                "deepspeed=zero3_fp32",
            ),
        ),
    ],
)
def test_samples_are_those_of_the_exported_model(
    name: str, processes: int, overrides: tuple[str, ...], trained: Any, tmp_path: Path
) -> None:
    run = trained(name, processes, *overrides)
    assert main(["export", str(run), "--output", str(tmp_path / "model"), "--no-check"]) == 0
    config = RunConfig.model_validate(json.loads((run / "config.json").read_text()))
    drawn = draw(load_model(tmp_path / "model"), config, TEXT, CPU, 8)
    assert drawn is not None and drawn.shape == (2, 32)
    first, second = (each.tobytes() for each in drawn)
    wanted = b"=== sample 1 ===\n" + first + b"\n=== sample 2 ===\n" + second + b"\n"
    assert (run / "samples" / "step-00000008.txt").read_bytes() == wanted
    assert first.startswith(b"sp") and first != second


def test_samples_that_cannot_be_written_end_nothing(data: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", tmp_path / "run.json"
    config.write_text(json.dumps(configuration(data, run)))
    run.mkdir()
    (run / "samples").write_text("in the way")
    ended = complete(["--config", str(config), *ASKED], 1, {})
    told = [line for line in ended.stderr[0].splitlines() if line.startswith("step") and "samples" in line]
    assert told == [f"step {step}: samples could not be written: {run / 'samples'}: File exists" for step in (4, 8)]


def test_pictures_are_whole_and_four(config_file: Path) -> None:
    size = {"height": 2, "width": 4, "channels": 3}
    config = load_config(config_file, ["train.samples_every=1"])
    assert num_sampled(config, ModelData(MODALITIES["image"], size)) == (4, 24)
    sound = ModelData(MODALITIES["audio"], {"rate": 8000})
    assert num_sampled(config, sound) == (1, 64)
    assert num_sampled(config, TEXT) == (1, 64)


@pytest.mark.parametrize(
    ("samples", "kind", "line"),
    [
        ({"prompt": "x" * 64}, "text", 'train.samples.prompt="' + "x" * 40 + '": has 64 bytes; must leave room'),
        ({"bytes": 63, "prompt": "xy"}, "text", "train.samples.bytes=63: prompt and sample must fit"),
        ({"prompt": "def "}, "audio", 'train.samples.prompt="def ": only applies to text, and the data are sounds'),
        ({"bytes": 3}, "image", "train.samples.bytes=3: the size of pictures is fixed, 12 bytes; leave it out"),
    ],
)
def test_what_cannot_be_sampled_is_refused(samples: Any, kind: str, line: str, config_file: Path) -> None:
    config = load_config(config_file, ["train.samples_every=1", f"train.samples={json.dumps(samples)}"])
    known = {"image": {"height": 2, "width": 2, "channels": 3}, "audio": {"rate": 8000}}
    with pytest.raises(ConfigError) as raised:
        num_sampled(config, ModelData(MODALITIES[kind], known.get(kind, {})))
    assert str(raised.value).startswith(line)


def test_a_refusal_comes_before_anything_is_made(config_file: Path, refused: Any) -> None:
    (line,) = refused("--config", str(config_file), "train.samples_every=1", "train.samples.bytes=65")
    assert line == "train.samples.bytes=65: prompt and sample must fit in the context of 64; at most 64"


def test_a_seed_and_a_step_give_the_same_samples(config_file: Path, exported: Path) -> None:
    model = load_model(exported)
    content = load_config(config_file, ["train.samples_every=1", "train.samples.bytes=8"]).to_json()
    content["model"]["context"] = model.config.context
    config = RunConfig.model_validate(content)
    before = torch.get_rng_state()
    first, again, later = (draw(model, config, TEXT, CPU, step) for step in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert first is not None and np.array_equal(first, again) and not np.array_equal(first, later)
