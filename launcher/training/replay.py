"""Feeds the batch of one step again, with the weights that met it, and says what came of it. Imports deepspeed.

Weights of any step follow from the newest checkpoint before it: the steps behind that are taken once more, bit for bit
on as many processes. Nothing is written.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import Batch, StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import (
    Checkpoint,
    first_whole,
    list_checkpoints,
)
from longstride.launcher.config import RunConfig
from longstride.launcher.data import RunData, Taken, together
from longstride.launcher.engine import build as ours
from longstride.launcher.output import exit_codes, exit_on_mistake, metrics_file, say
from longstride.launcher.ranks import Ranks, barrier, gather_objects, process_group
from longstride.launcher.training import loop
from longstride.launcher.training.guards import Guards
from longstride.launcher.training.incidents import Incident, as_number, read_incidents

_COMPARED = ("loss_nats", "grad_norm", "sample_ids_crc32")
Take = Callable[[StreamState | None], Generator[Taken[Batch]]]
_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")  # which would write


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run has written of a step: where, and the figures that a replay has to meet."""

    source: str
    figures: dict[str, Any]
    incident: Incident | None  # None: a line of metrics.jsonl


def replay_step(config: RunConfig, step: int, data: RunData, ranks: Ranks, *, trusted: bool = False) -> int:
    """Replays a step of a run and prints what came of it; returns the exit code: 0 where it is what was recorded.

    ``trusted``: whether checkpoints may hold more than tensors and numbers.

    Raises:
        ConfigError: the run does not hold what is needed, or does not fit the configuration.
    """
    run = Path(config.train.output)
    if step > config.train.last_step:
        raise ConfigError(f"--replay={step}: the run has {config.train.last_step} steps")
    recorded = find_record(run, step)
    candidates = _candidates(run, config, step, recorded, data, ranks, trusted)
    config = _without_monitors(config)
    with process_group(ranks, config.train.timeout_seconds, run):
        checkpoint = _choose(run, candidates, ranks)
        if checkpoint is None and recorded and recorded.incident and recorded.incident.origin.step:
            first = recorded.incident.origin.step
            raise ConfigError(
                f"{run}: no checkpoint from step {first} to {step - 1} is whole, from which to come to it"
            )
        if checkpoint is None and recorded and recorded.incident:
            check_processes(recorded.incident, ranks.world_size)
        with exit_on_mistake(lambda: barrier(ranks)):
            engine = ours.build_engine(config, ranks)
            if checkpoint is not None:
                checkpoint.load(engine, ranks)
                ours.apply_settings(engine, config.train)
            if ranks.is_first:
                place = checkpoint.folder if checkpoint else "the beginning"
                say(f"replaying step {step}, from {place}")
            batches = way_batches(run, checkpoint, recorded, config, data, ranks, engine.device)
            guards = Guards(config.train.guards, checkpoint.manifest.guards if checkpoint else None)
            report = _repeat(engine, step, config, batches, ranks, guards)
        report = compared(report, recorded)
        if ranks.is_first:
            print(json.dumps(report), flush=True)
            say(told(report))
        barrier(ranks)  # a launcher ends all ranks once one has ended
        engine.destroy()
    return exit_codes.UNFORESEEN if report["reproduced"] is False else exit_codes.DONE


def _repeat(
    engine: DeepSpeedEngine,
    step: int,
    config: RunConfig,
    batches: Generator[Taken[Batch]],
    ranks: Ranks,
    guards: Guards,
) -> dict[str, Any]:
    """Takes the steps up to one, and tells what that one gave, or an earlier one that a guard did not let pass.

    The contexts with the highest loss a byte come first.
    """
    first = engine.global_steps
    engine.train()
    for number in range(first + 1, step + 1):
        taken = next(batches)
        own: list[float] = []
        line = loop.train_step(engine, taken, config.train.micro_batch, ranks, guards, own)
        if number == step or (guards.verdict and guards.verdict.outcome != "skip"):
            break
    names = ("step", "loss_nats", "bits_per_byte", "grad_norm", "loss_scale", "tokens", "sample_ids_crc32", "guard")
    report = {name: line.get(name) for name in names} | {"from_step": first}
    if "rank_nats" in line:
        report["loss_nats"] = as_number(sum(map(float, line["rank_nats"])) / line["tokens"])
    worst = sorted(_contexts(taken, own, ranks), key=_loss_of, reverse=True)
    return report | {"contexts": worst}


def find_record(run: Path, step: int) -> Recorded | None:
    """What a run has written of a step: the newest file of a guard, or the line of metrics.jsonl; None: neither."""
    for path, incident in read_incidents(run).items():
        if incident.step == step:
            figures = {name: getattr(incident, name) for name in _COMPARED}
            return Recorded(str(path), figures, incident)
    line = metrics_file.find_lines(run, "train").get(step)
    if line is None:
        return None
    return Recorded(str(run / "metrics.jsonl"), {name: line[name] for name in _COMPARED}, None)


def check_processes(incident: Incident, world_size: int) -> None:
    """Whether a replay from the beginning has as many processes as the run had; a checkpoint tells by itself.

    Raises:
        ConfigError: it has not.
    """
    if incident.world_size != world_size:
        many = f"{incident.world_size} process{'es' if incident.world_size > 1 else ''}"
        rule = f"it was taken by {many}, and is repeated so alone: start as many"
        raise ConfigError(f"--replay={incident.step}: {rule}")


def compared(report: dict[str, Any], recorded: Recorded | None) -> dict[str, Any]:
    """The report of a replayed step, with what was recorded of it and whether it is the same; null: nothing was."""
    if recorded is None:
        return report | {"reproduced": None, "recorded": None}
    figures = recorded.figures
    same = all(report[name] == figures[name] for name in _COMPARED)
    return report | {"reproduced": same, "recorded": {"source": recorded.source} | figures}


def told(report: dict[str, Any]) -> str:
    """A replay's outcome in one line."""
    step, recorded = report["step"], report["recorded"]
    if report["guard"] and not report["reproduced"]:
        return f"step {step}: a guard does not let it pass, which is not what was recorded: {report['guard']}"
    if recorded is None:
        return f"step {step}: nothing is recorded of it (train.log_every), so nothing tells whether it is the same"
    if report["reproduced"]:
        return f"step {step}: the same as in {recorded['source']}"
    different = ", ".join(
        f"{name} {report[name]} instead of {recorded[name]}" for name in _COMPARED if report[name] != recorded[name]
    )
    return f"step {step}: another outcome than in {recorded['source']}: {different}"


def _loss_of(context: dict[str, Any]) -> float:
    """Nats a byte; what is no number counts as the highest."""
    loss = float(context["nats"]) / context["bytes"]
    return loss if math.isfinite(loss) else math.inf


def _candidates(
    run: Path,
    config: RunConfig,
    step: int,
    recorded: Recorded | None,
    data: RunData,
    ranks: Ranks,
    trusted: bool,
) -> list[Checkpoint]:
    """The checkpoints before a step that lie on the way to it, newest first; the first fits the configuration."""
    first = recorded.incident.origin.step if recorded and recorded.incident else 0
    listed, _ = list_checkpoints(run, trusted=trusted)
    found = [each for each in listed if first <= each.manifest.step < step]
    for checkpoint in found[:1]:
        checkpoint.check_matches(config, data.stream().fingerprint)
        if checkpoint.needs_conversion(config, ranks.world_size):
            raise ConfigError(f"--replay={step}: {checkpoint.layout}, and is repeated so alone: start as it was saved")
    return found


def _choose(run: Path, candidates: list[Checkpoint], ranks: Ranks) -> Checkpoint | None:
    """The first that is whole; None: there is none, and the beginning is left."""
    checkpoint, damaged = first_whole(run, candidates, ranks)
    if ranks.is_first:
        for line in damaged:
            say(f"passed over: {line}")
    return checkpoint


def way_batches(
    run: Path,
    checkpoint: Checkpoint | None,
    recorded: Recorded | None,
    config: RunConfig,
    data: RunData,
    ranks: Ranks,
    device: Any,
) -> Generator[Taken[Batch]]:
    """The batches that a run took from a checkpoint on to the recorded step: behind a rewind, later ones.

    Rewinds that lie between are gone through, as what was loaded there is what the steps up to it come to. Which of
    them the lines of metrics.jsonl came by is told by the check sum of the first line behind each.
    """
    number = checkpoint.manifest.step if checkpoint else 0
    state = StreamState.from_json(checkpoint.manifest.stream) if checkpoint else None
    take = partial(_batches, config, data, ranks, device)
    if recorded and recorded.incident:
        origin = recorded.incident.origin
        yield from take(StreamState.from_json(origin.stream) if origin.step == number else state)
        return
    turns: dict[int, list[StreamState]] = {}
    for incident in read_incidents(run).values():
        if incident.rewound_to is not None:
            turns.setdefault(incident.rewound_to, []).append(StreamState.from_json(incident.stream_after))
    sums = {step: line["sample_ids_crc32"] for step, line in metrics_file.find_lines(run, "train").items()}
    while True:
        state = _way_taken(number, [state, *turns.get(number, [])], sums, take)
        batches = take(state)
        for each in batches:
            state, number = each.batch.state, number + 1
            yield each
            if number in turns:
                break
        else:
            return
        batches.close()


def _way_taken(number: int, ways: list[StreamState | None], sums: dict[int, int], take: Take) -> StreamState | None:
    """Of the states that a run may have gone on by from a step, the one that leads to its next line; or the first."""
    later = [step for step in sums if step > number]
    if len(ways) > 1 and later:
        for way in ways:
            batches = take(way)
            *_, last = itertools.islice(batches, min(later) - number)
            batches.close()
            if last.sample_ids_crc32 == sums[min(later)]:
                return way
    return ways[0]


def _batches(
    config: RunConfig, data: RunData, ranks: Ranks, device: Any, state: StreamState | None
) -> Generator[Taken[Batch]]:
    share = config.train.global_batch // ranks.world_size
    return together(lambda: iter(data.stream(state)), share, ranks, device)


def _contexts(taken: Taken[Batch], own: list[float], ranks: Ranks) -> list[dict[str, Any]]:
    """Number, nats and bytes of every context of the global batch."""
    rows = zip(taken.batch.sample_ids.tolist(), own, taken.batch.lengths.tolist(), strict=True)
    mine = [{"sample_id": number, "nats": as_number(nats), "bytes": length} for number, nats, length in rows]
    return [each for theirs in gather_objects(mine, ranks) for each in theirs]


def _without_monitors(config: RunConfig) -> RunConfig:
    """The same, where DeepSpeed writes nothing."""
    section = {key: value for key, value in config.deepspeed.items() if key not in _MONITORS}
    return config.model_copy(update={"deepspeed": section})
