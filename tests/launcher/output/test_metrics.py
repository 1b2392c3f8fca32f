"""What a line of metrics.jsonl is: to every reader, under every name of a split, among lines that no run writes."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest

from longstride.data_pipelines.modalities import MODALITIES
from longstride.launcher.checkpoints.manifest import collect_scores, rank_scores
from longstride.launcher.cluster.start import read_progress
from longstride.launcher.config import load_config
from longstride.launcher.exports.for_hubs import model_card
from longstride.launcher.models import ModelData
from longstride.launcher.output.metrics_file import (
    content_of,
    cut_metrics,
    is_step,
    loss_fields,
    parse_line,
    read_lines,
)
from longstride.launcher.planning.costs import step_flops, work
from longstride.launcher.planning.pace import rate_of
from longstride.launcher.ranks import Ranks
from longstride.launcher.reporting.loss import draw_loss
from longstride.launcher.reporting.records import read_run
from longstride.launcher.training.guards import Plateau
from longstride.launcher.training.loop import lacks_evaluation, summary
from longstride.launcher.training.replay import find_record
from tests.harness.lines import evaluation_line, step_line, write_metrics

MADE = Path(__file__).parents[2] / "made_before/zero2_fp32"
STEP_BITS, EVALUATED = {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0}, {2: 0.5, 4: 1.5}  # the best one is no step's nor the last


@pytest.mark.parametrize(("tokens", "content"), [(64, 64), (2036, 1457), (3, 1), (5, 0)])
@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("byte", ["bits_per_byte"]),
        ("dimension", ["bits_per_byte", "bits_per_dimension"]),
        ("pixel", ["bits_per_pixel"]),
    ],
)
def test_bits_are_all_nats_over_log_two_and_content(unit: str, names: list[str], tokens: int, content: int) -> None:
    line = loss_fields(math.log(256), tokens, content, unit)
    assert (line["loss_nats"], line["tokens"]) == (math.log(256), tokens)
    assert [name for name in line if name.startswith("bits_per_")] == names
    wanted = 8.0 * tokens / content if content else None
    assert [line[name] for name in names] == pytest.approx([wanted] * len(names))
    lost = loss_fields(math.nan, tokens, content, unit)
    assert [lost[name] for name in ("loss_nats", *names)] == [None] * (1 + len(names))
    assert line.get("bytes") == (None if unit == "pixel" else content)
    assert content_of(line) == (tokens if unit == "pixel" else content)


def made_run(folder: Path, train_split: str = "train", validation_split: str = "validation", steps_on: str = "") -> Any:
    """A run at step 4 in a folder of its own: four steps of half a second each, two evaluations of 90 s.

    ``steps_on``: the split that lines of steps name; "train" in those of older versions, whatever the split.
    """
    (folder / "checkpoints/step-00000004").mkdir(parents=True)
    shutil.copy(MADE / "checkpoints/step-00000004/manifest.json", folder / "checkpoints/step-00000004")
    content = json.loads((MADE / "config.json").read_text())
    content["data"] |= {"train_split": train_split, "validation_split": validation_split}
    content["train"] |= {"evaluate_every": 2, "stop_when": {"evaluations": 2}, "output": str(folder)}
    (folder / "config.json").write_text(json.dumps(content))
    steps_on, lines = steps_on or train_split, []
    for step, bits in STEP_BITS.items():
        lines.append(step_line(step, bits, steps_on, seconds=0.5))
        if step in EVALUATED:
            lines.append(evaluation_line(step, EVALUATED[step], validation_split, seconds=90.0))
    write_metrics(folder, lines)
    data = SimpleNamespace(unit="byte", palette=None, has_split=lambda split: True, fills_contexts=True)
    config = load_config(folder / "config.json")
    return SimpleNamespace(
        folder=folder, config=config, ranks=Ranks(), data=data, steps_on=steps_on, split=validation_split
    )


def check_best(run: Any) -> None:
    assert [score.step for score in rank_scores(collect_scores(run.folder, run.split, ()).values())] == [2, 4]
    assert collect_scores(run.folder, "another", ()) == {}


def check_early_stopping(run: Any) -> None:
    assert Plateau(run).memory() == {
        "step": 4,
        "best": {"step": 2, "split": run.split, "tokens": 64, "bits_per_byte": 0.5},
        "since": 1,
    }


def check_missing_evaluation(run: Any) -> None:
    assert [lacks_evaluation(step, run) for step in (2, 4, 6)] == [False, False, True]


def check_summary(run: Any) -> None:
    assert f"; best 0.5000 bits per byte on {run.split}, at step 2; in " in summary(run, 4, 0, 1.0, 256)[0]


def check_pace(run: Any) -> None:
    flops = sum(step_flops(work(run.config.model, run.config.train.micro_batch), run.config).values())
    assert rate_of(run.folder).flops_per_second == pytest.approx(flops / (0.5 * 2))  # of two processes


def check_replay(run: Any) -> None:
    for step, bits in STEP_BITS.items():
        record = find_record(run.folder, step)
        assert record is not None
        assert record.figures == {"loss_nats": bits * math.log(2), "grad_norm": 1.0, "sample_ids_crc32": step}
    assert find_record(run.folder, 5) is None


def check_card(run: Any) -> None:
    manifest = SimpleNamespace(step=4, precision="fp32", zero_stage=2, world_size=2)
    checkpoint: Any = SimpleNamespace(config=run.config, manifest=manifest)
    text = model_card(run.folder, checkpoint, ModelData(MODALITIES["text"], {}), "trained", "fp32", "", {})
    assert "| training bits per byte | 5.0000 on the step's batch |\n" in text
    assert f"| validation bits per byte | 1.5000 on 64 bytes of {run.split} |\n" in text


def check_report(run: Any) -> None:
    record = read_run(run.folder)
    curves = [record.train["bits"], record.evaluations[run.split]]
    drawn = [dict(zip(each.steps.tolist(), each.values.tolist(), strict=True)) for each in curves]
    assert drawn == [STEP_BITS, EVALUATED] and len(record.evaluations) == 1


def check_picture(run: Any) -> None:
    figure = draw_loss(run.folder)
    plt.close(figure)
    axis = figure.axes[0]
    curves = [(line.get_label(), list(line.get_ydata())) for line in axis.lines]
    assert curves == [(run.steps_on, list(STEP_BITS.values())), (run.split, list(EVALUATED.values()))]
    assert axis.get_title() == f"{run.folder.name} · {run.split} 1.500 at step 4"


def check_progress(run: Any) -> None:
    assert read_progress(run.folder).recorded == 4


def check_cut(run: Any) -> None:
    before = (run.folder / "metrics.jsonl").read_bytes()
    copy = cut_metrics(run.folder, 2)
    assert copy is not None and copy.read_bytes() == before
    lines = [(line["step"], line["split"], is_step(line)) for line in read_lines(run.folder)]
    assert lines == [(1, run.steps_on, True), (2, run.steps_on, True), (2, run.split, False)]
    assert cut_metrics(run.folder, 2) is None


READERS: list[Callable[[Any], None]] = [
    check_best, check_early_stopping, check_missing_evaluation, check_summary, check_pace, check_replay, check_card,
    check_report, check_picture, check_progress, check_cut,
]  # fmt: skip
SPLITS = [
    (train, validation, steps_on)
    for train, validation in itertools.permutations(("train", "validation", "test", "my split"), 2)
    for steps_on in dict.fromkeys((train, "train"))
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("train", "validation", "steps_on"), SPLITS)
def test_steps_and_evaluations_are_told_apart_by_every_reader(
    read: Callable[[Any], None], train: str, validation: str, steps_on: str, tmp_path: Path
) -> None:
    read(made_run(tmp_path / "run", train, validation, steps_on))


NO_NUMBERS = (True, "1", [1], {"a": 1})
NO_COUNTS = (*NO_NUMBERS, -1, 2**63, 10**400, 0.5, None)
OF_A_STEP = dict.fromkeys(("learning_rate", "loss_scale"), (*NO_NUMBERS, None)) | {"grad_norm": NO_NUMBERS}
OF_A_STEP |= dict.fromkeys(("skipped_steps", "sample_ids_crc32", "epoch"), NO_COUNTS)
OF_BOTH = {"step": (*NO_COUNTS, 0), "split": (True, 1, [1], None), "tokens": NO_COUNTS}
OF_BOTH |= dict.fromkeys(("loss_nats", "bits_per_byte"), NO_NUMBERS)


def half_lines() -> dict[str, bytes]:
    """Lines that no run writes, by what they are: with less than a whole one has, or with other values."""
    step, evaluation = step_line(3, 0.25, "validation"), evaluation_line(3, 0.25)
    changed: dict[str, Any] = {
        "a step alone": {"step": 1},
        "nothing": {},
        "a list": [step],
        "a number": 3,
        "null": None,
    }
    for kind, line, wrong in (("step", step, OF_BOTH | OF_A_STEP), ("evaluation", evaluation, OF_BOTH)):
        for name, values in wrong.items():
            changed |= {f"{kind}: {name}={str(value)[:30]!r}": line | {name: value} for value in values}
            if name in line:
                changed[f"{kind}: no {name}"] = {key: line[key] for key in line if key != name}
    changed |= {f"evaluation: with {name}": evaluation | {name: step[name]} for name in OF_A_STEP}
    lines = {what: json.dumps(value).encode() + b"\n" for what, value in changed.items()}
    text = json.dumps(evaluation).encode()
    lines |= {f"torn at {place}": text[:place] + b"\n" for place in range(0, len(text), 7)}
    lines |= {"no UTF-8": text.replace(b"validation", b"\xff") + b"\n", "deep": b"[" * 100_000 + b"\n"}
    return lines | {"digits": text.replace(b"64", b"9" * 5000) + b"\n"}


@pytest.mark.parametrize("text", half_lines().values(), ids=half_lines().keys())
def test_a_line_that_no_run_writes_is_none(text: bytes) -> None:
    assert parse_line(text) == {}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("end", [b"", b'{"step": 5', b"x" * 5_000_000 + b"\n"], ids=["whole", "torn", "long"])
def test_lines_that_no_run_writes_are_passed_over_by_every_reader(
    read: Callable[[Any], None], end: bytes, tmp_path: Path
) -> None:
    """The last one may be torn, or so long that nothing behind it is looked for."""
    run = made_run(tmp_path / "run")
    path = run.folder / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, *half_lines().values(), *others, end]))
    if read is check_progress and len(end) > 2**16:  # which looks at the end of the file alone
        assert read_progress(run.folder).recorded == 0
    else:
        read(run)


@pytest.mark.parametrize("path", sorted(MADE.parent.glob("*/metrics.jsonl")), ids=lambda path: path.parent.name)
def test_every_line_of_older_versions_is_whole(path: Path) -> None:
    lines = list(read_lines(path.parent))
    assert len(lines) == 5 and [is_step(line) for line in lines] == [True] * 4 + [False]


@pytest.mark.parametrize("line", [step_line(1), step_line(1, None, grad_norm=None), step_line(2**62, tokens=64)])
@pytest.mark.parametrize("unit", ["byte", "pixel"])
def test_a_line_as_runs_write_it_is_taken(line: dict[str, Any], unit: str) -> None:
    written = {name.replace("byte", unit): value for name, value in line.items()}
    assert parse_line(json.dumps(written).encode() + b"\n") == written


@pytest.mark.parametrize("count", [-1, 1.5, True, [], None, 2**63])
def test_a_line_of_no_number_of_bytes_is_damaged(count: Any) -> None:
    line = step_line(1) | {"bytes": 3}
    assert parse_line(json.dumps(line).encode() + b"\n") == line
    assert parse_line(json.dumps(line | {"bytes": count}).encode() + b"\n") == {}
