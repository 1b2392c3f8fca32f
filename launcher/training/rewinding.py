"""What a run does where a guard acts: tells it, writes it down, and rewinds or ends. Imports deepspeed.

A disk that is full must not end a run otherwise than its policy says, nor one rank alone: what cannot be written is
told, and a rewind that cannot bring the files back is a stop, which saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import Batch, StreamState
from longstride.launcher.checkpoints import Checkpoint, error_line, first_whole, go_back_to, list_checkpoints
from longstride.launcher.config import RunConfig
from longstride.launcher.data import Taken
from longstride.launcher.engine import apply_settings
from longstride.launcher.output import file_names, say
from longstride.launcher.ranks import Ranks, gather_objects
from longstride.launcher.training.guards import Guards, GuardStopError, Verdict
from longstride.launcher.training.incidents import Incident, Origin, make_incident, write_incident
from longstride.launcher.training.recorder import Recorder


class Response:
    """What follows on a guard's verdict, for a run that begins or goes on at ``state``.

    ``trusted``: whether checkpoints may hold more than tensors and numbers.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: RunConfig,
        ranks: Ranks,
        guards: Guards,
        recorder: Recorder,
        state: StreamState,
        *,
        trusted: bool = False,
    ) -> None:
        self._engine, self._config, self._ranks = engine, config, ranks
        self._guards, self._recorder = guards, recorder
        self._run, self._trusted = Path(config.train.output), trusted
        self._origin = Origin(step=engine.global_steps, stream=state.to_json())

    def act(self, verdict: Verdict, line: dict[str, Any], taken: Taken[Batch], before: StreamState) -> bool:
        """Tells and records what a guard found in a step; returns whether the run was rewound. All ranks must call.

        ``line``: of the step, for metrics.jsonl. ``before``: the stream before the step's batch.

        Raises:
            GuardStopError: the run is to stop here.
        """
        step, checkpoint = line["step"], None
        moved: list[Path] = []
        if verdict.outcome == "rewind":
            checkpoint = last_whole_checkpoint(self._config, self._ranks, step, trusted=self._trusted)
            if checkpoint is None:
                verdict = verdict.stopping("there is no whole checkpoint to rewind to")
            else:
                moved, failure = self._put_away(checkpoint.manifest.step, line)
                if failure is not None:
                    checkpoint, verdict = None, verdict.stopping(f"the run folder could not be rewound: {failure}")
        line["guard"] = str(verdict)  # as the incident has it
        if checkpoint is None:
            self._recorder.write(line)
        if self._ranks.is_first:
            incident = make_incident(
                line,
                verdict,
                world_size=self._ranks.world_size,
                origin=self._origin,
                stream=before.to_json(),
                stream_after=taken.batch.state.to_json(),
                rewound_to=checkpoint and checkpoint.manifest.step,
                sample_ids=list(taken.sample_ids),
            )
            self._recorder.say(f"step {step}: {verdict}; {self._written(incident)}")
            for path in moved:
                self._recorder.say(f"kept what lay beyond as {path}")
        if verdict.outcome == "stop":
            raise GuardStopError(step, verdict)
        if checkpoint is None:
            return False
        self._rewind(checkpoint, step, taken.batch.state)
        return True

    def _written(self, incident: Incident) -> str:
        """Where an incident was written, or why it was not."""
        try:
            return f"written to {write_incident(self._run, incident)}"
        except OSError as error:
            return f"not written down: {error_line(error, self._run / file_names.GUARDS)}"

    def _put_away(self, back: int, line: dict[str, Any]) -> tuple[list[Path], str | None]:
        """Brings the run folder back to a step; what now lies elsewhere, and what failed. All ranks must call.

        Before anything is loaded, and the lines last, in one rename: where it fails, the run is where it was.
        """
        moved: list[Path] = []
        failure = None
        if self._ranks.is_first:
            try:
                moved += go_back_to(self._run, back)
                copy = self._recorder.rewind(back, line)
                moved = [copy, *moved] if copy else moved
            except OSError as error:
                failure = error_line(error, self._run)
        return moved, gather_objects(failure, self._ranks)[0]

    def _rewind(self, checkpoint: Checkpoint, step: int, after: StreamState) -> None:
        """Brings the run back to a checkpoint, and on with the batches behind a step's."""
        checkpoint.load(self._engine, self._ranks)
        apply_settings(self._engine, self._config.train)
        back = checkpoint.manifest.step
        self._guards.rewound(step, checkpoint.manifest.guards)
        self._origin = Origin(step=back, stream=after.to_json())
        self._recorder.advance(back, f"rewound from step {step}")
        self._recorder.say(f"step {back}: going on from {checkpoint.folder} with the batch behind that of step {step}")


def last_whole_checkpoint(config: RunConfig, ranks: Ranks, before: int, *, trusted: bool = False) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, of a step before this, and fits it; None if there is none.

    The same on every rank. All ranks must call.

    Raises:
        AgreedError: on every rank, where one does not see what the first does, or it would have to be trusted.
    """
    run = Path(config.train.output)
    listed = list_checkpoints(run, trusted=trusted)[0] if ranks.is_first else []
    earlier = [each for each in listed if each.manifest.step < before]
    fitting = [each for each in earlier if not each.needs_conversion(config, ranks.world_size)]
    checkpoint, damaged = first_whole(run, fitting, ranks)
    if ranks.is_first:
        for line in damaged:
            say(f"passed over: {line}")
    return checkpoint
