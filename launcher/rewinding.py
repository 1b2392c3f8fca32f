"""What a run does where a guard acts: tells it, writes it down, and rewinds or ends. Imports deepspeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from data_pipelines import Batch, StreamState
from launcher.batches import Taken
from launcher.checkpoint import (
    Checkpoint,
    checkpoint_folder,
    first_whole,
    list_checkpoints,
    load_checkpoint,
    set_aside,
)
from launcher.config import RunConfig
from launcher.engine import apply_settings
from launcher.guards import Guards, GuardStopError, Verdict
from launcher.incidents import Origin, make_incident, write_incident
from launcher.matching import needs_conversion
from launcher.metrics import Recorder
from launcher.processes import Ranks, barrier
from launcher.reporting import tell_passed_over


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
        """Tells and writes what a guard found in a step; returns whether the run has been rewound. All ranks must call.

        ``before``: the stream before the step's batch.

        Raises:
            GuardStopError: the run is to stop here.
        """
        step, checkpoint = line["step"], None
        if verdict.outcome == "rewind":
            checkpoint = last_whole_checkpoint(self._config, self._ranks, step, trusted=self._trusted)
            if checkpoint is None:
                verdict = verdict.stopping("there is no whole checkpoint to rewind to")
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
            path = write_incident(self._run, incident)
            self._recorder.say(f"step {step}: {verdict}; written to {path}")
        if verdict.outcome == "stop":
            raise GuardStopError(step, verdict)
        if checkpoint is None:
            return False
        self._rewind(checkpoint, step, taken.batch.state)
        return True

    def _rewind(self, checkpoint: Checkpoint, step: int, after: StreamState) -> None:
        """Brings the run back to a checkpoint, and on with the batches behind a step's."""
        load_checkpoint(self._engine, checkpoint, self._ranks)
        apply_settings(self._engine, self._config.train)
        back = checkpoint.manifest.step
        self._guards.rewound(step, checkpoint.manifest.guards)
        self._origin = Origin(step=back, stream=after.to_json())
        if self._ranks.is_first:
            moved = [self._recorder.rewind(back, f"rewound from step {step}")]
            later, _ = list_checkpoints(self._run)
            numbers = [each.manifest.step for each in later if each.manifest.step > back]
            moved += [set_aside(checkpoint_folder(self._run, number)) for number in numbers]
            self._recorder.say(
                f"step {back}: going on from {checkpoint.folder} with the batch behind that of step {step}"
            )
            for path in filter(None, moved):
                self._recorder.say(f"kept what lay beyond as {path}")
        barrier(self._ranks)


def last_whole_checkpoint(config: RunConfig, ranks: Ranks, before: int, *, trusted: bool = False) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, of a step before this, and fits it; None if there is none.

    The same on every rank. All ranks must call.

    Raises:
        AgreedError: on every rank, where one does not see what the first does, or it would have to be trusted.
    """
    run = Path(config.train.output)
    listed = list_checkpoints(run, trusted=trusted)[0] if ranks.is_first else []
    earlier = [each for each in listed if each.manifest.step < before]
    fitting = [each for each in earlier if not needs_conversion(each, config, ranks.world_size)]
    checkpoint, damaged = first_whole(run, fitting, ranks, trusted=trusted)
    if ranks.is_first:
        tell_passed_over(damaged)
    return checkpoint
