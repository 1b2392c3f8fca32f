"""Feeds the batch of one step again, with the weights that met it, and says what came of it. Imports deepspeed.

Weights of any step follow from the newest checkpoint before it: the steps after that are taken once more, bit for bit
on as many processes. Nothing is written.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import Batch, LostWorkerError, StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Checkpoint, first_whole, list_checkpoints
from longstride.launcher.config import load_json_object
from longstride.launcher.data import GlobalBatch, Run
from longstride.launcher.engine import build_engine
from longstride.launcher.identity import check_matches
from longstride.launcher.models import ModelData
from longstride.launcher.output import exit_codes, exit_on_mistake, file_names, metrics_file, say
from longstride.launcher.ranks import process_group
from longstride.launcher.training import loop
from longstride.launcher.training.agreement import check_agreement
from longstride.launcher.training.guards import Guards, Incident, as_number, read_incidents
from longstride.launcher.training.initial import agreed_initial, open_initial

_COMPARED = ("loss_nats", "grad_norm", "sample_ids_crc32")
Batches = Generator[GlobalBatch[Batch]]


@dataclass(frozen=True, slots=True)
class Record:
    """What a run has written of a step: where, and the figures that a replay has to meet."""

    source: str
    figures: dict[str, Any]
    incident: Incident | None  # None: a line of metrics.jsonl


def replay_step(run: Run, step: int) -> int:
    """Replays a step of a run and prints what came of it; returns the exit code: 0 where it is what was recorded.

    Raises:
        ConfigError: the run does not hold what is needed, or does not fit the configuration.
    """
    config, ranks = run.config.without_monitors(), run.ranks
    run = replace(run, config=config)
    with process_group(ranks, config.train.timeout_seconds, run.folder) as watchdog:
        with exit_on_mistake(ranks.barrier):
            check_agreement(run, watchdog.hosts, replay=step)
            record, candidates, is_from_others = ranks.all_work(lambda: _find_way(run, step))
        incident = record.incident if record else None
        checkpoint, damaged = first_whole(run.folder, candidates, ranks)
        if ranks.is_first:
            for line in damaged:
                say(f"passed over: {line}")
        if checkpoint is None and incident and incident.origin.step:
            way = f"from step {incident.origin.step} to {step - 1} is whole, from which to come to it"
            raise ConfigError(f"{run.folder}: no checkpoint {way}")
        if checkpoint is None and run.source is None and is_from_others:
            raise ConfigError(f"--replay={step}: the run began from other weights; give its --from too")
        if checkpoint is None and incident:
            check_processes(incident, ranks.world_size, config.train.sequence_parallel)
        with exit_on_mistake(ranks.barrier):
            initial = open_initial(run, checkpoint)
            initial = agreed_initial(run, initial, checkpoint, watchdog.hosts)
            engine = build_engine(config, ranks, None if initial is None else initial.fill)
            if checkpoint is not None:
                checkpoint.load(engine, config, ranks)
            if ranks.is_first:
                place = checkpoint.folder if checkpoint else "the beginning"
                say(f"replaying step {step}, from {place}")
            guards = Guards(config.train.guards, checkpoint.manifest.guards if checkpoint else None)
            try:
                report = _repeat(run, engine, step, way_batches(run, checkpoint, record, engine.device), guards)
            except LostWorkerError as lost:
                if ranks.is_first:
                    say(f"lost a process that reads data: {lost}; start the replay again")
                ranks.barrier()
                return exit_codes.HUNG
        report = compare(report, record)
        if ranks.is_first:
            print(json.dumps(report), flush=True)
            say(outcome_line(report))
        ranks.barrier()  # a launcher ends all ranks once one has ended
        engine.destroy()
    return exit_codes.UNFORESEEN if report["reproduced"] is False else exit_codes.DONE


def _find_way(run: Run, step: int) -> tuple[Record | None, list[Checkpoint], bool]:
    """What is recorded of a step, the checkpoints on the way to it, newest first, and whether --from led to any.

    Raises:
        ConfigError: the run has no such step, or was trained with something else.
    """
    if step > run.config.train.last_step:
        raise ConfigError(f"--replay={step}: the run has {run.config.train.last_step} steps")
    record = find_record(run.folder, step)
    first = record.incident.origin.step if record and record.incident else 0
    listed, _ = list_checkpoints(run.folder, trusted=run.trusted)
    candidates = [each for each in listed if first <= each.manifest.step < step]
    for newest in listed[:1]:
        check_matches(newest, run.config, run.data.identity)
    path = run.folder / file_names.DATA
    if not listed and os.path.lexists(path):
        known = ModelData.from_json(load_json_object(path, follow_links=False), run.config.model, f"{path}: ")
        if found := known.differences(run.data.identity):
            rule = f"is not what the run was trained on: {'; '.join(found.values())}; name the run's data"
            raise ConfigError.at("data.path", run.config.data.path, rule)
    for newest in candidates[:1]:
        if not newest.is_repeated_by(run.config, run.ranks.world_size):
            raise ConfigError(f"--replay={step}: {newest.layout}, and is repeated so alone: start as it was saved")
    return record, candidates, any(each.manifest.origin for each in listed)


def find_record(run: Path, step: int) -> Record | None:
    """What a run has written of a step: the newest file of a guard, or the line of metrics.jsonl; None: neither."""
    for path, incident in read_incidents(run).items():
        if incident.step == step:
            return Record(str(path), {name: getattr(incident, name) for name in _COMPARED}, incident)
    line = metrics_file.find_steps(run).get(step)
    if line is None:
        return None
    return Record(str(run / file_names.METRICS), {name: line[name] for name in _COMPARED}, None)


def check_processes(incident: Incident, world_size: int, sequence_parallel: int | None) -> None:
    """Whether a replay from the beginning has the processes that the run had. A checkpoint knows its own.

    Raises:
        ConfigError: it has not.
    """
    if (incident.world_size, incident.sequence_parallel) != (world_size, sequence_parallel):
        many = f"{incident.world_size} process{'es' if incident.world_size > 1 else ''}"
        many += f", {incident.sequence_parallel} to a context" if incident.sequence_parallel else ""
        rule = f"it was taken by {many}, and is repeated so alone: start as many"
        raise ConfigError(f"--replay={incident.step}: {rule}")


def way_batches(run: Run, checkpoint: Checkpoint | None, record: Record | None, device: torch.device) -> Batches:
    """The batches that a run took from a checkpoint on to the recorded step: after a rewind, later ones.

    Rewinds on the way are followed too. They change the batches alone, as the weights that each loads are those that
    the steps before it lead to. Where the run may have gone on with several batches, the check sum of the next line of
    metrics.jsonl decides.
    """

    def take(state: StreamState | None) -> Batches:
        return run.data.batches(state, device, run.stop)

    number = checkpoint.manifest.step if checkpoint else 0
    state = checkpoint.stream if checkpoint else None
    if record and record.incident:
        origin = record.incident.origin
        yield from take(StreamState.from_json(origin.stream) if origin.step == number else state)
        return
    turns: dict[int, list[StreamState]] = {}
    for incident in read_incidents(run.folder).values():
        if incident.rewound_to is not None:
            turns.setdefault(incident.rewound_to, []).append(StreamState.from_json(incident.stream_after))
    sums = {step: line["sample_ids_crc32"] for step, line in metrics_file.find_steps(run.folder).items()}
    while True:
        state = _state_taken(number, [state, *turns.get(number, [])], sums, take)
        batches = take(state)
        for batch in batches:
            state, number = batch.part.state, number + 1
            yield batch
            if number in turns:
                break
        else:
            return
        batches.close()


def _state_taken(
    number: int,
    states: list[StreamState | None],
    sums: dict[int, int],
    take: Callable[[StreamState | None], Batches],
) -> StreamState | None:
    """Of the states that a run may have gone on with from a step, the one that leads to its next line; or the first."""
    later = [step for step in sums if step > number]
    if len(states) > 1 and later:
        for state in states:
            batches = take(state)
            *_, last = itertools.islice(batches, min(later) - number)
            batches.close()
            if last.sample_ids_crc32 == sums[min(later)]:
                return state
    return states[0]


def _repeat(run: Run, engine: DeepSpeedEngine, step: int, batches: Batches, guards: Guards) -> dict[str, Any]:
    """Takes the steps up to ``step``, and reports that one, or an earlier one that a guard refused.

    The contexts with the highest loss a byte come first; what is no number counts as the highest.
    """
    first = engine.global_steps
    engine.train()
    for number in range(first + 1, step + 1):
        batch = next(batches)
        context_nats: list[float] = []
        line = loop.train_step(
            engine, batch, run.config.train.micro_batch, run.ranks, guards, context_nats, run.data.unit
        )
        if number == step or (guards.verdict and guards.verdict.outcome != "skip"):
            break
    bits = [name for name in line if name.startswith("bits_per_")]
    names = ("step", "loss_nats", *bits, "grad_norm", "loss_scale", "tokens", "sample_ids_crc32", "guard")
    report = {name: line.get(name) for name in names} | {"from_step": first}
    if "rank_nats" in line:
        report["loss_nats"] = as_number(sum(map(float, line["rank_nats"])) / line["tokens"])

    def loss(context: dict[str, Any]) -> float:
        nats_per_byte = float(context["nats"]) / (context["bytes"] or math.nan)  # of separators alone: no bytes
        return nats_per_byte if math.isfinite(nats_per_byte) else math.inf

    ranks = run.ranks
    first_of_group = ranks.rank - ranks.sequence_rank
    sections = ranks.gather_objects(context_nats)[first_of_group : first_of_group + ranks.sequence_parallel]
    whole = map(sum, zip(*sections, strict=True))  # of the same contexts
    rows = zip(batch.part.sample_ids.tolist(), whole, batch.part.content.tolist(), strict=True)
    contexts = [{"sample_id": number, "nats": as_number(nats), "bytes": length} for number, nats, length in rows]
    everywhere = (each for part in ranks.gather_objects(contexts)[:: ranks.sequence_parallel] for each in part)
    return report | {"contexts": sorted(everywhere, key=loss, reverse=True)}


def compare(report: dict[str, Any], record: Record | None) -> dict[str, Any]:
    """The report of a replayed step, with what was recorded of it and whether it is the same; null: nothing was."""
    if record is None:
        return report | {"reproduced": None, "recorded": None}
    same = all(report[name] == record.figures[name] for name in _COMPARED)
    return report | {"reproduced": same, "recorded": {"source": record.source} | record.figures}


def outcome_line(report: dict[str, Any]) -> str:
    """A replay's outcome in one line."""
    step, recorded = report["step"], report["recorded"]
    if report["guard"] and not report["reproduced"]:
        return f"step {step}: a guard does not let it pass, which is not what was recorded: {report['guard']}"
    if recorded is None:
        return f"step {step}: nothing is recorded of it (train.log_every), so nothing tells whether it is the same"
    if report["reproduced"]:
        return f"step {step}: the same as in {recorded['source']}"
    names = [name for name in _COMPARED if report[name] != recorded[name]]
    different = ", ".join(f"{name} {report[name]} instead of {recorded[name]}" for name in names)
    return f"step {step}: another outcome than in {recorded['source']}: {different}"
