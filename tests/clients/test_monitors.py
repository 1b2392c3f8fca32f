"""TensorBoard and W&B show what metrics.jsonl has, every number of every line, and the samples of a run."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher.models import ModelData
from longstride.launcher.training.monitors import Monitors
from tests.harness.clients import client
from tests.harness.data.builds import write_files
from tests.harness.runs import configuration, spawn
from tests.launcher.training.test_monitors import Engine

BATCH = 8  # contexts of a step
History = dict[tuple[str, int], float]  # by name, and by the number of contexts until then
MONITORS = {
    "tensorboard": {"enabled": True, "output_path": "{folder}", "job_name": "board"},
    "wandb": {"enabled": True, "project": "strides", "group": "one"},
    "csv_monitor": {"enabled": True, "output_path": "{folder}", "job_name": "csv"},
}


def start(folder: Path, *arguments: str, spoil: str | None = None) -> None:
    """Start two processes that share each context, under ZeRO 2; a guard refuses the loss ``spoil``."""
    chosen = [
        f"deepspeed.{name}={json.dumps(keys)}".replace("{folder}", str(folder)) for name, keys in MONITORS.items()
    ]
    names = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    extra = dict.fromkeys(names, str(folder)) | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    extra |= {"SPOIL": spoil} if spoil else {}
    options = ("deepspeed=zero2_fp32", "train.sequence_parallel=2", "train.guards.non_finite=rewind", *chosen)
    ended = spawn(["--config", str(folder / "run.json"), *options, *arguments], 2, extra)
    assert ended.codes == [0, 0], ended.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a run that was rewound from step 6 to 4, ended at 8, was moved back to 4 by hand, and ended again."""
    folder = tmp_path_factory.mktemp("monitored")
    texts = {f"{number}.txt": f"a stride of {number} bytes ".encode() * 150 for number in range(4)}
    build([write_files(folder / "source", texts)], folder / "data", validation_fraction=0.3)
    (folder / "run.json").write_text(json.dumps(configuration(folder / "data", folder / "run")))
    start(folder, spoil="loss,1,6,6,1")
    shutil.copy(folder / "run/metrics.jsonl", folder / "first.jsonl")
    start(folder, "--resume", "4")
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def history_of(records: list[dict[str, Any]]) -> History:
    """Return every number of every line at its place in a monitor."""
    return {
        (f"{line['split']}/{key}", BATCH * line["step"]): value
        for line in records
        for key, value in line.items()
        if isinstance(value, int | float)
    }


def own(history: History) -> History:
    """Remove what DeepSpeed itself writes."""
    return {place: value for place, value in history.items() if not place[0].startswith("Train/")}


def board(folder: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    for name in accumulator.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in accumulator.Scalars(name))


def offline_run(folder: Path) -> History:
    """Read the history from an offline run's file, which `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    history: History = {}
    for data in logged(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name, value in row.items():
            if not name.startswith("_"):
                assert (name, row["_step"]) not in history, "a row is written once"
                history[name, row["_step"]] = value
    return history


def logged(data: bytes) -> Iterator[bytes]:
    """Read the entries of a LevelDB log after 7 bytes: parts with a head each, in blocks of 32 KiB."""
    block, head, place, parts = 32768, 7, 7, b""
    while place < len(data):
        if block - place % block < head:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + head : place + head + length]
        place += head + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@client(
    "tensorboard",
    "DeepSpeed's monitor under ZeRO 2, two processes to a context; rewound and resumed on the way",
    "every number of metrics.jsonl once, in fp32, over the contexts trained on",
)
def test_tensorboard_shows_what_metrics_jsonl_has(run: Path) -> None:
    points = list(board(run / "board"))
    shown = {(name, step): value for name, step, value in points}
    assert len(shown) == len(points)
    expected = history_of(lines(run / "run/metrics.jsonl"))
    assert own(shown) == {place: np.float32(value) for place, value in expected.items()}
    assert {step for name, step in shown if name == "Train/Samples/lr"} == set(range(BATCH, 9 * BATCH, BATCH))


@client(
    "wandb",
    "DeepSpeed's monitor, offline, the same run",
    "equal bits; a rewind or resume begins a new run",
)
def test_wandb_has_what_metrics_jsonl_has(run: Path) -> None:
    histories = [offline_run(folder) for folder in sorted((run / "wandb").glob("offline-run-*"))]
    before, first, last = (
        lines(run / name) for name in ("run/metrics.before-rewind-1.jsonl", "first.jsonl", "run/metrics.jsonl")
    )
    assert before[-1]["guard"] == "rewind: the loss is nan"
    behind = [[line for line in records if line["step"] > 4] for records in (first, last)]
    expected = [history_of(before), *map(history_of, behind)]
    assert sorted(map(sorted, map(own, histories))) == sorted(map(sorted, expected))
    for history in histories:
        assert own(history) in expected
        assert {step for name, step in history if name == "Train/Samples/lr"} == {
            step for name, step in history if name.startswith("train/")
        }


@pytest.mark.clients
def test_csv_files_go_on_in_the_order_of_writing(run: Path) -> None:
    rows = defaultdict(list)
    for path in (run / "csv").glob("train_*.csv"):
        rows[path.name] = [line.split(",") for line in path.read_text().splitlines()]
    heading, *points = rows["train_loss_nats.csv"]
    steps = [int(step) // BATCH for step, _ in points]
    assert heading == ["step", "loss_nats"] and steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 5, 6, 7, 8]


def logged_samples(folder: Path, data: ModelData, drawn: np.ndarray) -> dict[str, Any]:
    """Return what TensorBoard reads of samples at step 5, by kind and tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    engine, messages = Engine(), list[str]()
    monitors = Monitors(engine, messages.append)
    engine.monitor.tb_monitor = SimpleNamespace(summary_writer=SummaryWriter(folder))
    monitors.samples(5, data, drawn, [Path("runs/mine/samples/step-00000005.txt")])
    assert messages == []
    assert engine.events == [[("samples/file", "runs/mine/samples/step-00000005.txt", 40)]]  # as CSV has it
    read = EventAccumulator(str(folder)).Reload()
    tags = read.Tags()
    events_by_tag = {f"image {tag}": read.Images(tag) for tag in tags["images"]}
    events_by_tag |= {f"audio {tag}": read.Audio(tag) for tag in tags["audio"]}
    return events_by_tag | {f"text {tag}": read.Tensors(tag) for tag in tags["tensors"]}


@client("tensorboard", "samples on the way: texts", "the exact text, not as Markdown")
def test_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    drawn = np.frombuffer(b"# no *heading*\nx = 1", dtype=np.uint8)[None]
    ((tag, events),) = logged_samples(tmp_path, ModelData(MODALITIES["text"], {}), drawn).items()
    assert tag == "text samples/1/text_summary" and events[0].step == 40
    assert events[0].tensor_proto.string_val == [b"    # no *heading*\n    x = 1"]


@client(
    "tensorboard", "samples on the way: pictures and sounds", "a strip of pictures; sounds that play, at their rate"
)
def test_pictures_are_shown_and_sounds_played(tmp_path: Path) -> None:
    pictures = np.arange(2 * 48, dtype=np.uint8).reshape(2, 48)
    size = {"height": 4, "width": 4, "channels": 3}
    ((tag, events),) = logged_samples(tmp_path / "pictures", ModelData(MODALITIES["image"], size), pictures).items()
    assert tag == "image samples" and (events[0].step, events[0].height, events[0].width) == (40, 4, 8)
    sounds = np.full((1, 400), 128, dtype=np.uint8)
    data = ModelData(MODALITIES["audio"], {"rate": 8000})
    ((tag, events),) = logged_samples(tmp_path / "sounds", data, sounds).items()
    assert tag == "audio samples/1" and (events[0].sample_rate, events[0].length_frames) == (8000, 400)
