"""The parts of a page that tell of one run, or of several one below the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from longstride.launcher.config import flattened
from longstride.launcher.output import counting
from longstride.launcher.reporting.charts import Chart, Curve, Mark, draw, number, smoothed
from longstride.launcher.reporting.records import MOST_EVENTS, RunRecord, Series
from longstride.launcher.reporting.verbs import Answers, Told, processes_of
from longstride.launcher.reporting.words import Room, absent, flops, mebibytes, shown, table

VALIDATION_COLOUR = 1  # of one run's evaluations; those of several have their run's
_BINS = 64  # of positions
_MOST_KEYS = 600  # of a configuration
_MOST_STARTS = 40
_MOST_SAMPLE_CHARACTERS = 2000
Runs = Sequence[tuple[str, RunRecord]]  # with the names by which the page tells them apart


def curves(runs: Runs) -> str:
    """Everything of metrics.jsonl that has a curve."""
    of_one = len(runs) == 1
    marks = _marks(runs[0][1]) if of_one else []
    drawn = _losses(runs, marks)
    others = (  # title, unit, measure, whether it is smoothed, whether its scale is logarithmic
        ("Learning rate", "", "learning_rate", False, False),
        ("Gradient norm", "before clipping", "grad_norm", True, None),
        ("Loss scale", "fp16", "loss_scale", False, None),
        ("Throughput", "tokens a second", "tokens_per_second", True, False),
        ("Step time", "seconds", "seconds", True, False),
        ("MFU", "% of the peak, by visited tiles", "mfu", True, False),
        ("MFU of dense attention", "% of the peak, as if all pairs were computed", "mfu_dense_equivalent", True, False),
        ("Peak memory", "GiB, first process", "peak_memory_bytes", False, False),
    )  # fmt: skip
    for title, what, measure, smooth, log in others:
        factor = {"mfu": 100, "mfu_dense_equivalent": 100, "peak_memory_bytes": 2**-30}.get(measure, 1)
        lines = []
        for colour, (name, record) in enumerate(runs):
            if (series := record.train.get(measure)) is None:
                continue
            series = Series(series.steps, series.values * factor)
            if measure == "loss_scale" and record.train_is_plain:
                continue
            label = name if not of_one else title.lower()
            if smooth and len(series) > 40:
                if of_one:
                    lines.append(Curve("each step", colour, series, "pale"))
                    label = "running mean"
                series = smoothed(series)
            lines.append(Curve(label, colour, series))
        if lines:
            drawn.append(draw(Chart(title, what, lines, marks, log_y=log, legend=not of_one)))
    small = sum('class="chart"' in each for each in drawn)
    return f'<div class="charts{" four" if small in (4, 7, 8) else ""}">{"".join(drawn)}</div>'


def _marks(record: RunRecord) -> list[Mark]:
    """The steps of a run at which something befell it."""
    marks = [Mark(start["step"], "resume") for start in record.starts if start["step"] > 0]
    return marks + [Mark(event.step, event.kind) for event in record.events[:MOST_EVENTS] if event.kind != "skipped"]


def _losses(runs: Runs, marks: list[Mark]) -> list[str]:
    """One chart of a run's losses; of several runs one of their training and one of their evaluations."""
    unit = runs[0][1].unit
    if len(runs) == 1:
        record, lines = runs[0][1], []
        if (loss := record.train.get("bits")) is not None:
            mean = len(loss) > 40
            lines += [Curve("training, each step", 0, loss, "pale" if mean else "line")]
            lines += [Curve("training, running mean", 0, smoothed(loss))] if mean else []
        for number_, (split, series) in enumerate(record.evaluations.items()):
            lines.append(Curve(split, VALIDATION_COLOUR + number_, series, "dots"))
        return [draw(Chart("Loss", unit, lines, marks, wide=True))]
    evaluated = [
        Curve(name if split == record.setting("data.validation_split") else f"{name}, {split}", colour, series, "dots")
        for colour, (name, record) in enumerate(runs)
        for split, series in record.evaluations.items()
    ]
    trained = []
    for colour, (name, record) in enumerate(runs):
        if (loss := record.train.get("bits")) is not None:
            trained += [Curve(f"{name}, each step", colour, loss, "pale")] if len(runs) <= 3 and len(loss) > 40 else []
            trained.append(Curve(name, colour, smoothed(loss) if len(loss) > 40 else loss))
    units = {record.unit for _, record in runs}
    note = "runs of other units stand in one chart: " + ", ".join(sorted(units)) if len(units) > 1 else ""
    charts = [Chart("Validation loss", unit, evaluated, note=note, wide=True)]
    charts.append(Chart("Training loss", f"{unit}, running mean", trained, note=note, wide=True, name_pale=False))
    return [draw(chart) for chart in charts]


def positions(runs: Runs, given: list[dict[str, Any]], answers: Sequence[Answers]) -> str:
    """The loss by the position in the context: whether a long context is made use of."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    missing = []
    for colour, ((name, record), answer) in enumerate(zip(runs, answers, strict=True)):
        told = answer.positions
        those = [*record.positions, *([told.content] if told and told.content else [])]
        found += [(name, colour, each) for each in those]
        if not those and told is not None:
            missing.append(absent(f"{name}: {told.why_not}", told.command))
        elif not those and not given:
            split = "" if record.is_evaluated else f" --split {record.setting('data.train_split')}"
            command = f"longstride evaluate {record.folder}{split} --positions {record.folder / 'by-position.png'}"
            missing.append(absent(f"{name} has not been scored by position yet; this page has it after", command))
    found += [(each["run"], len(runs) + place, each) for place, each in enumerate(given)]
    lines = [
        Curve(f"{name}, step {each['step']:,}, {each['split']}", colour % 12, _joined(each["bins"]))
        for name, colour, each in found[:12]
    ]
    unit = found[0][2]["unit"] if found else ""
    chart = Chart(
        "Loss by position",
        unit,
        lines,
        log_x=True,
        wide=True,
        x_name="position",
        note="each point is the mean of a bin of positions, which grows with the position",
    )
    return (f'<div class="charts">{draw(chart)}</div>' if lines else "") + "".join(missing)


def _joined(bins: list[tuple[int, int, int, float]]) -> Series:
    """Means of bins that grow with the position, each at its first position, counted from 1."""
    end = max(end for _, end, _, _ in bins)
    edges = np.unique(np.geomspace(1, end + 1, _BINS).astype(np.int64))
    first, counts, bits = (np.array([each[place] for each in bins], dtype=float) for place in (0, 2, 3))
    place = np.searchsorted(edges, first + 1, side="right") - 1
    totals = np.bincount(place, counts, len(edges))
    sums = np.bincount(place, counts * bits, len(edges))
    here = totals > 0
    return Series(edges[here], sums[here] / totals[here])


def samples(runs: Runs, room: Room) -> str:
    """What the models made in training, from the first to the last."""
    parts = []
    for name, record in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{shown(name)}</h3>")
        if not record.samples:
            parts.append(absent("no samples were made in training; train.samples_every makes them"))
            continue
        drawn, left_out = [], 0
        for sample in record.samples:
            if sample.kind == "txt":
                content = shown(sample.content.decode(errors="replace"), _MOST_SAMPLE_CHARACTERS)
                inner = f"<pre>{content}</pre>" if room.take(content) else None
            else:
                kind = "image/png" if sample.kind == "png" else "audio/wav"
                address = room.embed(kind, sample.content)
                element = (
                    f'<img src="{address}" alt="sample after step {sample.step}">'
                    if sample.kind == "png"
                    else f'<audio controls preload="none" src="{address}"></audio>'
                )
                inner = element if address else None
            if inner is None:
                left_out += 1
                continue
            drawn.append(f'<figure class="card sample"><figcaption>step {sample.step:,}</figcaption>{inner}</figure>')
        parts.append(f'<div class="samples">{"".join(drawn)}</div>')
        if left_out:
            parts.append(absent(f"{left_out} more have no room in a page of 2 MB; they lie in {record.folder}/samples"))
    return "".join(parts)


def pictures(runs: Runs, answers: Sequence[Answers], room: Room) -> str:
    """Who may read whom by the pattern, and what a checkpoint reads."""
    parts = []
    for (name, _), answer in zip(runs, answers, strict=True):
        if len(runs) > 1:
            parts.append(f"<h3>{shown(name)}</h3>")
        for told, what in (
            (answer.pattern, "The pattern: who may read whom"),
            (answer.attention, "Attention: what the newest checkpoint reads in a context of the validation split"),
        ):
            parts.append(_picture(told, what, room))
    return "".join(parts)


def _picture(told: Told | None, what: str, room: Room) -> str:
    if told is None:
        return absent(f"{what}: left out by --quick")
    if told.content is None:
        return absent(f"{what}: not drawn, as {told.why_not}", told.command)
    address = room.embed("image/png", told.content)
    if address is None:
        return absent(f"{what}: no room in a page of 2 MB; it is drawn by", told.command)
    caption = f"{shown(what)}. <code>{shown(told.command)}</code>"
    picture = f'<img src="{address}" alt="{shown(what)}">'
    return f'<figure class="card picture">{picture}<figcaption>{caption}</figcaption></figure>'


def events(runs: Runs, room: Room) -> str:
    """What befell the runs."""
    several = len(runs) > 1
    rows = [
        [
            *([f'<i class="dots run-{colour}"></i> {shown(name)}'] if several else []),
            f"{event.step:,}",
            f'<span class="tag {event.kind}">{event.kind}</span>',
            shown(event.text),
        ]
        for colour, (name, record) in enumerate(runs)
        for event in record.events[:MOST_EVENTS]
    ]
    if not rows:
        return absent("nothing befell: no step was refused or dropped, and no damaged data was replaced")
    kept = room.fitting(rows)
    more = sum(len(record.events) for _, record in runs) - len(kept)
    head = [*(["run"] if several else []), "step", "what", ""]
    cut = absent(f"{more:,} more are in metrics.jsonl and guards/") if more else ""
    return table(head, kept, [1 if several else 0]) + cut


def starts(runs: Runs, room: Room) -> str:
    """When and where the runs were computed, and what was changed on the way."""
    parts = []
    for name, record in runs:
        if len(runs) > 1:
            parts.append(f"<h3>{shown(name)}</h3>")
        if not record.starts:
            parts.append(absent("the run has no starts.jsonl: the code that trained it wrote none"))
            continue
        rows = [
            [
                shown(str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC")),
                f"{start['step']:,}",
                f'<span class="tag">{shown(start.get("how", ""), 20)}</span>'
                + (f" {shown(_listed(start['from'], ' '))}" if "from" in start else ""),
                _machines(start),
                shown(_listed(start.get("versions"), " ")),
                _changes(start.get("changes")),
            ]
            for start in record.starts[-_MOST_STARTS:]
        ]
        kept = room.fitting(rows)
        parts.append(table(["time", "from step", "how", "machines", "versions", "changes"], kept, [1]))
        if more := len(record.starts) - len(kept):
            parts.append(absent(f"{more} more starts are in starts.jsonl"))
    return "".join(parts)


def _machines(start: dict[str, Any]) -> str:
    devices = start.get("devices")
    named = [f"{count} × {name}" for name, count in devices.items()] if isinstance(devices, dict) else []
    hosts = start.get("hosts")
    listed = [str(each) for each in hosts] if isinstance(hosts, list) else []
    where = ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
    return shown(f"{', '.join(named)} on {where}" if where else ", ".join(named))


def _listed(content: Any, between: str) -> str:
    return ", ".join(f"{key}{between}{value}" for key, value in content.items()) if isinstance(content, dict) else ""


def _changes(changes: Any) -> str:
    if not isinstance(changes, dict) or not changes:
        return "–"
    lines = []
    for path, pair in [*changes.items()][:20]:
        old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
        lines.append(
            f'<code>{shown(path)}</code> <span class="was">{shown(_json(old), 60)}</span> {shown(_json(new), 60)}'
        )
    return "<br>".join([*lines, *([f"and {len(changes) - 20} more"] if len(changes) > 20 else [])])


def _json(value: Any) -> str:
    """A value as configurations have it; a text without its marks."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def plans(runs: Runs, answers: Sequence[Answers]) -> str:
    """What was planned, beside what was measured."""
    parts = []
    for (name, record), answer in zip(runs, answers, strict=True):
        if len(runs) > 1:
            parts.append(f"<h3>{shown(name)}</h3>")
        told = answer.plan
        if told is None or told.content is None:
            why = "left out by --quick" if told is None else told.why_not
            parts.append(absent(f"no plan: {why}", "" if told is None else told.command))
        plan = told.content if told and isinstance(told.content, dict) else {}
        rows = [[shown(what), planned or "–", measured or "–"] for what, planned, measured in _plan_rows(record, plan)]
        count = processes_of(record)
        planned = f"planned on {plan['device']}, {count} process{'es' if count > 1 else ''}" if plan else "planned"
        parts.append(table(["", planned, "measured"], rows, [1, 2]))
    return "".join(parts)


def _plan_rows(record: RunRecord, plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What, as planned, as measured."""
    seconds, memory = record.train.get("seconds"), record.train.get("peak_memory_bytes")
    median = float(np.median(seconds.values)) if seconds is not None else None
    step, length, attention = (plan.get(part) or {} for part in ("step", "length", "attention"))
    work = sum(step.get(f"{part}_flops", 0) for part in ("forward", "backward", "recompute"))
    way = "peak_recomputed" if plan.get("activation_checkpointing") else "peak_kept"
    here = [row for row in plan.get("memory", []) if row.get("stage") == plan.get("zero_stage")]
    rows = []
    if total := (plan.get("parameters") or {}).get("total"):
        rows.append(("parameters", f"{total:,}", ""))
    planned = mebibytes(here[0][way]) if here and way in here[0] else ""
    rows.append(
        ("peak memory of a process", planned, mebibytes(float(memory.values.max())) if memory is not None else "")
    )
    rows.append(("a step, median", "", counting.step_duration(median) if median else ""))
    if work:
        rate = f"{flops(work / median)}/s" if median else ""
        rows.append(("operations of a step", flops(work), rate))
    if dense := step.get("dense_flops"):
        rows.append(("the same with dense attention", flops(dense), ""))
    if attention.get("dense_pairs"):
        rows.append(
            ("pairs that attention visits, of dense causal", f"{attention['pairs'] / attention['dense_pairs']:.2%}", "")
        )
    for title, measure in (
        ("MFU by visited tiles, median", "mfu"),
        ("MFU of dense attention, median", "mfu_dense_equivalent"),
    ):
        if (series := record.train.get(measure)) is not None:
            rows.append((title, "", f"{float(np.median(series.values)):.2%}"))
    planned_steps = length.get("steps") or record.setting("train.steps")
    rows.append(("steps", f"{planned_steps:,}" if isinstance(planned_steps, int) else "", f"{record.last_step:,}"))
    if (total := length.get("tokens")) and (content := record.train.get("content")) is not None:
        most = "up to " if length.get("at_most") else ""
        rows.append(("bytes read", f"{most}{number(total)}", number(float(content.values.mean()) * record.last_step)))
    if epochs := length.get("epochs"):
        rows.append(("epochs", f"{epochs:,.3g}", ""))
    return rows


def configuration(runs: Runs, room: Room) -> str:
    """What differs between the runs, and each whole."""
    flat = [flattened(record.config) if record.config else {} for _, record in runs]
    parts = []
    if len(runs) > 1:
        paths = dict.fromkeys(path for each in flat for path in each)
        other = [path for path in paths if len({repr(each.get(path)) for each in flat}) > 1][:_MOST_KEYS]
        rows = [
            [f"<code>{shown(path)}</code>", *(shown(_json(each[path]) if path in each else "–", 80) for each in flat)]
            for path in other
        ]
        heads = [f'<i class="dots run-{colour}"></i> {shown(name)}' for colour, (name, _) in enumerate(runs)]
        differing = table(["differs", *heads], room.fitting(rows))
        parts.append(differing if rows else absent("the runs have the same configuration"))
    for (name, _), each in zip(runs, flat, strict=True):
        if not each:
            parts.append(absent(f"{name}: config.json cannot be read"))
            continue
        lines = [
            f"<div><dt>{shown(path, 120)}</dt><dd>{shown(_json(value), 200)}</dd></div>"
            for path, value in [*each.items()][:_MOST_KEYS]
        ]
        keys = "".join(line for line in lines if room.take(line))
        title = f"config.json of {shown(name)}, {len(each):,} values"
        is_open = " open" if len(runs) == 1 else ""
        parts.append(f"<details{is_open}><summary>{title}</summary><dl class=keys>{keys}</dl></details>")
    return "".join(parts)
