"""DeepSpeed's monitors (`tensorboard`, `wandb`, `csv_monitor`, `comet`), with the lines of metrics.jsonl in them.

DeepSpeed writes a few figures of its own to them, at the number of contexts that were trained on so far. W&B takes
nothing whose x lies before one that it has, so ours are written at that number too. Where x has to go back, as a run
does that is rewound, the monitors begin anew, as they do in a process that resumes: what came before stays, as it was.
"""

from __future__ import annotations

import functools
import html
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.monitor.monitor import MonitorMaster

from longstride.data_pipelines.plain_files import read_plain
from longstride.launcher.checkpoints import write_text
from longstride.launcher.config import RunConfig
from longstride.launcher.models import ModelData
from longstride.launcher.output import file_names, say

_MOST_CHARACTERS = 200  # of a monitor's own words
_MARK = ".run"  # in a monitor's folder: the path of the run folder that it belongs to
_MOST_MARK_BYTES = 2**14


def claim_places(config: RunConfig) -> RunConfig:
    """Give TensorBoard and CSV folders that no other run writes to: ``job_name``, or the next free ``job_name-2``, ….

    A run that was started before goes on in its own. Both may share one.

    Raises:
        OSError: a folder cannot be made or marked.
    """
    run, section = Path(config.train.output).resolve(), dict(config.deepspeed)
    goes_on = (run / file_names.CONFIG).exists()
    claimed: dict[Path, Path] = {}
    for name in ("tensorboard", "csv_monitor"):
        settings = section.get(name, {})
        if not settings.get("enabled"):
            continue
        place = Path(settings.get("output_path", "")) / settings.get("job_name", run.name)
        if place not in claimed:
            claimed[place] = _claim(place, run, goes_on)
        if claimed[place] != place:
            say(f"deepspeed.{name}: {place} holds files already; this run's are in {claimed[place]}")
        section[name] = settings | {"output_path": str(claimed[place].parent), "job_name": claimed[place].name}
    return config.model_copy(update={"deepspeed": section})


def _claim(place: Path, run: Path, goes_on: bool) -> Path:
    """Mark a folder as a run's, at a place or at the next that is free; return it."""
    if place.resolve() == run:  # monitors without an output_path write to the working directory
        return place
    places = (place.with_name(f"{place.name}-{number}") if number > 1 else place for number in itertools.count(1))
    taken = list(itertools.takewhile(lambda each: each.exists() and (not each.is_dir() or any(each.iterdir())), places))
    if goes_on:
        own = [each for each in taken if _owner(each) == run]
        # Earlier versions left no mark, and a run folder may have been moved.
        own = own or [each for each in taken if (owner := _owner(each)) is None or not owner.exists()][:1]
        if own:
            write_text(own[-1] / _MARK, str(run))
            return own[-1]
    free = place if not taken else place.with_name(f"{place.name}-{len(taken) + 1}")
    free.mkdir(parents=True, exist_ok=True)
    try:
        with (free / _MARK).open("x") as mark:
            mark.write(str(run))
    except FileExistsError:  # another run has just begun there
        return _claim(place, run, goes_on)
    return free


def _owner(place: Path) -> Path | None:
    """The run folder that a monitor's folder belongs to; None: no mark says it."""
    with suppress(OSError, ValueError):
        return Path(read_plain(place / _MARK, _MOST_MARK_BYTES, follow_links=False).decode())
    return None


class Monitors:
    """Hands lines to the monitors of an engine, on the first rank; what they cannot do ends nothing."""

    def __init__(self, engine: DeepSpeedEngine, say: Callable[[str], None]) -> None:
        self._engine, self._say = engine, say
        self._failed: set[str] = set()
        if engine.monitor.enabled:
            self._begin(engine.global_steps)

    def write(self, line: dict[str, Any]) -> None:
        """One event of all numbers of a line, its step among them."""
        if not self._engine.monitor.enabled:
            return
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        x = self._contexts(line["step"])
        self._engine.monitor.write_events([(f"{line['split']}/{key}", float(v), x) for key, v in numbers.items()])

    def samples(self, step: int, data: ModelData, drawn: np.ndarray, files: Sequence[Path]) -> None:
        """Samples of a step, (S, bytes) uint8, and the files that hold them: texts, pictures or sounds."""
        monitor, x = self._engine.monitor, self._contexts(step)
        if not monitor.enabled:
            return
        kind = data.modality.shown_as
        if (board := monitor.tb_monitor) is not None:
            self._trying(board, lambda: _to_tensorboard(board.summary_writer, data, drawn, x))
        if (wandb_monitor := monitor.wandb_monitor) is not None:
            self._trying(wandb_monitor, lambda: wandb_monitor.log({"samples": _for_wandb(kind, files)}, step=x))
        if (table := monitor.csv_monitor) is not None:
            self._trying(table, lambda: table.write_events([("samples/file", str(file), x) for file in files]))
        if (comet := monitor.comet_monitor) is not None:
            log = {"text": "log_text", "picture": "log_image", "waveform": "log_audio"}[kind]
            given = [file.read_text(errors="replace") if kind == "text" else str(file) for file in files]
            self._trying(comet, lambda: [getattr(comet.experiment, log)(each, step=x) for each in given])

    def _guard(self) -> None:
        """Has what a monitor cannot do end no step: DeepSpeed writes to them in the middle of its own."""
        monitor = self._engine.monitor

        def write_events(events: list[tuple[str, float, int]]) -> None:
            for one in (monitor.tb_monitor, monitor.wandb_monitor, monitor.csv_monitor, monitor.comet_monitor):
                if one is not None:
                    self._trying(one, functools.partial(one.write_events, events))

        monitor.write_events = write_events

    def _trying(self, monitor: Any, write: Callable[[], object]) -> None:
        """Writes to one of DeepSpeed's monitors; of what fails, the first time is told."""
        name = type(monitor).__name__
        try:
            write()
        except Exception as error:  # of packages, networks and disks, in the middle of a run
            if name not in self._failed:
                reason = " ".join(str(error).split())[:_MOST_CHARACTERS] or type(error).__name__
                self._say(f"step {self._engine.global_steps}: {name} could not write: {reason}; the run goes on")
            self._failed.add(name)

    def rewind(self, step: int) -> None:
        """Begins anew behind a step: W&B and Comet with another run, TensorBoard and CSV in the same files."""
        monitor = self._engine.monitor
        if not monitor.enabled:
            return
        try:
            self._end()
            self._engine.monitor = MonitorMaster(monitor.monitor_config)
            self._failed.clear()
            self._begin(step)
        except Exception as error:  # of packages and networks of others, in the middle of a run
            monitor.enabled = self._engine.monitor.enabled = False
            self._say(f"step {step}: the monitors could not begin anew: {error}; the run goes on without them")

    def close(self) -> None:
        """Has the monitors keep what they were given."""
        try:
            if self._engine.monitor.enabled:
                self._end()
        except Exception as error:
            self._say(f"the monitors could not be closed: {error}")

    def _end(self) -> None:
        monitor = self._engine.monitor
        if monitor.tb_monitor is not None:
            monitor.tb_monitor.summary_writer.close()
        if monitor.wandb_monitor is not None:
            import wandb

            wandb.finish()
        if monitor.comet_monitor is not None:
            monitor.comet_monitor.experiment.end()

    def _begin(self, step: int) -> None:
        """Guards the monitors, has TensorBoard forget what an earlier start wrote behind this step, and CSV go on."""
        self._guard()
        if (table := self._engine.monitor.csv_monitor) is not None:  # whose tables each have one heading
            tables = [path for path in Path(table.log_dir).glob("*.csv") if path.is_file() and path.stat().st_size]
            table.filenames += [path.stem for path in tables]
        monitor = self._engine.monitor.tb_monitor
        if monitor is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            mark = SessionLog(status=SessionLog.START)
            monitor.summary_writer.file_writer.add_event(Event(step=self._contexts(step) + 1, session_log=mark))

    def _contexts(self, step: int) -> int:
        """How many contexts the run has trained on after a step: where DeepSpeed puts its own figures of the step."""
        engine = self._engine
        contexts: int = engine.global_samples + (step - engine.global_steps) * engine.train_batch_size()
        return contexts


def _to_tensorboard(writer: Any, data: ModelData, drawn: np.ndarray, x: int) -> None:
    """Texts as they are, pictures in one strip, sounds that can be played."""
    shown = [data.modality.shown(each, data.file_properties) for each in drawn]
    if data.modality.shown_as == "picture":
        writer.add_images("samples", np.stack(shown), x, dataformats="NHWC")
    for number, each in enumerate(shown):
        name = f"samples/{number + 1}"
        if data.modality.shown_as == "text":
            # Markdown shows a text as it is where each of its lines begins with four spaces.
            lines = each.tobytes().decode(errors="replace").splitlines()
            writer.add_text(name, "\n".join(f"    {line}" for line in lines), x)
        elif data.modality.shown_as == "waveform":
            writer.add_audio(name, torch.from_numpy(each.astype(np.float32))[None], x, data.file_properties["rate"])
    writer.flush()


def _for_wandb(kind: str, files: Sequence[Path]) -> list[Any]:
    import wandb

    if kind == "text":
        texts = [html.escape(file.read_text(errors="replace")) for file in files]
        return [wandb.Html(f"<pre>{text}</pre>", inject=False) for text in texts]
    made = wandb.Image if kind == "picture" else wandb.Audio
    return [made(str(file)) for file in files]
