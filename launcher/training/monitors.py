"""Write the lines of metrics.jsonl to DeepSpeed's monitors: `tensorboard`, `wandb`, `csv_monitor`, `comet`.

DeepSpeed itself writes some figures to them, at x = the number of contexts trained on. W&B rejects any x below one that
it has, so our figures use the same x. A rewind restarts the monitors, as a resumed process does. Earlier figures stay.
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

from longstride.data_pipelines.durable import write_over
from longstride.data_pipelines.plain_files import read_plain
from longstride.launcher.config import RunConfig
from longstride.launcher.models import ModelData
from longstride.launcher.output import file_names, say

_MOST_CHARACTERS = 200  # of a monitor's error message
_MARK = ".run"  # a file in a monitor's folder with the path of its run folder
_MOST_MARK_BYTES = 2**14


def claim_folders(config: RunConfig) -> RunConfig:
    """Give TensorBoard and CSV folders that no other run writes to: ``job_name``, or the next free ``job_name-2``, ….

    A resumed run keeps its folder. TensorBoard and CSV may share one.
    """
    run, section = Path(config.train.output).resolve(), dict(config.deepspeed)
    is_resumed = (run / file_names.CONFIG).exists()
    claimed: dict[Path, Path] = {}
    for name in ("tensorboard", "csv_monitor"):
        settings = section.get(name, {})
        if not settings.get("enabled"):
            continue
        place = Path(settings.get("output_path", "")) / settings.get("job_name", run.name)
        if place not in claimed:
            claimed[place] = _claim(place, run, is_resumed)
        if claimed[place] != place:
            say(f"deepspeed.{name}: {place} already contains files; this run writes to {claimed[place]}")
        section[name] = settings | {"output_path": str(claimed[place].parent), "job_name": claimed[place].name}
    return config.model_copy(update={"deepspeed": section})


def _claim(place: Path, run: Path, is_resumed: bool) -> Path:
    """Mark the folder at a place, or the next free one, as this run's; return it."""
    if place.resolve() == run:  # monitors without an output_path write to the working directory
        return place
    places = (place.with_name(f"{place.name}-{number}") if number > 1 else place for number in itertools.count(1))
    taken = list(itertools.takewhile(lambda path: path.exists() and (not path.is_dir() or any(path.iterdir())), places))
    if is_resumed:
        owners = {path: _owner(path) for path in taken}
        claimed = [path for path, owner in owners.items() if owner == run]
        # Earlier versions left no mark, and a run folder may have been moved.
        claimed = claimed or [path for path, owner in owners.items() if owner is None or not owner.exists()][:1]
        if claimed:
            write_over(claimed[-1] / _MARK, str(run).encode())
            return claimed[-1]
    free = place if not taken else place.with_name(f"{place.name}-{len(taken) + 1}")
    free.mkdir(parents=True, exist_ok=True)
    try:
        with (free / _MARK).open("x") as mark:
            mark.write(str(run))
    except FileExistsError:  # another run has just begun there
        return _claim(place, run, is_resumed)
    return free


def _owner(place: Path) -> Path | None:
    """Return the run folder of a monitor's folder; None without a readable mark."""
    with suppress(OSError, ValueError):
        return Path(read_plain(place / _MARK, _MOST_MARK_BYTES, follow_links=False).decode())
    return None


class Monitors:
    """Writes lines to the monitors of an engine, on the first rank. A failing monitor must not fail the run."""

    def __init__(self, engine: DeepSpeedEngine, say: Callable[[str], None]) -> None:
        self._engine, self._say = engine, say
        self._failed: set[str] = set()
        if engine.monitor.enabled:
            self._begin(engine.global_steps)

    def write(self, line: dict[str, Any]) -> None:
        """Write all numbers of a line, including its step."""
        if not self._engine.monitor.enabled:
            return
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        x = self._contexts(line["step"])
        self._engine.monitor.write_events([(f"{line['split']}/{key}", float(v), x) for key, v in numbers.items()])

    def samples(self, step: int, data: ModelData, drawn: np.ndarray, files: Sequence[Path]) -> None:
        """Write samples of a step, (S, bytes) uint8, that are in files: texts, pictures or sounds."""
        monitor, x = self._engine.monitor, self._contexts(step)
        if not monitor.enabled:
            return
        kind = data.modality.shown_as
        if (board := monitor.tb_monitor) is not None:
            self._try_writing(board, lambda: _write_to_tensorboard(board.summary_writer, data, drawn, x))
        if (wandb_monitor := monitor.wandb_monitor) is not None:
            self._try_writing(
                wandb_monitor,
                lambda: wandb_monitor.log({"samples": [_wandb_media(kind, file) for file in files]}, step=x),
            )
        if (table := monitor.csv_monitor) is not None:
            self._try_writing(table, lambda: table.write_events([("samples/file", str(file), x) for file in files]))
        if (comet := monitor.comet_monitor) is not None:
            log = {"text": "log_text", "picture": "log_image", "waveform": "log_audio"}[kind]
            contents = [file.read_text(errors="replace") if kind == "text" else str(file) for file in files]
            self._try_writing(comet, lambda: [getattr(comet.experiment, log)(item, step=x) for item in contents])

    def _try_writing(self, monitor: Any, write: Callable[[], object]) -> None:
        """Write to one of DeepSpeed's monitors. Only its first error is reported."""
        name = type(monitor).__name__
        try:
            write()
        except Exception as error:  # packages, networks and disks must not end a run
            if name not in self._failed:
                reason = " ".join(str(error).split())[:_MOST_CHARACTERS] or type(error).__name__
                self._say(f"step {self._engine.global_steps}: {name} could not write: {reason}; the run continues")
            self._failed.add(name)

    def rewind(self, step: int) -> None:
        """Restart after a rewind to a step: W&B and Comet as a new run, TensorBoard and CSV in the same files."""
        monitor = self._engine.monitor
        if not monitor.enabled:
            return
        try:
            self._end()
            self._engine.monitor = MonitorMaster(monitor.monitor_config)
            self._failed.clear()
            self._begin(step)
        except Exception as error:  # see ``_try_writing``
            monitor.enabled = self._engine.monitor.enabled = False
            self._say(f"step {step}: the monitors could not restart: {error}; the run continues without them")

    def close(self) -> None:
        """Close the monitors, which flushes them."""
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
        """Begin writing after a step. TensorBoard discards what an earlier start wrote beyond it; CSV appends."""
        monitor = self._engine.monitor

        def write_events(events: list[tuple[str, float, int]]) -> None:
            for backend in (monitor.tb_monitor, monitor.wandb_monitor, monitor.csv_monitor, monitor.comet_monitor):
                if backend is not None:
                    self._try_writing(backend, functools.partial(backend.write_events, events))

        monitor.write_events = write_events  # DeepSpeed calls it inside its step
        if (table := monitor.csv_monitor) is not None:  # files listed here have their heading
            tables = [path for path in Path(table.log_dir).glob("*.csv") if path.is_file() and path.stat().st_size]
            table.filenames += [path.stem for path in tables]
        if monitor.tb_monitor is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            event = Event(step=self._contexts(step) + 1, session_log=SessionLog(status=SessionLog.START))
            monitor.tb_monitor.summary_writer.file_writer.add_event(event)

    def _contexts(self, step: int) -> int:
        """Return the number of contexts trained on after a step, which DeepSpeed uses as x."""
        engine = self._engine
        contexts: int = engine.global_samples + (step - engine.global_steps) * engine.train_batch_size()
        return contexts


def _write_to_tensorboard(writer: Any, data: ModelData, drawn: np.ndarray, x: int) -> None:
    """Write texts verbatim, pictures in one strip, and sounds that can be played."""
    samples = [data.modality.shown(sample, data.file_properties) for sample in drawn]
    if data.modality.shown_as == "picture":
        writer.add_images("samples", np.stack(samples), x, dataformats="NHWC")
    for number, sample in enumerate(samples):
        name = f"samples/{number + 1}"
        if data.modality.shown_as == "text":
            # Markdown shows lines verbatim that begin with four spaces.
            lines = sample.tobytes().decode(errors="replace").splitlines()
            writer.add_text(name, "\n".join(f"    {line}" for line in lines), x)
        elif data.modality.shown_as == "waveform":
            writer.add_audio(name, torch.from_numpy(sample.astype(np.float32))[None], x, data.file_properties["rate"])
    writer.flush()


def _wandb_media(kind: str, file: Path) -> Any:
    import wandb

    if kind == "text":
        return wandb.Html(f"<pre>{html.escape(file.read_text(errors='replace'))}</pre>", inject=False)
    return (wandb.Image if kind == "picture" else wandb.Audio)(str(file))
