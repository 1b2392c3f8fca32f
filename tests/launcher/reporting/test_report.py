"""A report's page: what it tells, what it never obeys, how large it may become, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longstride.launcher import cli
from longstride.launcher.config import load_config
from longstride.launcher.reporting.charts import Scale, number, thin, tick_text, value_range
from longstride.launcher.reporting.page import compose, labels
from longstride.launcher.reporting.records import Answer, RunHistory, Sample, Series, plan_of, read_run
from longstride.launcher.reporting.template import MOST_PAGE_BYTES
from tests.harness.lines import evaluation_line, step_line, write_metrics
from tests.harness.runs import ROOT
from tests.launcher.conftest import Refusal

OLD = ROOT / "tests" / "made_before"
EVIL = '"><img src=x onerror=alert(1)></script><script>alert(2)</script>'
PARTS = ("curves", "positions", "samples", "reads", "incidents", "starts", "plan", "configuration")


class Page(HTMLParser):
    """The elements of a page, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._silent = self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._silent = self._silent and tag not in ("script", "style")
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)
            if self._in_cell:
                self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)

    def charts(self) -> int:
        return sum(tag == "figure" and "chart" in (attrs["class"] or "") for tag, attrs in self.elements)


def write_run(folder: Path, steps: int = 30, **more: Any) -> Path:
    """A run folder of two evaluations; ``more`` is put into the line of the fifth step."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        line = step_line(step, 8.0 / step + 1, seconds=0.5, tokens_per_second=1000.0, tokens=500, grad_norm=2.0)
        lines.append(line | {"substitutions": []} | (more if step == 5 else {}))
        if step % (steps // 2) == 0:
            lines.append(evaluation_line(step, 9.0 / step + 1, tokens=9))
    write_metrics(folder, lines)
    (folder / "config.json").write_text(json.dumps({"notes": "", "train": {"steps": steps, "learning_rate": 0.01}}))
    return folder


def report(output: Path, *words: object) -> str:
    assert cli.main(["report", *map(str, words), "--output", str(output)]) == 0
    return output.read_text()


def test_what_evaluations_measure_of_layers_has_charts_of_its_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    measures = {"indexer_kl": [0.5, None, 0.1], "indexer_mass": [0.25, None, 0.5]}
    with (run / "metrics.jsonl").open("a") as file:
        for step, more in ((31, measures), (32, {"indexer_kl": [None], "indexer_mass": "much"})):
            file.write(json.dumps(evaluation_line(step, 1.5, **more)) + "\n")
    layers = read_run(run).layers
    assert {name: (series.steps.tolist(), series.values.tolist()) for name, series in layers.items()} == {
        "indexer_kl": ([31], [0.3]), "indexer_mass": ([31], [0.375]),
    }  # fmt: skip
    page = Page(report(tmp_path / "report.html", run, "--quick"))
    assert "Indexer's loss" in page.text and "Indexer's choice" in page.text


@pytest.mark.parametrize("name", ["zero1_fp16", "zero3_bf16"])
def test_run_of_older_code_has_every_part(name: str, tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / name, tmp_path / name))
    text = report(tmp_path / "report.html", run, "--quick")
    page = Page(text)
    assert [attrs["id"] for tag, attrs in page.elements if tag == "section"] == list(PARTS)
    assert "the run has no starts.jsonl" in page.text and "left out by --quick" in page.text
    assert any(table[0] == ["", "planned", "measured"] for table in page.tables)
    assert page.charts() >= 5
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{min(e.values.min() for e in read_run(run).evaluations.values()):.4f}" in page.text
    assert last["split"] in read_run(run).evaluations
    if name == "zero1_fp16":
        assert [row[:2] for row in page.tables[0][1:3]] == [["1", "skipped"], ["2", "skipped"]]


def test_head_tells_a_part_of_the_split_from_all_and_leaves_notes_to_the_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    train = {"steps": 30, "evaluate_contexts": 128}
    (run / "config.json").write_text(json.dumps({"notes": "of 860 steps", "train": train}))
    page = Page(report(tmp_path / "report.html", run, "--quick"))
    head, _, rest = page.text.partition("Curves")
    assert "validation, step 30, at most 128 contexts" in head and "evaluate scores the whole split" in rest
    assert "of 860 steps" not in head and "of 860 steps" in rest.rpartition("defaults included")[2]
    (run / "config.json").write_text(json.dumps({"train": {"steps": 30, "evaluate_contexts": None}}))
    assert "at most 128" not in report(tmp_path / "whole.html", run, "--quick")


def test_page_asks_for_nothing_and_obeys_no_text_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b onclick=alert(3)>", guard=f"skip: {EVIL}", substitutions=[EVIL])
    content = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(content | {"notes": EVIL, EVIL: {EVIL: EVIL}}))
    start = {"step": 3, "time": EVIL, "how": EVIL, "hosts": [EVIL], "devices": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    (run / "starts.jsonl").write_text(json.dumps(start | {"from": EVIL, "changes": {EVIL: [EVIL, EVIL]}}) + "\n")
    (run / "samples").mkdir()
    (run / "samples/step-00000005.txt").write_bytes(EVIL.encode() + b"\x00\x1b[31m\xff\n" + "\u202e".encode())
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation_line(31, 1.5, EVIL)) + "\n")
    bins = {"first": [0, 1], "end": [1, 2], "bytes": [1, 1], "bits_per_byte": [5.0, 4.0]}
    given = {"run": EVIL, "step": 4, "split": EVIL, "positions": bins}
    (tmp_path / "given.json").write_text(json.dumps(given))
    text = report(tmp_path / "report.html", run, "--quick", "--positions", tmp_path / "given.json")
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert not {"img", "b onclick", "iframe", "object", "link", "base", "form"} & {*tags}
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert len(scripts) == page.charts() + 1  # the values of each chart, and ours
    assert [attrs for attrs in scripts if attrs != {"type": "application/json"}] == [{}]
    for tag, attrs in page.elements:
        assert not [name for name in attrs if name.startswith("on") or name == "style"], (tag, attrs)
        for name in ("src", "href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:"))
    assert page.text.count("<img src=x onerror=alert(1)>") >= 10  # told as it is
    assert "\\x00\\x1b[31m\ufffd\n\\u202e" in page.text
    assert not [each for each in text if not each.isprintable() and each not in "\n\t"]
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy


@pytest.mark.parametrize(
    "kind, device", [("cpu", "cpu"), (EVIL, "cuda"), pytest.param("cuda", "cuda", marks=pytest.mark.campaign)]
)
def test_plan_is_made_for_the_device_of_the_run(kind: str, device: str, tmp_path: Path) -> None:
    """Of the last start; where that does not tell, for a GPU as `longstride plan` has it."""
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text(load_config("paper_small", ["model.layers=2"]).model_dump_json())
    starts = [{"processes": 2, "device_type": "other"}, {"processes": 1, "device_type": kind}]
    (run / "starts.jsonl").write_text("".join(json.dumps({"step": 0, **each}) + "\n" for each in starts))
    plan = plan_of(read_run(run))
    assert plan["device"] == device
    assert {row["processes"] for row in plan["memory"]} == {1}
    page = Page(compose([read_run(run)], [], [{"plan": Answer("longstride plan", plan)}]))
    assert f"planned on {device}, 1 process" in page.text


def test_verbs_fill_their_parts_or_say_why_not(tmp_path: Path, trained: Callable[..., Path]) -> None:
    run = Path(shutil.copytree(trained("alone", 1), tmp_path / "run"))
    page = Page(report(tmp_path / "report.html", run, "--by-position"))
    assert [attrs["alt"].split(":")[0] for tag, attrs in page.elements if tag == "img"] == ["The pattern", "Attention"]
    assert "Loss by position" in page.text and "planned on cpu, 1 process" in page.text
    assert [attrs.get("class") for tag, attrs in page.elements if tag == "p"].count("absent") == 2  # samples, incidents
    for path in run.glob("checkpoints/*/manifest.json"):
        path.write_text("{")
    page = Page(report(tmp_path / "damaged.html", run, "--by-position"))
    assert len([tag for tag, _ in page.elements if tag == "img"]) == 1
    assert "in a context of the validation split: not drawn: " in page.text
    assert f"longstride evaluate {run} --positions positions.png" in page.text


def test_a_stage_of_longer_contexts_is_an_event(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    write_metrics(run, [line | {"context": 16 if line["step"] < 5 else 64} for line in lines])
    page = Page(report(tmp_path / "report.html", run, "--quick"))
    assert page.tables[0][1:] == [["5", "stage", "contexts of 64 from this step on"]]


def test_incident_is_told_once_with_what_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", guard="rewind: the loss is nan")
    (run / "guards").mkdir()
    incident = {"step": 5, "outcome": "rewind", "reason": "the loss is nan", "rewound_to": 4}
    (run / "guards/step-00000005.json").write_text(json.dumps(incident))
    (run / "guards/step-00000007.json").write_text("{")
    (run / "starts.jsonl").write_text('{"step": 0, "how": "new"}\n{"ste\n{"step": 12, "how": "resume"}\n')
    page = Page(report(tmp_path / "report.html", run, "--quick"))
    assert page.tables[0][1:] == [["5", "guard", "rewind: the loss is nan; back to step 4"]]
    assert [row[1:3] for row in page.tables[1][1:]] == [["0", "new"], ["12", "resume"]]
    assert "guards/step-00000007.json: cannot be read" in page.text
    assert "starts.jsonl: a line that does not record a start was left out" in page.text


def test_runs_beside_each_other_show_what_differs(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", steps=40)
    (other / "config.json").write_text(json.dumps({"notes": "", "train": {"steps": 40, "learning_rate": 0.01}}))
    page = Page(report(tmp_path / "report.html", one, other, "--quick"))
    differing = next(table for table in page.tables if table[0][0] == "differs")
    assert differing[1:] == [["train.steps", "30", "40"]]
    assert [cell.strip() for cell in differing[0][1:]] == ["a/run", "b/run"]
    summary = page.tables[0]
    assert [row[0].strip() for row in summary[1:]] == ["a/run", "b/run"]
    assert [row[1] for row in summary[1:]] == ["1.3000", "1.2250"]


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [RunHistory(tmp_path / each) for each in ("x/one/run", "x/two/run", "y/two/run")]
    assert labels(runs) == ["x/one/run", "x/two/run", "y/two/run"]
    assert labels(runs[:2]) == ["one/run", "two/run"] and labels(runs[:1]) == ["run"]


def test_thin_curve_keeps_every_columns_extremes() -> None:
    generator = np.random.default_rng(0)
    series = Series(np.arange(1, 50_001), generator.standard_normal(50_000))
    kept = thin(series, 100)
    assert len(kept) <= 202
    assert (kept.steps[0], kept.steps[-1]) == (1, 50_000) and (np.diff(kept.steps) > 0).all()
    for column in range(100):
        inside = slice(column * 500, (column + 1) * 500)
        here = (kept.steps > inside.start) & (kept.steps <= inside.stop)
        assert kept.values[here].max() >= np.sort(series.values[inside])[-2]  # a step may belong to the next column
        assert kept.values[here].min() <= np.sort(series.values[inside])[1]
    assert {*kept.values.tolist()} >= {series.values.max(), series.values.min()}
    short = Series(np.arange(10), np.arange(10.0))
    assert thin(short, 100) is short


def test_large_runs_stay_within_two_megabytes(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    steps = np.arange(20_000)
    names = ("bits", "grad_norm", "loss_scale", "tokens_per_second", "seconds", "mfu", "mfu_dense_equivalent")
    runs, answers = [], []
    for place in range(12):
        run = RunHistory(tmp_path / f"run-{place}")
        run.train = {name: Series(steps, generator.lognormal(size=len(steps))) for name in names}
        run.samples = [Sample(place, "png", generator.bytes(200_000)), Sample(9, "txt", b"&" * 5000)]
        run.config = {"notes": "&" * 100_000, "keys": {f"&{key}": "&" * 500 for key in range(2000)}}
        runs.append(run)
        pattern, attention = Answer("show", generator.bytes(300_000)), Answer("show", None, "torn")
        answers.append({"pattern": pattern, "attention": attention})
    text = compose(runs, [], answers)
    assert len(text.encode()) <= MOST_PAGE_BYTES
    page = Page(text)
    assert "have no room in a page of 2 MB" in page.text and "not drawn: torn" in page.text
    small = compose(runs[:1], [], answers[:1])
    assert len([tag for tag, _ in Page(small).elements if tag == "img"]) == 2


def test_few_high_values_do_not_press_the_others_flat() -> None:
    values = np.concatenate([[100.0], np.linspace(1, 2, 99)])
    low, high, cut = value_range(values)
    assert cut and 2 < high < 3 and low < 1
    assert value_range(np.linspace(1, 2, 99))[2] is False
    assert value_range(np.array([3.0]))[:2] == (2.7, 3.3)


def test_ticks_are_round_and_inside() -> None:
    assert Scale(0, 860).ticks(5) == [0, 200, 400, 600, 800]
    assert Scale(1, 1024, log=True).ticks(5) == [1, 10, 100, 1000]
    assert [tick_text(each) for each in (0, 500, 1000, 5000, 12_252, 1_500_000)] == [
        "0", "500", "1k", "5k", "12.252k", "1.5M",
    ]  # fmt: skip
    assert [number(each) for each in (1_234_567, 45_000, 860, 0.01, 2.5e-5, 0)] == [
        "1.23M", "45k", "860", "0.01", "2.5e-5", "0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words, line",
    [
        ("empty --output new.html", "empty/metrics.jsonl: is empty; wait for the first step"),
        ("run --output new.html --quick --by-position", "--by-position: needs the model, which --quick does not load;"),
    ],
)
def test_wrong_words_end_in_one_line(
    words: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    (tmp_path / "old.html").touch()
    assert refusal("report", *words.split()).startswith(line)


def test_values_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", grad_norm=None, learning_rate=1e300, seconds="soon", mfu=True)
    record = read_run(run)
    assert [len(record.train[name]) for name in ("bits", "grad_norm", "seconds")] == [30, 29, 29]
    assert "mfu" not in record.train
    assert re.search(r'<path class="pale|<path class="line', report(tmp_path / "report.html", run, "--quick"))


@pytest.mark.parametrize("values", [(1e308, -1e308), (5e-324, 1e-99), (1.0, 1.0 + 2**-52), (-3.0, 1e99), (0.0, 0.0)])
@pytest.mark.parametrize("steps", [(2**62, 2**62 + 1), (1, 2**62), (5, 5)])
def test_numbers_that_no_run_measures_make_a_page(
    values: tuple[float, float], steps: tuple[int, int], tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", steps=2)
    names = ("bits_per_byte", "grad_norm", "loss_scale", "seconds", "tokens_per_second", "learning_rate")
    write_metrics(
        run, (step_line(step) | dict.fromkeys(names, value) for value, step in zip(values, steps, strict=True))
    )
    page = Page(report(tmp_path / "report.html", run, "--quick"))
    paths = [attrs["d"] or "" for tag, attrs in page.elements if tag == "path"]
    assert not [each for each in paths if "n" in each]  # nan, inf
    for tag, attrs in page.elements:
        if tag == "text":
            assert re.fullmatch(r"-?[\d.]+%?", attrs["x"] or "") and re.fullmatch(r"[\d.]+%", attrs["y"] or "")
