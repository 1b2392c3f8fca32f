"""The costs of a run: parameters and operations counted from its model, and the memory of a process.

Letters: N positions, C width, D head width, P parameters, W processes.

**Operations**: a multiplication and an addition count as two. Only matrix products are counted. A linear layer takes 2
per weight and position, and twice that in the backward pass. Attention takes 2·D per pair of query and key for the
scores, and as much for the sum of values. Its backward pass repeats the scores and has four more products (5 for 2, as
FlashAttention counts them). The backward pass also recomputes what the model does not store: the logits, and for long
contexts the first half of feed-forward.

**Memory**: formulas for the optimiser's states; activations are rehearsed (``rehearsal``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longstride.launcher.config import RunConfig
from longstride.launcher.models import DTYPES
from longstride.launcher.planning.rehearsal import Activations
from longstride.sparse_model import BlockConfig, Division, Experts, ModelConfig, SparseTransformer, Table, Work

STAGES = (0, 1, 2, 3)
MUON_BATCH = 1 << 24  # weights of the matrices that Muon computes at once
_BUCKET = 500_000_000  # DeepSpeed's default reduce_bucket_size, and half of its stage3_max_live_parameters


def parameter_parts(config: ModelConfig) -> dict[str, int]:
    """Count parameters by part of the model, without allocating it."""
    model, kinds = _one_of_each(config)
    parts = model.parameter_counts()
    for block, count in kinds.values():
        parts.update({part: (count - 1) * numel for part, numel in block.parameter_counts().items()})
    return dict(parts)


def engine_parameters(config: ModelConfig) -> int:
    """Count the parameters that DeepSpeed's optimiser updates in one process: all but tables."""
    return sum(parameter_parts(config).values()) - sum(table.rows.numel() for table in _tables(config))


def _tables(config: ModelConfig) -> list[Table]:
    """Return the model's tables, without memory; layers of a kind have the same object."""
    model, kinds = _one_of_each(config)
    modules = [(model.embedding, 1), *kinds.values()]
    return [part for module, count in modules for part in count * list(module.modules()) if isinstance(part, Table)]


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The experts that processes divide (`train.expert_parallel`), and what a process sends for a micro-batch.

    Rows and bytes are those of even use, without those that stay; all 0 if no experts are divided.
    """

    processes: int = 0  # P, that divide them
    numel: int = 0  # weights of all experts
    matrices: int = 0  # of these in matrices
    layers: int = 0  # with experts
    rows: int = 0  # that a process computes in a layer
    most_rows: int = 0  # if rows choose its experts as often as their capacity allows
    row_bytes: int = 0
    forward_calls: int = 0
    forward_bytes: int = 0
    backward_calls: int = 0  # without the recomputation, which makes those of the forward pass again
    backward_bytes: int = 0


def expert_step(config: RunConfig) -> ExpertStep:
    """Count the experts that processes divide, and their traffic."""
    size, model, shared = config.train.expert_parallel, config.model, config.train.sequence_parallel or 1
    if size is None:
        return ExpertStep()
    _, kinds = _one_of_each(model)
    totals = Counter(numel=0, matrices=0, layers=0, forward_bytes=0, backward_bytes=0)
    rows = most_rows = 0
    positions, row_bytes = model.objective.num_rows(model.context), model.width * DTYPES[config.precision].itemsize
    contexts = -(-config.train.micro_batch * size // shared)  # of all P processes
    for block, count in kinds.values():
        for part in block.modules():
            if not isinstance(part, Experts):
                continue
            sizes = [x.numel() for name in part.by_expert if (x := getattr(part, name)) is not None]
            chosen = config.train.micro_batch * positions // shared * part.config.top  # by the rows of a process
            rows, room = max(rows, chosen), size * chosen
            if part.config.capacity is not None:
                each = math.ceil(part.config.capacity * positions * part.config.top / (part.count + part.config.zero))
                room = min(room, contexts * part.count // size * each)
            most_rows = max(most_rows, room)
            sent = 2 * chosen * row_bytes * (size - 1) // size
            totals.update(
                numel=count * sum(sizes),
                matrices=count * (part.expand.numel() + part.contract.numel()),
                layers=count,
                forward_bytes=count * (sent + 8 * part.count * (size - 1) // size),  # with the counts of rows
                backward_bytes=count * sent,
            )
    calls = {"forward_calls": 3 * totals["layers"], "backward_calls": 2 * totals["layers"]}
    return ExpertStep(processes=size, rows=rows, most_rows=most_rows, row_bytes=row_bytes, **calls, **totals)


def _one_of_each(config: ModelConfig) -> tuple[SparseTransformer, dict[BlockConfig, tuple[Any, int]]]:
    """Build the model with one block of each kind, without memory; return it with each kind's block and number."""
    model, counts = SparseTransformer.of_each_kind(config)
    return model, {kind: (block, count) for (kind, count), block in zip(counts.items(), model.blocks, strict=True)}


@dataclass(frozen=True, slots=True)
class Exchange:
    """The traffic of a layer under sequence parallelism.

    Bytes are sent in the forward pass of a micro-batch, per process in the mean; the backward pass sends as many.
    """

    taken: str  # heads, keys, or columns: then rows are divided by columns, and attention exchanges nothing
    heads_bytes: int | None  # None: the processes do not divide the heads
    keys_bytes: int | None  # None: no pattern tells which keys are read
    anew: int  # how often the rows are divided again before the layer
    anew_bytes: int  # sent for that
    copies: int  # of each head of keys and values, if heads are exchanged and are fewer than the processes


def exchanges(config: RunConfig) -> list[Exchange | None]:
    """Count the traffic of each block that has a mixer, as the model's parts do; None if the mixer is no attention."""
    model, train = config.model, config.train
    size, element = train.sequence_parallel or 1, train.micro_batch * DTYPES[config.precision].itemsize
    requested: tuple[Any, ...] = ("heads", "keys", "heads" if config.data.apart else train.sequence_exchange)
    network = SparseTransformer.empty(model)
    tokens = torch.empty(1, model.context, dtype=torch.uint8, device="meta")
    network.divide(Division(0, size, exchange=requested[2]))
    layers: list[Exchange | None] = []
    before = 0
    for block, context in zip(network.blocks, network.block_contexts(tokens), strict=True):
        columns = context.columns
        anew = 0 if columns == before else bool(before) + bool(columns)
        mixer, before = block.attention, columns
        if mixer is None:
            continue
        ways = []
        for exchange in requested:
            if (traffic := mixer.traffic(Division(0, size, exchange=exchange), model.context)) is not None:
                ways.append(traffic)
        if not ways:
            layers.append(None)
            continue
        sent = [element * sum(way.sent) // size for way in ways]
        layers.append(
            Exchange(
                taken := "columns" if columns else ways[2].exchange,
                None if model.heads % size else sent[0],
                sent[1] if ways[1].exchange == "keys" and not config.data.apart else None,
                anew,
                anew * element * model.width * model.context * (size - 1) // size**2,
                math.lcm(mixer.key_value_heads, size) // mixer.key_value_heads if taken == "heads" else 1,
            )
        )
    return layers


def buffer_numbers(config: ModelConfig) -> int:
    """Count the elements of all buffers, which are not trained and which every process holds in fp32."""
    model, kinds = _one_of_each(config)
    modules = [(model, 1), *((block, count - 1) for block, count in kinds.values())]
    return sum(count * buffer.numel() for module, count in modules for buffer in module.buffers())


def dense_pairs(config: ModelConfig) -> int:
    """Count the pairs of a layer with dense attention over all heads, causal if the objective is."""
    context = config.context
    return config.heads * (context * (context + 1) // 2 if config.objective.causal else context**2)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The operations of a model over one context."""

    layers: tuple[Work, ...]  # of each block that has a mixer
    blocks: Work  # of all blocks, which activation checkpointing recomputes
    total: Work  # with the logits


def work(config: ModelConfig, micro_batch: int = 1) -> ModelWork:
    """Count the operations over one context of a micro-batch, as the model's parts count them."""
    model, kinds = _one_of_each(config)
    works = {kind: model.block_work(block, micro_batch) for kind, (block, _) in kinds.items()}
    layers = tuple(works[block] for block in config.blocks() if block.mixer is not None)
    blocks = sum((works[block] for block in config.blocks()), Work())
    logits = model.logits.work(config.objective.num_predicted(config.context), micro_batch)
    return ModelWork(layers, blocks, blocks + logits)


def step_flops(work: ModelWork, config: RunConfig) -> dict[str, int]:
    """Count the operations of one optimiser step, over all processes."""
    contexts = config.train.global_batch
    recomputed = config.train.activation_checkpointing or config.model.reversible
    return {
        "forward_flops": contexts * work.total.forward,
        "backward_flops": contexts * work.total.backward,
        "recompute_flops": contexts * work.blocks.forward if recomputed else 0,
    }


@dataclass(frozen=True, slots=True)
class States:
    """The bytes of a process under one ZeRO stage, without activations."""

    weights: int  # with buffers of the model
    gradients: int
    masters: int  # fp32 copies of the weights
    moments: int  # of the optimiser, in fp32
    average: int  # the fp32 moving average of the weights
    buffers: int  # in which DeepSpeed gathers weights and gradients
    at_step: int  # fp32 gradients and Muon's gathered matrices, which only exist in the optimiser's step
    tables: int = 0  # rows, their optimiser's states, the gradients of a step's positions, and fetched rows
    tables_at_step: int = 0  # exchanged rows of the tables, and sums of their gradients
    experts: int = 0  # that ranks divide: weights, fp32 gradients and masters, moments, average
    carried: int = 0  # by the process's lanes, from the last batch and to the next

    def resident(self) -> int:
        """Return all bytes but those that only exist in the optimiser's step."""
        parameters = self.weights + self.gradients + self.masters + self.moments + self.average
        return parameters + self.buffers + self.tables + self.experts + self.carried

    def peak(self, activations: Activations) -> int:
        """Return the peak of a step: in the backward pass, or after it in the optimiser."""
        return self.resident() + max(activations.peak, self.at_step, self.tables_at_step)


def states(num_parameters: int, config: RunConfig, processes: int, stage: int, device: str = "cuda") -> States:
    """Return the memory of weights and optimiser on each of W processes (Rajbhandari et al. 2020, section 3.1).

    Stage 1 shards masters, moments and average, stage 2 also gradients, stage 3 also weights and tables. States that
    are offloaded to the CPU are included.

    Args:
        num_parameters: without tables.
        device: cuda, or cpu, where memory only counts once it is written.
    """
    half = config.precision != "fp32"
    copied = half or stage in (1, 2)  # these stages copy even fp32 weights, and gradients for the step
    gradient_dtype = (stage and config.deepspeed.get("data_types", {}).get("grad_accum_dtype")) or config.precision
    gradient_bytes = 4 if gradient_dtype == "fp32" else 2

    def share(numel: int, from_stage: int) -> int:
        return -(-numel // processes) if stage >= from_stage else numel

    tables, experts = table_step(config), expert_step(config)
    num_parameters -= experts.numel
    matrix_bytes = expert_bytes = 0
    is_muon = config.train.optimizer is not None and config.train.optimizer.type == "muon"
    if experts.numel:
        moments = 2 * experts.numel - is_muon * experts.matrices
        weights = (2 if half else 0) + 4 + 4 + (4 if config.train.ema_decay is not None else 0)
        expert_bytes = (weights * experts.numel + 4 * moments) // experts.processes
    if is_muon:
        matrices = share(matrix_weights(config), 1)
        # Sent and received, or computed in batches; in addition the received and the computed matrices.
        matrix_bytes = (2 if half else 4) * (2 * matrices + max(2 * matrices, 4 * min(matrices, MUON_BATCH)))
    return States(
        weights=(2 if half else 4) * share(num_parameters, 3) + 4 * buffer_numbers(config.model),
        gradients=gradient_bytes * share(num_parameters, 2),
        masters=4 * share(num_parameters, 1) if copied else 0,
        moments=4 * share(moment_elements(config, num_parameters), 1),
        average=4 * share(num_parameters, 1) if config.train.ema_decay is not None else 0,
        buffers=_buffer_bytes(num_parameters, config, stage, gradient_bytes, device),
        at_step=(4 * share(num_parameters, 1) if copied else 0) + matrix_bytes,
        tables=tables.row_bytes * share(tables.rows, 3)
        + tables.sent_bytes // processes
        + (tables.sum_bytes * tables.fetched_rows if stage == 3 and processes > 1 else 0),
        tables_at_step=tables.sent_bytes + tables.sum_bytes * share(tables.touched_rows, 3),
        experts=expert_bytes,
        carried=2 * carried_bytes(config) // processes,
    )


def carried_bytes(config: RunConfig) -> int:
    """Count the bytes that all lanes hand to their next contexts."""
    if not config.model.carries:
        return 0
    model, counts = SparseTransformer.of_each_kind(config.model)
    width = 4 if config.precision == "fp32" else 2
    of_lane = 4 * model.embedding.reach + sum(
        count * math.prod(carried.shape) * (carried.dtype.itemsize if carried.dtype else width)
        for block, count in zip(model.blocks, counts.values(), strict=True)
        for carried in (block.mixer.carried if block.mixer is not None else ())
    )
    return config.train.global_batch * of_lane


@dataclass(frozen=True, slots=True)
class TableStep:
    """The memory of all tables. The figures of a step are upper bounds: positions may share rows."""

    rows: int
    row_bytes: int  # a row with its second moment, its step counter, and the moving average
    touched_rows: int  # in a step of all processes
    sum_bytes: int  # for the gradient of a touched row
    sent_bytes: int  # by all processes to every other: gradients of their positions, row numbers and weights
    fetched_rows: int  # that a process stores for a backward pass under ZeRO 3: those with weights


def table_step(config: RunConfig) -> TableStep:
    """Return the memory of tables in an optimiser's step; all 0 if the model has none."""
    model, train, tables = config.model, config.train, _tables(config.model)
    if not tables:
        return TableStep(0, 0, 0, 0, 0, 0)
    positions, weights = train.global_batch * model.context, 2 if train.ema_decay is not None else 1
    local = train.micro_batch * model.context // (train.sequence_parallel or 1)
    fetched = [min(local * table.reads, len(table.rows)) for table in tables if table.weighted]
    is_recomputed = train.activation_checkpointing or model.reversible  # one layer at a time
    row_numbers = (4 * table.reads * (2 if table.weighted else 1) for table in tables)
    return TableStep(
        rows=sum(len(table.rows) for table in tables),
        row_bytes=4 * (weights * model.width + 3),
        touched_rows=sum(min(positions * table.reads, len(table.rows)) for table in tables),
        sum_bytes=4 * model.width,
        sent_bytes=positions * sum(DTYPES[config.precision].itemsize * model.width + each for each in row_numbers),
        fetched_rows=max(fetched, default=0) if is_recomputed else sum(fetched),
    )


def moment_elements(config: RunConfig, num_parameters: int) -> int:
    """Count the elements of the optimiser's moments.

    Adam has two per weight, Muon one per weight of a matrix. Adafactor has one per row and one per column of a matrix,
    and one per weight of a vector.
    """
    kind = config.train.optimizer and config.train.optimizer.type
    if kind == "muon":
        return 2 * num_parameters - matrix_weights(config)
    if kind == "adafactor":
        return _summed_over_parameters(
            config.model,
            lambda _, shape: (
                shape.numel() // shape[-1] + shape.numel() // shape[-2] if len(shape) > 1 else shape.numel()
            ),
        )
    return 2 * num_parameters


def matrix_weights(config: RunConfig) -> int:
    """Count the weights of the matrices in the residual blocks, which Muon updates; without experts held elsewhere."""
    matrices = _summed_over_parameters(config.model, lambda part, shape: shape.numel() if part == "matrices" else 0)
    return matrices - expert_step(config).matrices


def _summed_over_parameters(config: ModelConfig, measure: Callable[[str, torch.Size], int]) -> int:
    """Sum a measure of part and shape over all parameters but tables."""
    model, kinds = _one_of_each(config)
    roles = model.parameter_roles()
    times = [count for _, count in kinds.values()]
    total = 0
    for name, parameter in model.named_parameters():
        if (part := roles[name].part) != "tables":
            block = re.match(r"blocks\.(\d+)\.", name)
            total += (times[int(block[1])] if block else 1) * measure(part, parameter.shape)
    return total


def _buffer_bytes(num_parameters: int, config: RunConfig, stage: int, gradient_bytes: int, device: str) -> int:
    """Return the bytes of the buckets in which stages 1 to 3 reduce gradients, and of weights that stage 3 gathers."""
    if stage == 0:
        return 0
    zero, weight_bytes = config.deepspeed.get("zero_optimization", {}), 4 if config.precision == "fp32" else 2
    bucket = 0
    if zero.get("contiguous_gradients", True):
        # Stage 2 reduces in the precision of the weights, whatever it accumulates in.
        element = min(gradient_bytes, weight_bytes) if stage == 2 else gradient_bytes
        bucket = element * int(zero.get("reduce_bucket_size", _BUCKET))
        bucket *= 2 if zero.get("overlap_comm") and stage < 3 else 1
        if device == "cpu":  # memory that is not written does not count
            bucket = min(bucket, element * num_parameters)
    if stage < 3:
        return bucket
    return bucket + weight_bytes * min(num_parameters, int(zero.get("stage3_max_live_parameters", 2 * _BUCKET)))
