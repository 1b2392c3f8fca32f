"""`longstride evaluate RUN|MODEL`: score a checkpoint or an export on a split, in bits per byte, also by position.

The loss by position shows whether a model uses a long context (Child et al. 2019, section 7.2 and table 3).

Letters: B contexts at once, N positions of a context.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn import functional as F

from longstride.data_pipelines.order import EvaluationBatch
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import SavedState, master_weights, open_checkpoint
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.data import RunSetup, TrainingData, global_batches
from longstride.launcher.engine import LaneStates, compile_kernels, prepare_accelerator
from longstride.launcher.evaluation.exact_sums import ExactSums
from longstride.launcher.evaluation.positions import bin_numbers, check_positions, position_edges, write_positions
from longstride.launcher.identity import compare_data, open_data
from longstride.launcher.models import DTYPES, TRAINED, Exported, ModelData, is_export
from longstride.launcher.output import counting, exit_on_mistake, metrics_file, say
from longstride.launcher.ranks import Ranks, adopt_launcher_variables, process_group
from longstride.launcher.stops import StopFlag
from longstride.sparse_model import Division, ModelConfig, SparseTransformer

Result = TypeVar("Result")  # of a batch
_MOST_THREADS = 8
_MOST_ROWS = 1 << 19  # positions computed at a time, since each thread holds the activations of its batch


def run(arguments: argparse.Namespace) -> int:
    """Run the verb, alone or as one rank under a launcher; print one JSON line on rank 0."""
    if arguments.batch is not None and not 1 <= arguments.batch <= TrainConfig.MOST_CONTEXTS:
        raise ConfigError(
            f"--batch={arguments.batch}: must be from 1 to {TrainConfig.MOST_CONTEXTS:,} contexts; such as 4"
        )
    adopt_launcher_variables(os.environ)
    ranks = replace(Ranks.from_environment(os.environ), sequence_parallel=arguments.sequence_parallel)
    if arguments.positions is not None:
        check_positions(arguments.positions)
    subject = open_subject(arguments, ranks)
    config, data = subject.config, subject.data
    if arguments.positions is not None and config.model.objective.num_classes:
        rule = f"draws the loss of each position, but objective {config.model.objective.type} has one of each context"
        raise ConfigError(f"--positions={arguments.positions}: {rule}; leave it out")
    prepare_accelerator(config)
    batch_size = arguments.batch or config.train.micro_batch
    split = arguments.split or config.data.validation_split
    if data.unusual_setting and ranks.is_first:
        say(f"notice: {data.unusual_setting}")
    if arguments.split is None and not data.has_split(split):
        rule = f"the data lacks the run's split {split!r}; name another split, such as --split "
        raise ConfigError(f"--split: {rule}{config.data.train_split}, or name other data with --data")
    contexts = partial(data.evaluation, split=split, batch_size=batch_size, min_context=arguments.min_context)
    contexts()  # raises errors before there is a process group
    start = time.perf_counter()
    edges = None if arguments.positions is None else position_edges(config.model.context)
    precision = arguments.precision or subject.precision
    exchange = config.train.sequence_exchange
    division = Division(ranks.sequence_rank, ranks.sequence_parallel, None, exchange)
    compile_kernels(config.model, batch_size, precision, ranks.device, apart=config.data.apart, division=division)
    with process_group(ranks, config.train.timeout_seconds, subject.stacks) as watchdog:
        step, precision, weights = subject.load()
        precision = arguments.precision or precision
        model = model_of(config.model, weights, precision, ranks.device)
        model.divide(ranks.division(exchange))
        threads = 0
        # Each thread computes a batch. Ranks that share contexts exchange rows, so they compute one batch at a time.
        if ranks.device.type == "cpu" and ranks.sequence_parallel == 1:
            at_once = _MOST_ROWS // (batch_size * config.model.context)
            threads = max(1, min(torch.get_num_threads(), _MOST_THREADS, at_once))
        watchdog.at("evaluation")
        with exit_on_mistake(ranks.barrier):
            total = data.split_tokens(split)
            counter = counting.WorkCounter(f"evaluating {split}", total, "tokens", shown=ranks.is_first)
            sums = score(
                model,
                contexts,
                batch_size,
                ranks,
                ranks.device,
                edges=edges,
                threads=threads,
                scored_content=lambda count: counter.add(count * ranks.world_size),
            )
            counter.close()
    line = evaluation_line(step, split, sums, start, data.unit)
    line |= {"min_context": arguments.min_context, "weights": subject.weights}
    line |= {"other_data": subject.differences} if subject.differences else {}
    if ranks.is_first:
        print(json.dumps(line))
        text = metrics_file.bits_text(line)
        text = text.replace("per byte", "per dimension (and per byte)") if "bits_per_dimension" in line else text
        print(f"{text} on {line['split']}", file=sys.stderr)
        if edges is not None:
            write_positions(arguments.positions, sums, edges, line, arguments.run)
            print(f"{arguments.positions}, {arguments.positions.with_suffix('.json')}: by position", file=sys.stderr)
    return 0


class Subject(NamedTuple):
    """A model to score, and the data to score it on."""

    config: RunConfig
    data: TrainingData
    differences: dict[str, str]  # between the data and those of training
    precision: str
    weights: str  # ``TRAINED`` or ``AVERAGE``
    stacks: Path | None  # the folder for the stacks of ranks that hang
    load: Callable[[], tuple[int, str, Mapping[str, Tensor]]]  # in a process group: step, precision, tensors


def model_of(
    config: ModelConfig, weights: Mapping[str, Tensor], precision: str, device: torch.device
) -> SparseTransformer:
    """Make a model in evaluation mode with these weights. Buffers keep their precision, as under DeepSpeed."""
    model = SparseTransformer(config)
    model.load_state_dict(weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[precision])
    return model.to(device).eval()


def open_subject(arguments: argparse.Namespace, ranks: Ranks) -> Subject:
    """Open the model and the data of options ``run``, ``data``, ``step``, ``weights`` and ``trust_checkpoint``.

    ConfigError or DataError if they do not work together.
    """
    return _open_export(arguments, ranks) if is_export(arguments.run) else _open_run(arguments, ranks)


def _open_run(arguments: argparse.Namespace, ranks: Ranks) -> Subject:
    """Open a run's checkpoint, and its data or that of ``--data``."""
    checkpoint = open_checkpoint(arguments.run, arguments.step, trusted=arguments.trust_checkpoint)
    if arguments.step is None and ranks.is_first:
        for refusal in checkpoint.newer_refusals():
            say(f"passed over: {refusal}")
    SavedState.check_size(checkpoint)
    check_sharing(checkpoint.config, ranks)

    def load() -> tuple[int, str, Mapping[str, Tensor]]:
        # A run in progress may save again while the ranks look.
        agreed = checkpoint.agreed(ranks)
        return agreed.manifest.step, agreed.manifest.precision, master_weights(agreed, arguments.weights)

    data, differences = open_data(checkpoint, arguments.data, ranks)
    precision, weights = checkpoint.manifest.precision, arguments.weights
    return Subject(checkpoint.config, data, differences, precision, weights, arguments.run, load)


def _open_export(arguments: argparse.Namespace, ranks: Ranks) -> Subject:
    """Open an exported model, and the data of ``--data``; ConfigError or DataError if they do not work together."""
    folder, location = arguments.run, arguments.data
    for option, value in (("--step", arguments.step), ("--weights", arguments.weights)):
        if value not in (None, TRAINED):
            raise ConfigError(f"{option}={value}: {folder} is an export, which has its own weights; leave it out")
    if location is None:
        rule = "is an exported model, which does not include data; give --data DIR, or score a file with"
        raise ConfigError(f"{folder}: {rule} `longstride sample {folder} --likelihood FILE`")
    exported = Exported(folder, trust_code=arguments.trust_checkpoint)
    trained = ModelData.of(exported.content, exported.config)
    train = {"output": str(folder), "steps": 1, "learning_rate": 1.0, "global_batch": 1, "micro_batch": 1}
    settings = {"path": location, "separator": trained.separator}
    content = {"model": exported.content["model"], "data": settings, "train": train, "deepspeed": {}}
    config = RunConfig.model_validate(content)
    check_sharing(config, ranks)
    data = TrainingData(config, ranks)
    differences, rule = compare_data(trained, data.identity, f"--data={location}", "model")
    if differences and ranks.is_first:
        say(f"notice: --data={location}: {rule}")
    precision = next(name for name, dtype in DTYPES.items() if dtype == exported.dtype)
    origin = exported.content.get("origin")
    origin = origin if isinstance(origin, dict) else {}
    step = origin["step"] if isinstance(origin.get("step"), int) else 0

    def load() -> tuple[int, str, Mapping[str, Tensor]]:
        tensors = {name: exported.tensor(name) for name in exported.names}
        return step, precision, tensors

    return Subject(config, data, differences, precision, str(origin.get("weights", TRAINED)), None, load)


def check_sharing(config: RunConfig, ranks: Ranks) -> None:
    """Raise ConfigError unless the started ranks can share contexts of the model as ``--sequence-parallel`` says."""
    shared, started = ranks.sequence_parallel, ranks.world_size
    option = f"--sequence-parallel={shared}"
    if shared < 1 or started % shared:
        good = min((n for n in range(1, started + 1) if started % n == 0), key=lambda n: abs(n - shared))
        many = f"{started} process{'es' if started > 1 else ''}"
        raise ConfigError(f"{option}: must divide the {many} that a launcher started; nearest {good}")
    if shared > 1:
        content = config.to_json()
        content["train"] |= {"sequence_parallel": shared, "compile": False}  # only training compiles blocks
        try:
            RunConfig.model_validate(content)
        except ConfigError as error:
            raise ConfigError(*(f"{option}: {problem}" for problem in error.problems)) from None


def evaluate_split(engine: DeepSpeedEngine, run: RunSetup, pieces: int = 1) -> dict[str, Any]:
    """Return the validation split's line for metrics.jsonl, over the configured number of contexts.

    Each is cut into ``pieces`` contexts. What mixers measure is of the first rank's first batch, which is the same for
    any number of ranks: a list by layer, null for those that measure nothing.
    """
    start, train, mixers = time.perf_counter(), run.config.train, engine.module.mixers
    engine.eval()
    for mixer in mixers:
        mixer.measures = {} if run.ranks.is_first else None
    contexts = partial(run.data.evaluation, limit=train.evaluate_contexts)
    sums = score(engine, contexts, train.micro_batch, run.ranks, engine.device, stop=run.stop, pieces=pieces)
    engine.train()
    measures = [mixer.measures or {} for mixer in mixers]
    for mixer in mixers:
        mixer.measures = None
    line = evaluation_line(engine.global_steps, run.config.data.validation_split, sums, start, run.data.unit)
    return line | {name: [each.get(name) for each in measures] for name in dict.fromkeys(chain(*measures))}


def evaluation_line(step: int, split: str, sums: ExactSums, start: float, unit: str) -> dict[str, Any]:
    """Return an evaluation as it is written and printed; ``unit`` names what a loss counts."""
    loss = metrics_file.loss_fields(sums.mean(), sums.count, sums.content, unit)
    accuracy = {"accuracy": sums.hits / sums.count} if unit == metrics_file.LABEL else {}
    return {"step": step, "split": split, **loss, **accuracy, "seconds": time.perf_counter() - start}


def score(
    model: torch.nn.Module,
    contexts: Callable[[], Iterator[EvaluationBatch]],
    batch_size: int,
    ranks: Ranks,
    device: torch.device,
    *,
    edges: np.ndarray | None = None,
    threads: int = 0,
    stop: StopFlag | None = None,
    pieces: int = 1,
    scored_content: Callable[[int], None] = lambda _: None,
) -> ExactSums:
    """Sum the nats of all ranks' scored bytes or labels without rounding, or of bytes by the position bins ``edges``.

    Batches hold the same rows for any number of ranks, and the sum does not depend on order, so its bits do not depend
    on the number of ranks. All ranks must call, with equally many batches.

    Args:
        threads: batches computed at a time, each by one thread, since the bits of a matrix product may depend on how
            many threads share it. 0: one after another, by all threads of torch.
        stop: if any rank was asked to stop, every rank raises StopRequestedError.
        pieces: contexts into which each context is cut; not with ``edges``.
        scored_content: called for each batch with the number of tokens that this rank has scored, without separators.
    """
    sums = ExactSums() if edges is None else ExactSums(len(edges) - 1, squares=True)
    network = model.module if isinstance(model, DeepSpeedEngine) else model
    assert isinstance(network, SparseTransformer)
    lanes = LaneStates(network, batch_size, device) if network.carried else None
    threads = threads if lanes is None else min(threads, 1)  # each batch continues the one before it
    bins = None if edges is None else bin_numbers(edges)

    def cut(rows: Tensor) -> Tensor:
        return rows.reshape(pieces * len(rows), -1)

    def nats_of(batch: EvaluationBatch) -> tuple[Tensor, np.ndarray | None]:  # and which predictions are right
        with torch.no_grad():  # applies to one thread only
            names = ("begins", "inputs", "predicted")
            extra: dict[str, Any] = {
                name: cut(rows).to(device) for name in names if (rows := getattr(batch, name)) is not None
            }
            real = cut(torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None])
            predicts_all = batch.predicted is None and batch.labels is None
            if not predicts_all and not bool(real.all()):  # or rows would read the padding behind them
                extra["real"] = real.to(device)
            tokens, labels = cut(batch.tokens).to(device), batch.labels
            if lanes is not None:
                output = model(
                    tokens, return_nats=True, return_extras=True, carried=lanes.take(batch, slice(None)), **extra
                )
                lanes.put(output.carried)
                lanes.advance(batch)
                return output.rows.float().cpu(), None
            if labels is None:
                return model(tokens, return_nats=True, **extra).float().cpu(), None  # (B, N)
            logits = model(tokens, **extra).float().cpu()  # (B, 1, K)
            nats = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=-1)
            return nats, (logits.argmax(-1) == labels).numpy()

    parts = (batch.part for batch in global_batches(contexts, batch_size, ranks, device, stop))
    for batch, (nats, hits) in _compute_in_order(nats_of, parts, threads):
        first = ranks.sequence_rank * nats.shape[1]
        section = slice(first, first + nats.shape[1])  # this rank's positions
        scored = cut(batch.scored)[:, section]  # (B, n)
        content = cut(batch.content)[:, section][scored]  # (n,)
        scored_content(int(content.sum() if hits is None else batch.lengths.sum()))
        bins_of_scored = None if bins is None else bins[section][scored.nonzero()[:, 1].numpy()]
        hits = None if hits is None else hits[scored.numpy()]
        sums.add(nats[scored].numpy(), bins_of_scored, content.numpy(), hits)
    sums.gather(ranks, device)
    return sums


def _compute_in_order(
    work: Callable[[EvaluationBatch], Result], batches: Iterator[EvaluationBatch], threads: int
) -> Iterator[tuple[EvaluationBatch, Result]]:
    """Yield each batch with its result, in order; ``threads`` batches are computed at a time."""
    if not threads:
        yield from ((batch, work(batch)) for batch in batches)
        return
    before = torch.get_num_threads()
    pending: deque[tuple[EvaluationBatch, Future[Result]]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for batch in batches:
                pending.append((batch, pool.submit(work, batch)))
                if len(pending) > threads:
                    first, computed = pending.popleft()
                    yield first, computed.result()
            yield from ((batch, computed.result()) for batch, computed in pending)
    finally:
        torch.set_num_threads(before)
