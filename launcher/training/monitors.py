"""DeepSpeed's monitors (`tensorboard`, `wandb`, `csv_monitor`, `comet`), with the lines of metrics.jsonl in them.

DeepSpeed writes a few figures of its own to them, at the number of contexts that were trained on so far. W&B takes
nothing whose x lies before one that it has, so ours are written at that number too. Where x has to go back, as a run
does that is rewound, the monitors begin anew, as they do in a process that resumes: what came before stays, as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.monitor.monitor import MonitorMaster


class Monitors:
    """Hands lines to the monitors of an engine, on the first rank; what they cannot do ends nothing."""

    def __init__(self, engine: DeepSpeedEngine, say: Callable[[str], None]) -> None:
        self._engine, self._say = engine, say
        self._has_failed = False
        if engine.monitor.enabled:
            self._begin(engine.global_steps)

    def write(self, line: dict[str, Any]) -> None:
        """One event of all numbers of a line, its step among them."""
        if not self._engine.monitor.enabled:
            return
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        x = self._contexts(line["step"])
        try:
            self._engine.monitor.write_events([(f"{line['split']}/{key}", float(v), x) for key, v in numbers.items()])
        except OSError as error:
            if not self._has_failed:
                self._say(f"step {line['step']}: a monitor of DeepSpeed's could not write: {error}; the run goes on")
            self._has_failed = True

    def rewind(self, step: int) -> None:
        """Begins anew behind a step: W&B and Comet with another run, TensorBoard and CSV in the same files."""
        monitor = self._engine.monitor
        if not monitor.enabled:
            return
        try:
            self._end()
            self._engine.monitor = MonitorMaster(monitor.monitor_config)
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
        """Has TensorBoard forget what an earlier start wrote behind this step, as metrics.jsonl has."""
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
