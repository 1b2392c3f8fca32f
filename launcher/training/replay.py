"""Repeat one step of a run with its batch and weights, and compare the outcome with the record. Imports deepspeed.

The weights come from the newest checkpoint before the step. The steps between are taken once more, bit for bit with the
same number of processes. Nothing is written.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.order import Batch, LostWorkerError, StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Checkpoint, first_undamaged, list_checkpoints, load
from longstride.launcher.config import Stage, load_json_object
from longstride.launcher.data import GlobalBatch, RunSetup
from longstride.launcher.engine import build_engine
from longstride.launcher.identity import check_matches
from longstride.launcher.models import ModelData
from longstride.launcher.output import counting, exit_codes, exit_on_mistake, file_names, metrics_file, say
from longstride.launcher.ranks import process_group
from longstride.launcher.training import loop
from longstride.launcher.training.guards import Guards, Incident, as_number, read_incidents
from longstride.launcher.training.initial import agree_on_initial, open_initial
from longstride.launcher.training.resume import check_agreement

_COMPARED = ("loss_nats", "grad_norm", "sample_ids_crc32")
Batches = Generator[GlobalBatch[Batch]]


@dataclass(frozen=True, slots=True)
class Record:
    """A run's record of a step: the file, and the figures that a replay must reproduce."""

    source: str
    figures: dict[str, Any]
    incident: Incident | None  # None for a line of metrics.jsonl


def replay_step(run: RunSetup, step: int) -> int:
    """Replay a step of a run and print the outcome; return the exit code, 0 if it is as recorded."""
    config, ranks = run.config.without_monitors(), run.ranks
    run = replace(run, config=config)
    with process_group(ranks, config.train.timeout_seconds, run.folder) as watchdog:
        with exit_on_mistake(ranks.barrier):
            check_agreement(run, watchdog.hosts, replay=step)
            record, candidates, has_origin = ranks.run_on_all(lambda: find_sources(run, step))
        incident = record.incident if record else None
        checkpoint, damaged = first_undamaged(run.folder, candidates, ranks)
        if ranks.is_first:
            for line in damaged:
                say(f"passed over: {line}")
        if checkpoint is None and incident and incident.origin.step:
            where = f"from step {incident.origin.step} to {step - 1}"
            raise ConfigError(f"{run.folder}: no checkpoint {where} is intact, so step {step} cannot be reached")
        if checkpoint is None and run.source is None and has_origin:
            raise ConfigError(f"--replay={step}: the run started from other weights; give its --from too")
        if checkpoint is None and incident:
            check_processes(incident, ranks.world_size, config.train.sequence_parallel)
        with exit_on_mistake(ranks.barrier):
            initial = open_initial(run, checkpoint)
            initial = agree_on_initial(run, initial, checkpoint, watchdog.hosts)
            engine = build_engine(config, ranks, None if initial is None else initial.fill)
            if checkpoint is not None:
                load(engine, checkpoint, config, ranks)
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


def find_sources(run: RunSetup, step: int) -> tuple[Record | None, list[Checkpoint], bool]:
    """Return the record of a step, the checkpoints before it, newest first, and whether the run began with --from.

    ConfigError means that the run has no such step, or was trained on other data or with another configuration.
    """
    if step > run.config.train.last_step:
        raise ConfigError(f"--replay={step}: the run has {run.config.train.last_step} steps")
    record = find_record(run.folder, step)
    first = record.incident.origin.step if record and record.incident else 0
    checkpoints, _ = list_checkpoints(run.folder, trusted=run.trusted)
    candidates = [checkpoint for checkpoint in checkpoints if first <= checkpoint.manifest.step < step]
    for newest in checkpoints[:1]:
        check_matches(newest, run.config, run.data.identity)
    path = run.folder / file_names.DATA
    if not checkpoints and os.path.lexists(path):
        recorded = ModelData.from_json(load_json_object(path, follow_links=False), run.config.model, f"{path}: ")
        if differences := recorded.differences(run.data.identity):
            rule = f"is not what the run was trained on: {'; '.join(differences.values())}; name the run's data"
            raise ConfigError.at("data.path", run.config.data.path, rule)
    for newest in candidates[:1]:
        if not newest.is_repeated_by(run.config, run.ranks.world_size):
            raise ConfigError(
                f"--replay={step}: {newest.layout}; a replay needs the same layout: start as it was saved"
            )
    return record, candidates, any(checkpoint.manifest.origin for checkpoint in checkpoints)


def find_record(run: Path, step: int) -> Record | None:
    """Find the record of a step: the newest incident, or the line of metrics.jsonl; None if there is neither."""
    for path, incident in read_incidents(run).items():
        if incident.step == step:
            return Record(str(path), {name: getattr(incident, name) for name in _COMPARED}, incident)
    line = metrics_file.find_steps(run).get(step)
    if line is None:
        return None
    return Record(str(run / file_names.METRICS), {name: line[name] for name in _COMPARED}, None)


def check_processes(incident: Incident, world_size: int, sequence_parallel: int | None) -> None:
    """Raise ConfigError unless a replay without a checkpoint, which has its own check, has as many processes."""
    if (incident.world_size, incident.sequence_parallel) != (world_size, sequence_parallel):
        shared = f", {incident.sequence_parallel} to a context" if incident.sequence_parallel else ""
        rule = f"the step was taken by {counting.processes(incident.world_size)}{shared}; a replay needs as many"
        raise ConfigError(f"--replay={incident.step}: {rule}")


def way_batches(run: RunSetup, checkpoint: Checkpoint | None, record: Record | None, device: torch.device) -> Batches:
    """Yield the batches that a run took from a checkpoint to the recorded step.

    Rewinds between them are followed. They change only the batches, as each rewind loads weights to which the steps
    before it lead. If the run may have continued with several batches, the checksum of the next line of metrics.jsonl
    decides.
    """

    def take(state: StreamState | None) -> Batches:
        return run.data.batches(state, number, device, run.stop)

    number = checkpoint.manifest.step if checkpoint else 0
    state = checkpoint.stream if checkpoint else None
    if record and record.incident:
        origin = record.incident.origin
        yield from take(StreamState.from_json(origin.stream) if origin.step == number else state)
        return
    rewinds: dict[int, list[StreamState]] = {}  # by step, where the run may have gone on after rewinds to it
    for incident in read_incidents(run.folder).values():
        if incident.rewound_to is not None:
            rewinds.setdefault(incident.rewound_to, []).append(StreamState.from_json(incident.stream_after))
    sums = {step: line["sample_ids_crc32"] for step, line in metrics_file.find_steps(run.folder).items()}
    while True:
        states, later = [state, *rewinds.get(number, [])], [step for step in sums if step > number]
        state = states[0]
        for candidate in states if len(states) > 1 and later else ():
            batches = take(candidate)
            *_, last = itertools.islice(batches, min(later) - number)
            batches.close()
            if last.sample_ids_crc32 == sums[min(later)]:
                state = candidate
                break
        batches = take(state)
        for batch in batches:
            state, number = batch.part.state, number + 1
            yield batch
            if number in rewinds:
                break
        else:
            return
        batches.close()


def _repeat(run: RunSetup, engine: DeepSpeedEngine, step: int, batches: Batches, guards: Guards) -> dict[str, Any]:
    """Take the steps up to ``step``; report that one, or an earlier one that a guard refused.

    Contexts are sorted by loss per byte, highest first; a loss that is not finite counts as the highest.
    """
    first, stages, before = engine.global_steps, run.config.stages(), None
    engine.train()
    for number in range(first + 1, step + 1):
        batch = next(batches)
        context_nats: list[float] = []
        if (stage := Stage.after(number - 1, stages)) is not before:
            loop.enter_stage(stage, engine, guards)
            before = stage
        line = loop.train_step(engine, batch, stage, run.ranks, guards, context_nats, run.data.unit)
        if number == step or (guards.verdict and guards.verdict.outcome != "skip"):
            break
    bits = [name for name in line if name.startswith("bits_per_")]
    names = ("step", "loss_nats", *bits, "grad_norm", "loss_scale", "tokens", "sample_ids_crc32", "guard")
    report = {name: line.get(name) for name in names} | {"from_step": first}
    if "rank_nats" in line:
        report["loss_nats"] = as_number(sum(map(float, line["rank_nats"])) / line["tokens"])

    def loss(context: dict[str, Any]) -> float:
        content = context["bytes"] if batch.part.labels is None else 1  # of which the nats are
        nats_per_byte = float(context["nats"]) / (content or math.nan)  # a context may have only separators
        return nats_per_byte if math.isfinite(nats_per_byte) else math.inf

    ranks = run.ranks
    first_of_group = ranks.rank - ranks.sequence_rank
    sections = ranks.gather_objects(context_nats)[first_of_group : first_of_group + ranks.sequence_parallel]
    totals = map(sum, zip(*sections, strict=True))  # of each context
    rows = zip(batch.part.sample_ids.tolist(), totals, batch.part.content.tolist(), strict=True)
    contexts = [{"sample_id": number, "nats": as_number(nats), "bytes": length} for number, nats, length in rows]
    gathered = itertools.chain(*ranks.gather_objects(contexts)[:: ranks.sequence_parallel])
    return report | {"contexts": sorted(gathered, key=loss, reverse=True)}


def compare(report: dict[str, Any], record: Record | None) -> dict[str, Any]:
    """Add the record of a step to its report, and whether both agree; None without a record."""
    if record is None:
        return report | {"reproduced": None, "recorded": None}
    same = all(report[name] == record.figures[name] for name in _COMPARED)
    return report | {"reproduced": same, "recorded": {"source": record.source} | record.figures}


def outcome_line(report: dict[str, Any]) -> str:
    """Describe the outcome of a replay in one line."""
    step, recorded = report["step"], report["recorded"]
    if report["guard"] and not report["reproduced"]:
        return f"step {step}: a guard refuses it, which is not what was recorded: {report['guard']}"
    if recorded is None:
        return f"step {step}: it was not recorded (train.log_every), so there is nothing to compare it with"
    if report["reproduced"]:
        return f"step {step}: the same as in {recorded['source']}"
    names = [name for name in _COMPARED if report[name] != recorded[name]]
    different = ", ".join(f"{name} {report[name]} instead of {recorded[name]}" for name in names)
    return f"step {step}: another outcome than in {recorded['source']}: {different}"
