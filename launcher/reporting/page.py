"""`longstride report RUN [RUN …] --output report.html`: a page about runs, as one file that needs no network."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from longstride.kernels import ConfigError
from longstride.launcher.config import flattened
from longstride.launcher.files import check_new, write_new
from longstride.launcher.output import counting
from longstride.launcher.reporting.charts import curves, number, positions, running_mean
from longstride.launcher.reporting.records import (
    MOST_EVENTS,
    Answer,
    Answers,
    PageRun,
    RunHistory,
    ask_all,
    processes_of,
    read_positions,
    read_run,
)
from longstride.launcher.reporting.template import MOST_PAGE_BYTES, Room, pieces

MOST_RUNS = 12  # the number of distinguishable colours
_MARGIN_BYTES = 20_000  # for the template around the parts
_MOST_NOTICES = 20
_MOST_KEYS = 600  # of a configuration
_MOST_STARTS = 40
_MOST_CHANGES = 20  # of a start


def run(arguments: argparse.Namespace) -> int:
    """Run the verb; return its exit code.

    Raises:
        ConfigError: a run is missing, has no line yet or is named twice, or the output cannot be written.
    """
    output = arguments.output
    check_new(output, "--output", ".html", ".htm")
    if arguments.quick and arguments.by_position:
        raise ConfigError("--by-position: needs the model, which --quick does not load; give only one of the two")
    records = read_runs(arguments.runs)
    scored = []
    for path in arguments.positions:
        losses = read_positions(path)
        if losses is None:
            rule = "must be a JSON file that `longstride evaluate RUN --positions FILE.png` wrote next to its picture"
            raise ConfigError(f"--positions={path}: {rule}")
        scored.append(losses)
    answers = [Answers() for _ in records]
    if not arguments.quick:
        by_position, trusted = arguments.by_position, arguments.trust_checkpoint
        answers = [ask_all(record, by_position=by_position, trusted=trusted) for record in records]
    write_new(output, compose(records, scored, answers).encode())
    print(output)
    return 0


def read_runs(folders: list[Path]) -> list[RunHistory]:
    """Read the runs of a page.

    Raises:
        ConfigError: as ``read_run``; a run is named twice, or there are too many.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{folders[MOST_RUNS]}: is run {MOST_RUNS + 1}; a page compares at most {MOST_RUNS}")
    for index, folder in enumerate(folders):
        if folder.resolve() in map(Path.resolve, folders[:index]):
            raise ConfigError(f"{folder}: is named twice; name each run once")
    return [read_run(folder) for folder in folders]


def compose(records: Sequence[RunHistory], scored: list[dict[str, Any]], answers: Sequence[Answers]) -> str:
    """Return the page, of at most ``MOST_PAGE_BYTES``. ``scored``: losses by position from the files of --positions."""
    runs = [PageRun(*fields) for fields in zip(labels(records), range(len(records)), records, answers, strict=True)]
    style, script = (Markup((Path(__file__).parent / name).read_text()) for name in ("report.css", "report.js"))
    parts = {"curves": curves(runs), "positions": positions(runs, scored), "plan": _by_run(runs, _plan)}
    head = _head(runs)
    used = sum(len(text.encode()) for text in (*parts.values(), head, style, script))
    room = Room(MOST_PAGE_BYTES - used - _MARGIN_BYTES)
    # Large parts share the remaining bytes, the most informative first.
    parts["incidents"] = _incidents(runs, room)
    parts["starts"] = _by_run(runs, lambda run: _starts(run.record, room))
    parts["configuration"] = _configuration(runs, room)
    parts["samples"] = _by_run(runs, lambda run: _samples(run.record, room))
    pattern = "The pattern: who may read whom"
    attention = "Attention: what the newest checkpoint reads in a context of the validation split"

    def show_pictures(run: PageRun) -> str:
        return _picture(run.answers.pattern, pattern, room) + _picture(run.answers.attention, attention, room)

    parts["reads"] = _by_run(runs, show_pictures)
    hashes = [f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}" for text in (script, style)]
    policy = Markup(
        f"default-src 'none'; script-src '{hashes[0]}'; style-src '{hashes[1]}'; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(run.name for run in runs)
    # Not the present time: the same runs give the same page.
    newest = max((record.changed for record in records), default=0.0)
    updated = datetime.fromtimestamp(newest, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return pieces().page(title, policy, style, script, head, {key: Markup(parts[key]) for key in parts}, updated)


def labels(records: Sequence[RunHistory]) -> list[str]:
    """Return short distinct names: the last parts of each folder's path, as many as necessary."""
    paths = [record.folder.resolve().parts for record in records]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-count:]) for path in paths]
        if len({*names}) == len(names):
            break
    return names


def _head(runs: Sequence[PageRun]) -> str:
    """Show the heading and the most important figures."""
    lines = [f"{run.name}: {text}" if len(runs) > 1 else text for run in runs for text in run.record.notices]
    notices = [pieces().absent(line) for line in lines[:_MOST_NOTICES]]
    figures = [_figures(run.record) for run in runs]
    if len(runs) == 1:
        return pieces().head_of_one(runs[0], figures[0], notices)
    losses = [min((s.values.min() for s in run.record.evaluations.values()), default=np.inf) for run in runs]
    rows = []
    for run, loss, (best, *others) in zip(runs, losses, figures, strict=True):
        is_best = loss == min(losses) < np.inf
        values = [pieces().best(best[1]) if is_best else best[1], *(value for _, value, _ in others)]
        rows.append(pieces().row([pieces().dot(run), *values], range(1, len(values) + 1)))
    names = [name for name, _, _ in figures[0]]
    return pieces().head_of_several(runs, pieces().table(["run", *names], rows, range(1, len(names) + 1)), notices)


def _figures(record: RunHistory) -> list[tuple[str, str, str]]:
    """Return the name, value and small print of each figure; every run has the same names."""
    figures = []
    evaluated = [(float(series.values.min()), split) for split, series in record.evaluations.items()]
    if evaluated:
        best, split = min(evaluated)
        series = record.evaluations[split]
        step = int(series.steps[series.values.argmin()])
        limit = record.setting("train.evaluate_contexts")
        place = f"{split}, step {step:,}"
        if isinstance(limit, int):
            place += f", at most {limit:,} contexts"
        figures.append(("best validation", f"{best:.4f}", f"{record.unit}, {place}"))
    else:
        why = "not evaluated yet" if record.is_evaluated else "none, as train.evaluate_every is null"
        figures.append(("best validation", "–", why))
    loss = record.train.get("bits")
    mean = "–" if loss is None else f"{running_mean(loss).last:.4f}"
    figures.append(("training loss", mean, f"{record.unit}, running mean"))
    steps = record.setting("train.steps")
    share = f"{record.last_step / steps:.0%} of {steps:,}" if isinstance(steps, int) and steps > 0 else ""
    figures.append(("steps", f"{record.last_step:,}", share))
    rate = record.median("tokens_per_second")
    figures.append(("throughput", "–" if rate is None else number(rate), "tokens a second, median"))
    seconds = record.total("seconds")
    total = "–" if seconds is None else counting.duration(seconds)
    figures.append(("training time", total, "in steps, without evaluations"))
    if (mfu := record.median("mfu")) is not None:
        figures.append(("MFU", f"{mfu:.1%}", "of the peak, by visited tiles"))
    else:
        content = record.total("content")
        what = "pixels" if record.unit == "bits per pixel" else "bytes"
        figures.append((f"{what} read", "–" if content is None else number(content), "in all steps"))
    return figures


def _by_run(runs: Sequence[PageRun], show: Callable[[PageRun], str]) -> str:
    """Show each run, under its name if there are several."""
    if len(runs) == 1:
        return show(runs[0])
    return "".join(f"{pieces().heading(run)}{show(run)}" for run in runs)


def _samples(record: RunHistory, room: Room) -> str:
    """Show the samples of training, from the first to the last."""
    if not record.samples:
        return pieces().absent("no samples were made in training; train.samples_every makes them")
    drawn = []
    for sample in record.samples:
        if sample.kind == "txt":
            content = pieces().text_sample(sample.content.decode(errors="replace"))
            drawn += [(sample.step, content)] if room.take(content) else []
            continue
        is_picture = sample.kind == "png"
        piece = pieces().picture_sample if is_picture else pieces().sound_sample
        if address := room.embed("image/png" if is_picture else "audio/wav", sample.content):
            drawn.append((sample.step, piece(address, sample.step)))
    text = pieces().samples(drawn)
    if left_out := len(record.samples) - len(drawn):
        text += pieces().absent(f"{left_out} more have no room in a page of 2 MB; they lie in {record.folder}/samples")
    return text


def _picture(answer: Answer | None, what: str, room: Room) -> str:
    if answer is None:
        return pieces().absent(f"{what}: left out by --quick")
    if answer.content is None:
        return pieces().absent(f"{what}: not drawn: {answer.why_not}", answer.command)
    address = room.embed("image/png", answer.content)
    if address is None:
        return pieces().absent(f"{what}: no room in a page of 2 MB; it is drawn by", answer.command)
    return pieces().picture(address, what, answer.command)


def _incidents(runs: Sequence[PageRun], room: Room) -> str:
    """List the events of the runs."""
    several, rows = len(runs) > 1, []
    step_column = [1 if several else 0]
    for run in runs:
        for event in run.record.events[:MOST_EVENTS]:
            cells = [f"{event.step:,}", pieces().tag(event.kind, event.kind), event.text]
            rows.append(pieces().row([pieces().dot(run), *cells] if several else cells, step_column))
    if not rows:
        return pieces().absent("no incidents: no step was refused or dropped, and no damaged data was replaced")
    fitting = list(takewhile(room.take, rows))
    text = pieces().table([*(["run"] if several else []), "step", "what", ""], fitting, step_column)
    if hidden := sum(len(run.record.events) for run in runs) - len(fitting):
        text += pieces().absent(f"{hidden:,} more are in metrics.jsonl and guards/")
    return text


def _starts(record: RunHistory, room: Room) -> str:
    """List the starts of a run: times, machines, versions and changes."""
    if not record.starts:
        return pieces().absent("the run has no starts.jsonl: the code that trained it wrote none")
    rows = []
    for start in record.starts[-_MOST_STARTS:]:
        devices, hosts, changes = (start.get(name) for name in ("devices", "hosts", "changes"))
        counts = devices.items() if isinstance(devices, dict) else ()
        machines = ", ".join(f"{count} × {name}" for name, count in counts)
        if isinstance(hosts, list) and hosts:
            hidden_hosts = f" and {len(hosts) - 4} more" if len(hosts) > 4 else ""
            machines += f" on {', '.join(map(str, hosts[:4]))}{hidden_hosts}"
        pairs = []
        for path, pair in [*changes.items()] if isinstance(changes, dict) else []:
            old, new = pair if isinstance(pair, list) and len(pair) == 2 else (None, pair)
            pairs.append((path, _json(old), _json(new)))
        cells = [
            str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC"),
            f"{start['step']:,}",
            pieces().start_way(start.get("how", ""), _listed(start.get("from"))),
            machines,
            _listed(start.get("versions")),
            pieces().changes(pairs[:_MOST_CHANGES], max(0, len(pairs) - _MOST_CHANGES)),
        ]
        rows.append(pieces().row(cells, [1]))
    fitting = list(takewhile(room.take, rows))
    text = pieces().table(["time", "from step", "how", "machines", "versions", "changes"], fitting, [1])
    if hidden := len(record.starts) - len(fitting):
        text += pieces().absent(f"{hidden} more starts are in starts.jsonl")
    return text


def _listed(content: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in content.items()) if isinstance(content, dict) else ""


def _json(value: Any) -> str:
    """Format a value like a configuration, but a text without quotation marks."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plan(run: PageRun) -> str:
    """Show the planned figures of a run next to the measured ones."""
    answer, text = run.answers.plan, ""
    if answer is None or answer.content is None:
        why, command = ("left out by --quick", "") if answer is None else (answer.why_not, answer.command)
        text = pieces().absent(f"no plan: {why}", command)
    plan = answer.content if answer and isinstance(answer.content, dict) else {}
    rows = [pieces().row([cell or "–" for cell in cells], [1, 2]) for cells in _plan_rows(run.record, plan)]
    count = processes_of(run.record)
    planned = f"planned on {plan['device']}, {count} process{'es' if count > 1 else ''}" if plan else "planned"
    text += pieces().table(["", planned, "measured"], rows, [1, 2])
    return text


def _plan_rows(record: RunHistory, plan: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the name, the planned and the measured value of each figure."""
    seconds, memory = record.median("seconds"), record.train.get("peak_memory_bytes")
    step, length, attention = (plan.get(part) or {} for part in ("step", "length", "attention"))
    work = sum(step.get(f"{part}_flops", 0) for part in ("forward", "backward", "recompute"))
    key = "peak_recomputed" if plan.get("activation_checkpointing") else "peak_kept"
    peaks = [row[key] for row in plan.get("memory", []) if row.get("stage") == plan.get("zero_stage") and key in row]
    rows = []
    if total := (plan.get("parameters") or {}).get("total"):
        rows.append(("parameters", f"{total:,}", ""))
    measured = counting.memory(float(memory.values.max())) if memory is not None else ""
    rows.append(("peak memory of a process", counting.memory(peaks[0]) if peaks else "", measured))
    rows.append(("a step, median", "", counting.step_duration(seconds) if seconds else ""))
    if work:
        speed = f"{counting.flops(work / seconds)}/s" if seconds else ""
        rows.append(("operations of a step", counting.flops(work), speed))
    if dense := step.get("dense_flops"):
        rows.append(("the same with dense attention", counting.flops(dense), ""))
    if dense_pairs := attention.get("dense_pairs"):
        rows.append(("pairs that attention visits, of dense causal", f"{attention['pairs'] / dense_pairs:.2%}", ""))
    for what, measure in (("by visited tiles", "mfu"), ("of dense attention", "mfu_dense_equivalent")):
        if (mfu := record.median(measure)) is not None:
            rows.append((f"MFU {what}, median", "", f"{mfu:.2%}"))
    planned_steps = length.get("steps") or record.setting("train.steps")
    rows.append(("steps", f"{planned_steps:,}" if isinstance(planned_steps, int) else "", f"{record.last_step:,}"))
    if (total := length.get("tokens")) and (content := record.total("content")) is not None:
        rows.append(("bytes read", f"{'up to ' if length.get('at_most') else ''}{number(total)}", number(content)))
    if epochs := length.get("epochs"):
        rows.append(("epochs", f"{epochs:,.3g}", ""))
    return rows


def _configuration(runs: Sequence[PageRun], room: Room) -> str:
    """Show the differences between the configurations, and each of them in full."""
    configs = [flattened(run.record.config) if run.record.config else {} for run in runs]
    text = ""
    if len(runs) > 1:
        paths = dict.fromkeys(path for config in configs for path in config)
        differing = [path for path in paths if len({repr(config.get(path)) for config in configs}) > 1]
        rows = []
        for path in differing[:_MOST_KEYS]:
            values = [_json(config[path]) if path in config else "–" for config in configs]
            rows.append(pieces().row([pieces().code(path), *map(pieces().value, values)]))
        text = pieces().absent("the runs have the same configuration")
        if rows:
            text = pieces().table(["differs", *map(pieces().dot, runs)], list(takewhile(room.take, rows)))
    for run, config in zip(runs, configs, strict=True):
        if not config:
            text += pieces().absent(f"{run.name}: config.json cannot be read")
            continue
        lines = [pieces().setting(path, _json(value)) for path, value in [*config.items()][:_MOST_KEYS]]
        title = f"config.json of {run.name}, {len(config):,} values"
        text += pieces().settings(title, list(filter(room.take, lines)), len(runs) == 1)
    return text
