"""What one optimiser step of a run communicates under a ZeRO stage in DeepSpeed 0.19.8.

Letters: W ranks, P parameters, m micro-batches a rank and step, e bytes of an element.

Every rule is taken from DeepSpeed's source (files under runtime/), and compared with counted collectives by
tests/benchmarks/scaling/test_communication.py:

- Gradients are sent in ``communication_data_type``, by default the precision of the weights: e is 2 in fp16 and bf16
  even if they are accumulated in fp32 (engine.py, communication_data_type).
- Stages 0 and 1 reduce them once a step, at the last micro-batch (engine.py, allreduce_gradients). Stages 2 and 3 keep
  no whole gradients to accumulate, and reduce them in every micro-batch.
- Stages 0 to 2 all_reduce P elements. Under stages 1 and 2 a rank only needs its share, but
  ``use_multi_rank_bucket_allreduce`` is on (zero/stage_1_and_2.py, average_tensor). Without it they reduce to the owner
  of each slice, which sends half as much, in about W collectives a bucket. Buckets do not change the bytes.
- bf16 under stage 1 with fp32 sums uses a different optimiser (bf16_optimizer.py). It all_reduces its flat groups,
  padded to a multiple of 2·W elements.
- Stages 1 and 2 then all_gather the updated weights, one flat group of the optimiser at a time, padded to 2·W elements.
- Stage 3 all_gathers weights when modules need them (parameter_gathers.py), each parameter padded to a multiple of W,
  and reduce_scatters gradients, padded alike. After the optimiser's step it all_gathers its persistent parameters, one
  collective each (zero/stage3.py, _post_step).
- Norms and overflow flags are all_reduces of 1 to 8 bytes.

Longstride's own: before a step every rank reports that it has its batch (launcher/data/run_data.py, together). After it
the losses are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.scaling.collectives import OURS, Collective
from benchmarks.scaling.parameter_gathers import Limits, Trace, gathers, persistent, trace
from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig
from longstride.launcher.config.deepspeed_keys import precision
from longstride.launcher.engine.optimizer import parameter_groups
from longstride.launcher.planning.costs import STAGES
from longstride.sparse_model import ModelConfig, SparseTransformer

BATCH_VALUES = 5  # int64 of a rank in the collective before a step, besides the numbers of its contexts
LOSS_VALUES = 1  # int64 of a rank in the collective after it
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_ALIGNMENT = 2  # elements: nccl_start_alignment_factor
_BUCKET = 500_000_000  # elements: DeepSpeed's default
# Settings of zero_optimization that change what is communicated and are not modelled.
_NOT_MODELLED = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "round_robin_gradients": False,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "stage3_module_granularity_threshold": 0,
    "mics_shard_size": -1,
    "zenflow": None,
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """The model's parameters, and the optimiser's two groups of them."""

    numel: dict[str, int]
    groups: tuple[tuple[str, ...], ...]

    @property
    def total(self) -> int:
        """All elements."""
        return sum(self.numel.values())


def parameters_of(model: ModelConfig) -> Parameters:
    """Return every parameter by name, without allocating it."""
    with FakeTensorMode():
        network = SparseTransformer(model)
    named = dict(network.named_parameters())
    groups = tuple(tuple(group.names) for group in parameter_groups(network, split=False) if group.names)
    return Parameters({name: parameter.numel() for name, parameter in named.items()}, groups)


class Run:
    """A run whose steps are counted for several numbers of ranks; what does not depend on them is computed once.

    Raises:
        ConfigError: the run has a setting of ZeRO that is not modelled.
    """

    def __init__(self, config: RunConfig) -> None:
        zero = config.deepspeed.get("zero_optimization", {})
        for name, plain in _NOT_MODELLED.items():
            if zero.get(name, plain) != plain:
                path = f"deepspeed.zero_optimization.{name}"
                raise ConfigError.at(path, zero[name], f"its communication is not modelled; {plain}")
        if config.train.optimizer is not None:
            path, kind = "train.optimizer.type", config.train.optimizer.type
            raise ConfigError.at(path, kind, "its communication is not modelled; leave train.optimizer out")
        self.config = config
        self.parameters = parameters_of(config.model)

    @cached_property
    def trace(self) -> Trace:
        """The order in which a micro-batch uses the parameters."""
        return trace(self.config)

    def step(self, ranks: int, micro_batches: int, stage: int | None = None) -> list[Collective]:
        """Return the collectives of one step, from the third micro-batch of a run on."""
        stage = self.config.zero_stage if stage is None else stage
        assert stage in STAGES, stage
        section = self.config.deepspeed
        if stage == 3:
            collectives = self._stage_3(section, ranks, micro_batches)
        else:
            collectives = self._gradients(section, ranks, micro_batches, stage)
            collectives += self._updated_weights(section, ranks) if stage and ranks > 1 else []
        collectives += self._flags(section, stage)
        rows = micro_batches * self.config.train.micro_batch
        return collectives + (own_collectives(ranks, rows) if ranks > 1 else [])

    def _gradients(self, section: dict[str, Any], ranks: int, micro_batches: int, stage: int) -> list[Collective]:
        element, times = communicated_bytes(section), micro_batches if stage == 2 else 1
        if _is_bf16_optimizer(section, stage):
            num_bytes = element * sum(self._padded_groups(ranks))
            return [Collective("all_reduce", num_bytes, 1, what="gradients")]
        zero, buckets = section.get("zero_optimization", {}), self._buckets(section, stage)
        if stage and zero.get("reduce_scatter", True) and not zero.get("use_multi_rank_bucket_allreduce", True):
            return [
                Collective("reduce", element * size, times, buckets, what="gradients")
                for size in self._owned(ranks)
                if size
            ]
        return [Collective("all_reduce", element * self.parameters.total, times, buckets, what="gradients")]

    def _buckets(self, section: dict[str, Any], stage: int) -> int:
        """Count the buckets in which gradients are reduced; the ends of parameters may add another."""
        size = section.get("zero_optimization", {}).get("reduce_bucket_size", _BUCKET)
        return -(-self.parameters.total // (int(size) if stage else _BUCKET))

    def _owned(self, ranks: int) -> list[int]:
        """Count the elements that each rank owns, of all groups, without padding."""
        padded = [group // ranks for group in self._padded_groups(ranks)]
        sizes = [sum(self.parameters.numel[name] for name in group) for group in self.parameters.groups]
        return [
            sum(min(share, max(0, size - rank * share)) for share, size in zip(padded, sizes, strict=True))
            for rank in range(ranks)
        ]

    def _updated_weights(self, section: dict[str, Any], ranks: int) -> list[Collective]:
        element = _BYTES[precision(section)]
        return [Collective("all_gather", element * size, 1, what="weights") for size in self._padded_groups(ranks)]

    def _padded_groups(self, ranks: int) -> list[int]:
        """Count the elements of the optimiser's flat groups."""
        unit = _ALIGNMENT * ranks
        sizes = (sum(self.parameters.numel[name] for name in group) for group in self.parameters.groups)
        return [-(-size // unit) * unit for size in sizes]

    def _stage_3(self, section: dict[str, Any], ranks: int, micro_batches: int) -> list[Collective]:
        numel, limits = self.parameters.numel, Limits.of(section)
        padded = {name: -(-count // ranks) * ranks for name, count in numel.items()}
        weight, gradient = _BYTES[precision(section)], communicated_bytes(section)
        scattered = section.get("zero_optimization", {}).get("reduce_scatter", True)
        reduced = ("reduce_scatter", padded) if scattered else ("all_reduce", numel)
        num_bytes, buckets = gradient * sum(reduced[1].values()), self._buckets(section, 3)
        collectives = [Collective(reduced[0], num_bytes, micro_batches, buckets, what="gradients")]
        if ranks == 1:
            return collectives  # it gathers nothing from itself
        for names in gathers(self.trace, limits):
            size = weight * sum(padded[name] for name in names)
            collectives.append(Collective("all_gather", size, micro_batches, what="weights"))
        for name in persistent(numel, limits):
            collectives.append(Collective("all_gather", weight * padded[name], 1, what="kept weights"))
        return collectives

    def _flags(self, section: dict[str, Any], stage: int) -> list[Collective]:
        """Return norms of the gradients and flags of overflow."""
        kind, groups = precision(section), len(self.parameters.groups)
        if stage == 0:
            clipped = kind == "fp32" and section.get("gradient_clipping", 0.0) > 0
            return [Collective("all_reduce", 4, 1, what="norm")] if clipped else []
        if _is_bf16_optimizer(section, stage):
            return []
        checks = kind == "fp16" or (kind == "bf16" and stage < 3)
        flags = [Collective("all_reduce", 1, 1, what="overflow")] if checks else []
        return [*flags, Collective("all_reduce", 8 if stage == 3 else 4, groups, what="norm")]


def own_collectives(ranks: int, rows: int) -> list[Collective]:
    """Return Longstride's own collectives of one step, in which every rank has ``rows`` contexts."""
    return [
        Collective("all_gather", 8 * ranks * (BATCH_VALUES + rows), owner=OURS, what="batches"),
        Collective("all_gather", 8 * ranks * LOSS_VALUES, owner=OURS, what="losses"),
    ]


def communicated_bytes(section: dict[str, Any]) -> int:
    """Return the bytes of one gradient element."""
    return _BYTES[section.get("communication_data_type") or precision(section)]


def _is_bf16_optimizer(section: dict[str, Any], stage: int) -> bool:
    """Whether DeepSpeed uses its BF16_Optimizer (engine.py, _do_optimizer_sanity_check)."""
    sums = section.get("data_types", {}).get("grad_accum_dtype")
    offloaded = section.get("zero_optimization", {}).get("offload_optimizer", {}).get("device") == "cpu"
    return precision(section) == "bf16" and sums == "fp32" and stage == 1 and not offloaded
