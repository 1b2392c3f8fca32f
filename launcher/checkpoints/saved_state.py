"""The state that DeepSpeed saved, by parameter: fp32 weights, optimiser moments and the moving average.

Reads files of any ZeRO stage, number of ranks and optimiser that a run can have. A rank's file holds flat vectors, and
a parameter is an interval of one. Files are mapped, so that a tensor is read when it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import DEEPSPEED_TAG, Checkpoint
from longstride.launcher.checkpoints.pickles import read_pickle, refuse_foreign_content
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE, MAPPED_BYTES, TRAINED, Shapes
from longstride.launcher.output import file_names
from longstride.launcher.ranks import Ranks

COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of the engine
SCHEDULE = ("last_epoch", "_step_count")  # its position in the learning-rate schedule
MASTER = states.MASTER
KINDS = (MASTER, *chain.from_iterable(states.MOMENTS), AVERAGE)  # keys of the optimiser's state
_SHARD = re.compile(rf"{DEEPSPEED_TAG}/(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(rf"{DEEPSPEED_TAG}/(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_SCALE = (*states.SCALE_STATE, states.HYSTERESIS)  # fields of a dynamic loss scale


class _Piece(NamedTuple):
    """An interval of one of a rank's flat vectors."""

    rank: int
    vector: int
    start: int
    stop: int


class _Shard(NamedTuple):
    """The content of the file that has a rank's part of the optimiser."""

    masters: Sequence[Tensor]  # flat vectors
    states: Mapping[int, Mapping[str, Tensor]]  # of the optimiser, by vector
    content: Mapping[str, Any]  # all of it


class SavedState:
    """The tensors of a verified checkpoint by parameter name and kind, with its counters.

    A rank's file is opened when its tensors are needed: a rank that loads its own layout opens two. Files of all ranks
    must hold what the first one's holds.

    ``remapped`` maps files anew from time to time, for one pass over all tensors: the pages read of a mapping count as
    the process's memory until it is dropped. A trusted checkpoint is mapped once, since reading may run code.

    Raises:
        ConfigError: a file is missing, or holds something that no run writes.
    """

    def __init__(self, checkpoint: Checkpoint, *, remapped: bool = False) -> None:
        self._folder = checkpoint.folder
        self._manifest, self._trusted = checkpoint.manifest, checkpoint.trusted
        self._remapped = remapped and not checkpoint.trusted
        self.model = self.check_size(checkpoint)
        self._names = list(chain.from_iterable(self._manifest.parameter_groups))
        self.shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self.loss_scale: dict[str, float] | None = None  # None: not dynamic
        # Files of `train.expert_parallel` are numbered after those of the ranks.
        self._expert_files = range(0)
        if size := checkpoint.config.train.expert_parallel:
            self._expert_files = range(self._manifest.world_size, self._manifest.world_size + size)
        self.tables = SavedTables(checkpoint)
        with refuse_foreign_content(self._folder):
            self._map()
            self.numbers = {name: int(self._model[name]) for name in COUNTERS}
            self.schedule = {name: int(self._model["lr_scheduler"][name]) for name in SCHEDULE}
            if (step := self.numbers["global_steps"]) != self._manifest.step:
                raise self._broken(f"its manifest says step {self._manifest.step}, and its files {step}")
            if missing := sorted(set(self._names) - self.shapes.keys()):
                raise self._broken(f"without the weights {', '.join(missing)}")
            self._kinds: dict[str, tuple[str, ...]] = {}
            self._steps: dict[str, float | None] = {}
            first = self._shard(0)
            shards = [first] + ([self._shard(self._expert_files[0])] if self._expert_files else [])
            for name in self.shapes:
                rank, vector, *_ = self._pieces[name][0]
                state = shards[rank in self._expert_files].states.get(vector, {})
                self._kinds[name] = tuple(kind for kind in KINDS if kind == MASTER or kind in state)
                self._steps[name] = float(state["step"]) if "step" in state else None
            self.kinds = tuple(kind for kind in KINDS if any(kind in kinds for kinds in self._kinds.values()))
            averaged = {AVERAGE in kinds for kinds in self._kinds.values()}
            moments = {self.moments_of(name)[0] for name in self.shapes}
            if checkpoint.config.train.trained_parts:  # the other parts may not have taken a step yet
                averaged, moments = set(), moments - {()}
            if len(averaged) > 1 or not (moments == {()} or moments <= set(states.MOMENTS)):
                raise self._broken("only some parameters have the optimiser's state or the average")
            states_of_all = chain.from_iterable(shard.states.values() for shard in shards)
            steps = {float(state["step"]) for state in states_of_all if "step" in state}
            if len(steps) > 1 and not checkpoint.config.train.trained_parts:
                raise self._broken(f"Adam's steps differ: {sorted(steps)}")
            self.adam_step = max(steps, default=None)  # the most of any parameter; None before the first
            saved = {name: tuple(shape) for name, shape in self.model_shapes.items()}
            self.model.check(
                saved, f"its weights are not those of the model in its {file_names.CONFIG}:", f"{self._folder}"
            )

    @staticmethod
    def check_size(checkpoint: Checkpoint) -> Shapes:
        """Return the shapes of a checkpoint's model, without building it; ConfigError if its files are too small."""
        try:
            shapes = Shapes.of_model(checkpoint.config.model)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.folder / file_names.CONFIG}: {error.under('model')}") from None
        needed, file_bytes = 4 * shapes.parameters, sum(record.bytes for record in checkpoint.manifest.files.values())
        if needed > file_bytes:
            rule = f"its files have {file_bytes:,} bytes, but the model of its {file_names.CONFIG} has {needed:,}"
            raise ConfigError(f"{checkpoint.folder}: {rule}")
        return shapes

    def _map(self) -> None:
        """Open the files of the model and of the first rank, and drop earlier mappings."""
        self._taken = 0  # bytes, since they were opened
        files = [name for name in self._manifest.files if _MODEL.fullmatch(name)]
        if len(files) != 1:
            raise self._broken(f"{len(files)} files with the state of the model, not one")
        self._model = self._read(files[0])
        self._shards: dict[int, _Shard] = {}
        if self._manifest.zero_stage:
            self._files = {int(match[1]): name for name in self._manifest.files if (match := _SHARD.fullmatch(name))}
            if sorted(self._files) != list(range(self._manifest.world_size)):
                rule = f"optimiser's files of the ranks {sorted(self._files)}, not of {self._manifest.world_size}"
                raise self._broken(rule)
            scaler = self._shard(0).content.get("loss_scaler")
            if scaler is not None and scaler.dynamic:
                self.loss_scale = {key: float(getattr(scaler, key)) for key in _SCALE}
            (self._lay_out_parameters if self._manifest.zero_stage == 3 else self._lay_out_groups)()
        else:  # one file; in half precision its master weights are unnamed, in the order of the groups
            optimizer = self._model["optimizer"]
            if self._manifest.precision == "fp32":
                masters = [self._model["module"][name] for name in self._names]
            else:
                masters = list(chain.from_iterable(optimizer["fp32_groups"]))
                if optimizer["dynamic_loss_scale"]:
                    self.loss_scale = {key: float(optimizer[key]) for key in _SCALE if key in optimizer}
                optimizer = optimizer["optimizer_state_dict"]
            self._shards[0] = _Shard(masters, optimizer["state"], optimizer)
            self._check_storage(chain(masters, *(state.values() for state in optimizer["state"].values())))
            for number, (name, master) in enumerate(zip(self._names, masters, strict=True)):
                self.shapes[name] = master.shape
                self._pieces[name] = [_Piece(0, number, 0, master.numel())]
        if self._expert_files:
            self._lay_out_experts()
        self._check_storage(self.buffers.values())

    def _shard(self, rank: int) -> _Shard:
        """Open the file of a rank, at its first use. ConfigError if it does not fit the first rank's."""
        if rank not in self._shards and rank in self._expert_files:
            self._shards[rank] = self._expert_shard(rank)
        elif rank not in self._shards:
            content = self._read(self._files[rank])["optimizer_state_dict"]
            weights = self._manifest.zero_stage == 3
            masters = content["fp32_flat_groups" if weights else "single_partition_of_fp32_groups"]
            optimizer = content["optimizer_state_dict" if weights else "base_optimizer_state"]
            by_vector = optimizer["state"] if isinstance(optimizer, dict) else dict(enumerate(optimizer))
            self._check_storage(chain(masters, *(state.values() for state in by_vector.values())))
            if rank and _kinds_of(by_vector) != _kinds_of(self._shard(0).states):
                raise self._broken(f"the optimiser's state of rank {rank} has other kinds or steps than that of rank 0")
            self._shards[rank] = _Shard(masters, by_vector, content)
        return self._shards[rank]

    def _check_storage(self, tensors: Iterable[Any]) -> None:
        """Check that tensors do not repeat elements: a stride of 0 would make any number of weights from one."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.nbytes > tensor.untyped_storage().nbytes():
                raise self._broken(f"a tensor of {tensor.nbytes:,} bytes in {tensor.untyped_storage().nbytes():,}")

    @property
    def model_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the complete model. ``shapes`` only has parameters that DeepSpeed saved, so no tables."""
        return self.shapes | self.tables.shapes | {name: buffer.shape for name, buffer in self.buffers.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, fp32."""
        return {name: self._model["module"][name] for name in self._model["buffer_names"]}

    def has(self, name: str, kind: str) -> bool:
        """Whether a parameter has a tensor of a kind."""
        return kind in self._kinds[name]

    def moments_of(self, name: str) -> tuple[tuple[str, ...], float | None]:
        """Return the kinds of a parameter's moments, none before its first step, and the number of Adam's steps."""
        return tuple(kind for kind in self._kinds[name] if kind not in (MASTER, AVERAGE)), self._steps[name]

    def tensor(self, name: str, kind: str = MASTER) -> Tensor:
        """Return one parameter's tensor of a kind: a copy, fp32, on the CPU."""
        if name in self.tables.shapes:
            return self.tables.tensor(kind, name)
        if name in self._model["buffer_names"]:  # the same for every kind
            return self.buffers[name].clone()
        if self._remapped and self._taken > MAPPED_BYTES:
            self._map()
        shape = states.shape_of(kind, self.shapes[name])
        flat = self.elements(name, kind, 0, shape.numel())
        self._taken += flat.nbytes
        return flat.reshape(shape)

    def elements(self, name: str, kind: str, start: int, stop: int) -> Tensor:
        """Return elements of one parameter's flat tensor of a kind, up to its end: a copy, fp32, on the CPU.

        The average of a parameter that has not taken a step is the parameter.
        """
        kind = MASTER if kind == AVERAGE and not self.has(name, kind) else kind
        stop = min(stop, states.shape_of(kind, self.shapes[name]).numel())
        with refuse_foreign_content(self._folder):
            parts, begin = [torch.empty(0)], 0  # of the piece, in the parameter
            for rank, vector, low, high in self._pieces[name]:
                first, last = max(start - begin, 0), min(stop - begin, high - low)
                if first < last:
                    shard = self._shard(rank)
                    source = shard.masters[vector].detach() if kind == MASTER else shard.states[vector][kind]
                    parts.append(source.flatten()[low:high][first:last].float())
                begin += high - low
            flat = torch.cat(parts)  # a copy: the file can be closed
        if flat.numel() < stop - start:
            raise self._broken(f"{flat.numel():,} of {stop - start:,} numbers of {kind} of {name}")
        return flat

    def kind_of(self, weights: str) -> str:
        """Return the kind of tensors for ``TRAINED`` or ``AVERAGE`` weights; ConfigError if there is no average."""
        kind = {TRAINED: MASTER, AVERAGE: AVERAGE}[weights]
        if kind not in self.kinds:
            raise self._broken("has no moving average, which needs train.ema_decay; use --weights trained")
        return kind

    def _lay_out_groups(self) -> None:
        """Locate parameters under ZeRO 1 and 2, which concatenate a group and cut it evenly over the ranks."""
        masters, _, first = self._shard(0)
        stripped = "zero_stage" in first  # BF16_Optimizer, which has no such key, saves its padding too
        gaps = first.get("param_alignment_paddings") or [None] * len(self._model["param_shapes"])
        for group, (shapes, paddings) in enumerate(zip(self._model["param_shapes"], gaps, strict=True)):
            size = masters[group].numel() + (first["group_paddings"][group] if stripped else 0)
            offset = 0
            for (name, shape), gap in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
                self.shapes[name] = shape
                end = offset + shape.numel()
                self._pieces[name] = [
                    _Piece(rank, group, max(offset - rank * size, 0), min(end - rank * size, size))
                    for rank in range(offset // size, -(-end // size))
                ]
                offset = end + gap
            if offset > size * len(self._files):
                raise self._broken(f"its shards hold {size * len(self._files):,} weights of a group of {offset:,}")

    def _lay_out_parameters(self) -> None:
        """Locate parameters under ZeRO 3: each is cut evenly over the ranks, which concatenate pieces in sub-groups."""
        ends = list(accumulate(vector.numel() for vector in self._shard(0).masters))
        vector, offset = 0, 0
        for shapes in self._model["param_shapes"]:
            for name, shape in shapes.items():
                size = math.ceil(shape.numel() / len(self._files))
                while vector < len(ends) and offset >= ends[vector]:
                    vector += 1
                start = offset - (ends[vector - 1] if vector else 0)
                if vector == len(ends) or offset + size > ends[vector]:
                    raise self._broken(f"{name} does not lie within one of its sub-groups")
                self.shapes[name] = shape
                self._pieces[name] = [_Piece(rank, vector, start, start + size) for rank in range(len(self._files))]
                offset += size

    def _lay_out_experts(self) -> None:
        """Locate the experts that P ranks saved in files of their own, see ``ParallelExperts.share``."""
        first = self._shard(self._expert_files[0])
        for vector, (name, master) in enumerate(zip(first.content, first.masters, strict=True)):
            self.shapes[name] = torch.Size((len(master) * len(self._expert_files), *master.shape[1:]))
            self._pieces[name] = [_Piece(number, vector, 0, master.numel()) for number in self._expert_files]

    def _expert_shard(self, number: int) -> _Shard:
        """Open a file of experts. ConfigError if it is missing, or does not fit the first one."""
        name = share_name("experts", number - self._expert_files[0])
        if name not in self._manifest.files:
            raise self._broken(f"lacks {name}, which holds experts of its model")
        tensors = _read_tensors(self._folder / name)
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in sorted(tensors.items()):
            parameter, _, kind = key.rpartition(":")
            by_name.setdefault(parameter, {})[kind] = tensor
        kinds = {kind for kinds in by_name.values() for kind in kinds}
        if not all(MASTER in kinds and kinds[MASTER].dim() for kinds in by_name.values()) or kinds - {*KINDS, "step"}:
            raise self._broken(f"{name}: its tensors are not those of experts")
        shard = _Shard([kinds.pop(MASTER) for kinds in by_name.values()], dict(enumerate(by_name.values())), by_name)
        if number != self._expert_files[0]:
            first = self._shard(self._expert_files[0])
            pairs = zip(_shapes_of(shard), _shapes_of(first), strict=False)
            if list(shard.content) != list(first.content) or any(one != other for one, other in pairs):
                raise self._broken(f"{name}: its tensors are not those of the first experts")
        return shard

    def _read(self, name: str) -> dict[str, Any]:
        return read_pickle(self._folder / name, trusted=self._trusted)

    def _broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self._folder}: {what}")


def _kinds_of(by_vector: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[Any, ...]]:
    """Return the sorted keys of each vector's state, and its step."""
    return {vector: (sorted(state), float(state.get("step", 0))) for vector, state in by_vector.items()}


def _shapes_of(shard: _Shard) -> list[tuple[Any, ...]]:
    """Return the shape of each vector, and those of its state; of a step its value."""
    return [
        (master.shape, *((kind, float(x) if kind == "step" else x.shape) for kind, x in shard.states[vector].items()))
        for vector, master in enumerate(shard.masters)
    ]


def share_name(kind: str, rank: int) -> str:
    """Return the name of the file in which a rank saves its share of "tables", "experts" or "lanes"."""
    return f"{kind}-{rank:05d}.safetensors"


def load_lanes(engine: DeepSpeedEngine, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Load what this rank's lanes carry, from the files of any number of ranks, in any precision.

    Raises:
        ConfigError: a file is missing, or has other tensors than the model carries.
    """
    lanes, manifest = engine.lanes, checkpoint.manifest
    count, size = len(lanes.last), checkpoint.config.train.global_batch // manifest.world_size  # a rank's lanes
    first = ranks.data_rank * count
    for rank in range(first // size, -(-(first + count) // size)):
        path = checkpoint.folder / share_name("lanes", rank)
        if path.name not in manifest.files:
            raise ConfigError(f"{checkpoint.folder}: lacks {path.name}, which holds what the model carries")
        saved = _read_tensors(path)
        shapes = {name: (size, *tensor.shape[1:]) for name, tensor in lanes.share().items()}
        if {name: tuple(tensor.shape) for name, tensor in saved.items()} != shapes:
            raise ConfigError(f"{path}: its tensors are not those that the model carries")
        start, stop = max(first, rank * size), min(first + count, (rank + 1) * size)
        lanes.fill(slice(start - first, stop - first), saved, slice(start - rank * size, stop - rank * size))


def _read_tensors(path: Path, prefix: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file: all tensors, or those whose names are ``prefix`` and a word, by that word.

    ConfigError if it cannot be read.
    """
    try:
        with safe_open(path, "pt") as file:
            parted = {name: name.rpartition(".") for name in file.keys()}  # noqa: SIM118  no dictionary
            if prefix is None:
                return {name: file.get_tensor(name) for name in parted}
            return {word: file.get_tensor(name) for name, (head, dot, word) in parted.items() if head + dot == prefix}
    except SafetensorError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


class SavedTables:
    """The tables in a checkpoint, by the names of the model's parameters: one safetensors file a rank, for every stage.

    With W ranks, `tables-00001.safetensors` has rows 1, 1 + W, 1 + 2 W … of each table, so any number of ranks can read
    them. All tensors are fp32, named as in ``HeldTable.share``: weights and moving average (R, C); each row's second
    moment, number of steps and step of its average (R,); and the number of all steps (1,). ConfigError if a file is
    missing.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        shapes = Shapes.of_model(checkpoint.config.model)
        self.shapes = {name: shape for name, shape in shapes.of.items() if name in shapes.tables}
        self._folder, self._ranks = checkpoint.folder, checkpoint.manifest.world_size
        self._decay = checkpoint.config.train.ema_decay
        names = [share_name("tables", rank) for rank in range(self._ranks)]
        missing = [name for name in names if name not in checkpoint.manifest.files]
        if self.shapes and missing:
            raise ConfigError(f"{self._folder}: lacks {missing[0]}, which holds tables of its model")

    def tensor(self, kind: str, name: str = states.TABLES) -> Tensor:
        """Return all rows of a table, (R, C) fp32: trained ("fp32"), or their average as of the checkpoint's step."""
        table = torch.empty(self.shapes[name])
        for first, saved in self.shares(name):
            rows = saved["fp32"]
            if kind == AVERAGE:
                assert self._decay is not None
                rows = states.advance_average(
                    saved[AVERAGE], rows, self._decay, saved["steps"] - saved[f"{AVERAGE}_step"]
                )
            table[first :: self._ranks] = rows
        return table

    def load(self, engine: DeepSpeedEngine) -> None:
        """Load the tables into an engine of any layout."""
        for part in engine.held.parts:
            for first, saved in self.shares(part.name) if part.kind == "tables" else ():
                part.fill(first, self._ranks, saved, self._decay)

    def shares(self, name: str) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """Yield the first row of a table in each file, and its tensors there."""
        for rank in range(self._ranks):
            path = self._folder / share_name("tables", rank)
            saved = _read_tensors(path, states.table_prefix(name))
            count, width = self.shapes[name]
            rows = len(range(rank, count, self._ranks))
            shapes = {"fp32": (rows, width), "exp_avg_sq": (rows,), "touches": (rows,), "steps": (1,)}
            if self._decay is not None:
                shapes |= {AVERAGE: (rows, width), f"{AVERAGE}_step": (rows,)}
            saved_shapes = {
                kind: tuple(tensor.shape) for kind, tensor in saved.items() if tensor.dtype == torch.float32
            }
            if saved_shapes != shapes or len(saved_shapes) != len(saved):
                what = "the model's n-gram tables" if name == states.TABLES else f"the model's {name}"
                raise ConfigError(f"{path}: its tensors are not those of {what}")
            yield rank, saved


def master_weights(checkpoint: Checkpoint, weights: str = TRAINED) -> dict[str, Tensor]:
    """Verify a checkpoint and return every parameter and buffer by name, fp32, contiguous, on the CPU.

    ``weights`` are the ``TRAINED`` ones or their moving ``AVERAGE``.

    Raises:
        ConfigError: a file is damaged or foreign, would have to be trusted, or weights or averages are missing.
    """
    checkpoint.verify()
    state = SavedState(checkpoint)
    kind = state.kind_of(weights)
    return {name: state.tensor(name, kind) for name in state.model_shapes}
