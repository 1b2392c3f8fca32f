"""What TensorBoard shows of the samples that a run draws on the way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher.models import ModelData
from longstride.launcher.training.monitors import Monitors
from tests.harness.clients import client
from tests.launcher.training.test_monitors import Engine


def shown(folder: Path, data: ModelData, drawn: np.ndarray) -> dict[str, Any]:
    """Return what TensorBoard reads of samples at step 5, by kind and tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    engine, said = Engine(), list[str]()
    monitors = Monitors(engine, said.append)
    engine.monitor.tb_monitor = SimpleNamespace(summary_writer=SummaryWriter(folder))
    monitors.samples(5, data, drawn, [Path("runs/mine/samples/step-00000005.txt")])
    assert said == []
    assert engine.events == [[("samples/file", "runs/mine/samples/step-00000005.txt", 40)]]  # as CSV has it
    read = EventAccumulator(str(folder)).Reload()
    tags = read.Tags()
    found = {f"image {tag}": read.Images(tag) for tag in tags["images"]}
    found |= {f"audio {tag}": read.Audio(tag) for tag in tags["audio"]}
    return found | {f"text {tag}": read.Tensors(tag) for tag in tags["tensors"]}


@client("tensorboard", "samples on the way: texts", "the text as it is, no part of it taken for Markdown")
def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    drawn = np.frombuffer(b"# no *heading*\nx = 1", dtype=np.uint8)[None]
    ((tag, events),) = shown(tmp_path, ModelData(MODALITIES["text"], {}), drawn).items()
    assert tag == "text samples/1/text_summary" and events[0].step == 40
    assert events[0].tensor_proto.string_val == [b"    # no *heading*\n    x = 1"]


@client(
    "tensorboard", "samples on the way: pictures and sounds", "a strip of pictures; sounds that play, at their rate"
)
def test_pictures_are_shown_and_sounds_played(tmp_path: Path) -> None:
    pictures = np.arange(2 * 48, dtype=np.uint8).reshape(2, 48)
    size = {"height": 4, "width": 4, "channels": 3}
    ((tag, events),) = shown(tmp_path / "pictures", ModelData(MODALITIES["image"], size), pictures).items()
    assert tag == "image samples" and (events[0].step, events[0].height, events[0].width) == (40, 4, 8)
    sounds = np.full((1, 400), 128, dtype=np.uint8)
    ((tag, events),) = shown(tmp_path / "sounds", ModelData(MODALITIES["audio"], {"rate": 8000}), sounds).items()
    assert tag == "audio samples/1" and (events[0].sample_rate, events[0].length_frames) == (8000, 400)
