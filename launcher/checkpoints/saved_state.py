"""What DeepSpeed saved, by parameter: fp32 weights, Adam's moments and the moving average, one tensor at a time.

It may come from any ZeRO stage, any number of ranks, and every optimiser of DeepSpeed's that a run can have. A rank's
file holds flat vectors, and a parameter is an interval of one. Files are mapped, so that a tensor is read when it is
used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.checkpoint import DEEPSPEED_TAG, Checkpoint
from longstride.launcher.checkpoints.pickles import foreign_content_refused, read_pickle
from longstride.launcher.checkpoints.saved_tables import SavedTables
from longstride.launcher.engine import states
from longstride.launcher.models import AVERAGE, MAPPED_BYTES, TRAINED, Shapes
from longstride.launcher.output import file_names

COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of the engine
SCHEDULE = ("last_epoch", "_step_count")
MASTER = "fp32"
KINDS = (MASTER, *chain.from_iterable(states.MOMENTS), AVERAGE)  # as the optimiser's state names them
_SHARD = re.compile(rf"{DEEPSPEED_TAG}/(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(rf"{DEEPSPEED_TAG}/(?:zero_pp_rank_0_)?mp_rank_00_model_states\.pt")
_SCALE = (*states.SCALE_STATE, states.HYSTERESIS)  # what is kept of a dynamic loss scale


class _Piece(NamedTuple):
    """An interval of one of a rank's flat vectors."""

    rank: int
    vector: int
    start: int
    stop: int


class SavedState:
    """A checkpoint's tensors by parameter name and kind, and the numbers beside them. The files are verified already.

    ``remapped``: map the files anew now and then, for one way through all tensors. What has been read of a mapping
    counts as memory of the process until it is dropped. A trusted checkpoint is mapped once, as reading may run code.

    Raises:
        ConfigError: a file is missing, or holds what no run of ours writes.
    """

    def __init__(self, checkpoint: Checkpoint, *, remapped: bool = False) -> None:
        self._folder = checkpoint.folder
        self._manifest, self._trusted = checkpoint.manifest, checkpoint.trusted
        self._remapped = remapped and not checkpoint.trusted
        self.model = self.check_size(checkpoint)
        self._names = list(chain.from_iterable(self._manifest.parameter_groups))
        self.shapes: dict[str, torch.Size] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self.loss_scale: dict[str, float] | None = None  # of a dynamic one
        self._tables = None
        if checkpoint.config.model.ngrams is not None:
            self._tables = SavedTables(checkpoint.folder, checkpoint.manifest, checkpoint.config)
        with foreign_content_refused(self._folder):
            self._read_state()

    @staticmethod
    def check_size(checkpoint: Checkpoint) -> Shapes:
        """The tensors of a checkpoint's model, by its configuration alone; before anything is made of that.

        Raises:
            ConfigError: its files are too small to hold them.
        """
        try:
            shapes = Shapes.of_model(checkpoint.config.model)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.folder / file_names.CONFIG}: {error.under('model')}") from None
        needed, held = 4 * shapes.parameters, sum(record.bytes for record in checkpoint.manifest.files.values())
        if needed > held:
            rule = f"its files have {held:,} bytes, and the model of its {file_names.CONFIG} {needed:,}"
            raise ConfigError(f"{checkpoint.folder}: {rule}")
        return shapes

    def _read_state(self) -> None:
        """Finds every parameter's pieces in the files, and holds them against the configuration."""
        self._map()
        if (step := self.numbers["global_steps"]) != self._manifest.step:
            raise self._broken(f"its manifest says step {self._manifest.step}, and its files {step}")
        if missing := sorted(set(self._names) - self.shapes.keys()):
            raise self._broken(f"without the weights {', '.join(missing)}")
        self._held = {name: self._kinds_of(name) for name in self.shapes}
        self.kinds = tuple(kind for kind in KINDS if any(kind in held for held in self._held.values()))
        averaged = {AVERAGE in held for held in self._held.values()}
        moments = {tuple(kind for kind in held if kind not in (MASTER, AVERAGE)) for held in self._held.values()}
        if len(averaged) > 1 or not (moments == {()} or moments <= set(states.MOMENTS)):
            raise self._broken("the optimiser's state or the average is there for a part of the parameters alone")
        steps = {float(state["step"]) for each in self._states for state in each.values() if "step" in state}
        if len(steps) > 1:
            raise self._broken(f"Adam's steps differ: {sorted(steps)}")
        self.adam_step = steps.pop() if steps else None  # how many it has taken; None before the first
        saved = {name: tuple(shape) for name, shape in self.model_shapes.items()}
        self.model.check(
            saved, f"its weights are not those of the model in its {file_names.CONFIG}:", f"{self._folder}"
        )

    def _map(self) -> None:
        """Opens all files."""
        self._taken = 0  # bytes, since they were opened
        files = [name for name in self._manifest.files if _MODEL.fullmatch(name)]
        if len(files) != 1:
            raise self._broken(f"{len(files)} files with the state of the model, not one")
        self._model = self._read(files[0])
        self._masters: list[list[Tensor]] = []  # a list of flat vectors a rank
        self._states: list[Mapping[int, Mapping[str, Tensor]]] = []  # of the optimiser, by vector
        self._read_whole() if self._manifest.zero_stage == 0 else self._read_shards()
        states_of = (state.values() for each in self._states for state in each.values())
        # Strides of 0 would make any number of weights of one.
        for tensor in chain(*self._masters, self.buffers.values(), *states_of):
            if isinstance(tensor, Tensor) and tensor.nbytes > tensor.untyped_storage().nbytes():
                raise self._broken(f"a tensor of {tensor.nbytes:,} bytes in {tensor.untyped_storage().nbytes():,}")

    @property
    def model_shapes(self) -> dict[str, torch.Size]:
        """Of the whole model: ``shapes`` are of parameters that DeepSpeed saved, which n-gram tables are no part of."""
        tables = {} if self._tables is None else {states.TABLES: self._tables.shape}
        return self.shapes | tables | {name: buffer.shape for name, buffer in self.buffers.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """The engine's counters."""
        return {name: int(self._model[name]) for name in COUNTERS}

    @property
    def schedule(self) -> dict[str, Any]:
        """How far the schedule of the learning rate is."""
        return {name: self._model["lr_scheduler"][name] for name in SCHEDULE}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's tensors that are no parameters, fp32."""
        return {name: self._model["module"][name] for name in self._model["buffer_names"]}

    def shapes_of(self, kind: str) -> dict[str, torch.Size]:
        """The shapes of a kind's tensors by parameter, of those that have it."""
        having = (name for name, held in self._held.items() if kind in held)
        return {name: states.shape_of(kind, self.shapes[name]) for name in having}

    def tensor(self, name: str, kind: str = MASTER) -> Tensor:
        """One parameter's tensor of a kind that is there: of its own memory, fp32, on the CPU."""
        if name == states.TABLES and self._tables is not None:
            return self._tables.tensor(kind)
        if name in self._model["buffer_names"]:  # which every kind of weights has as they are
            return self.buffers[name].clone()
        if self._remapped and self._taken > MAPPED_BYTES:
            self._map()
        with foreign_content_refused(self._folder):
            parts = []
            for rank, vector, start, stop in self._pieces[name]:
                held = self._masters[rank][vector].detach() if kind == MASTER else self._states[rank][vector][kind]
                parts.append(held.flatten()[start:stop].float())
            whole = torch.cat(parts)  # a copy: the file can be closed
        shape = states.shape_of(kind, self.shapes[name])
        if whole.numel() < shape.numel():
            raise self._broken(f"{whole.numel():,} numbers of {kind} of {name}, which has {shape.numel():,}")
        self._taken += whole.nbytes
        return whole[: shape.numel()].reshape(shape)

    def kind_of(self, weights: str) -> str:
        """The kind of tensors that are these weights, ``TRAINED`` or ``AVERAGE``; ConfigError where there are none."""
        kind = {TRAINED: MASTER, AVERAGE: AVERAGE}[weights]
        if kind not in self.kinds:
            raise self._broken("it holds no moving average, which train.ema_decay keeps; take --weights trained")
        return kind

    def _kinds_of(self, name: str) -> tuple[str, ...]:
        """What there is of a parameter; ConfigError where some ranks alone have a kind."""
        each = [self._states[piece.rank].get(piece.vector, {}) for piece in self._pieces[name]]
        for kind in KINDS:
            if 0 < sum(kind in state for state in each) < len(each):
                raise self._broken(f"{kind} is there for a part of {name} alone")
        return tuple(kind for kind in KINDS if kind == MASTER or kind in each[0])

    def _read_whole(self) -> None:
        """ZeRO 0: one file. In half precision its master weights have no names, and the order of the groups."""
        optimizer = self._model["optimizer"]
        names = self._names
        if self._manifest.precision == "fp32":
            masters = [self._model["module"][name] for name in names]
        else:
            masters = list(chain.from_iterable(optimizer["fp32_groups"]))
            if optimizer["dynamic_loss_scale"]:
                self.loss_scale = {key: float(optimizer[key]) for key in _SCALE if key in optimizer}
            optimizer = optimizer["optimizer_state_dict"]
        self._masters, self._states = [masters], [optimizer["state"]]
        for number, (name, master) in enumerate(zip(names, masters, strict=True)):
            self.shapes[name] = master.shape
            self._pieces[name] = [_Piece(0, number, 0, master.numel())]

    def _read_shards(self) -> None:
        ranks = {int(match[1]): name for name in self._manifest.files if (match := _SHARD.fullmatch(name))}
        if sorted(ranks) != list(range(self._manifest.world_size)):
            raise self._broken(f"optimiser's files of the ranks {sorted(ranks)}, not of {self._manifest.world_size}")
        shards = [self._read(ranks[rank])["optimizer_state_dict"] for rank in range(len(ranks))]
        scaler = shards[0].get("loss_scaler")
        if scaler is not None and scaler.dynamic:
            self.loss_scale = {key: float(getattr(scaler, key)) for key in _SCALE}
        weights = self._manifest.zero_stage == 3
        inner = "optimizer_state_dict" if weights else "base_optimizer_state"
        for shard in shards:
            content = shard[inner]
            self._states.append(content["state"] if isinstance(content, dict) else dict(enumerate(content)))
            self._masters.append(shard["fp32_flat_groups" if weights else "single_partition_of_fp32_groups"])
        (self._lay_out_parameters if weights else self._lay_out_groups)(shards)

    def _lay_out_groups(self, shards: list[dict[str, Any]]) -> None:
        """ZeRO 1 and 2: a group of parameters is laid end to end, and that vector cut evenly over the ranks."""
        first = shards[0]
        stripped = "zero_stage" in first  # BF16_Optimizer, which has no such key, saves its padding too
        gaps = first.get("param_alignment_paddings") or [None] * len(self._model["param_shapes"])
        for group, (shapes, paddings) in enumerate(zip(self._model["param_shapes"], gaps, strict=True)):
            size = self._masters[0][group].numel() + (first["group_paddings"][group] if stripped else 0)
            offset = 0
            for (name, shape), gap in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
                self.shapes[name] = shape
                end = offset + shape.numel()
                self._pieces[name] = [
                    _Piece(rank, group, max(offset - rank * size, 0), min(end - rank * size, size))
                    for rank in range(offset // size, -(-end // size))
                ]
                offset = end + gap
            held = sum(masters[group].numel() for masters in self._masters)
            if held < offset:
                raise self._broken(f"its shards hold {held:,} weights of a group of {offset:,}")

    def _lay_out_parameters(self, shards: list[dict[str, Any]]) -> None:
        """ZeRO 3: every parameter is cut evenly over the ranks; a rank lays its pieces end to end, in sub-groups."""
        ends = list(accumulate(vector.numel() for vector in self._masters[0]))
        vector, offset = 0, 0
        for shapes in self._model["param_shapes"]:
            for name, shape in shapes.items():
                size = math.ceil(shape.numel() / len(shards))
                while vector < len(ends) and offset >= ends[vector]:
                    vector += 1
                start = offset - (ends[vector - 1] if vector else 0)
                if vector == len(ends) or offset + size > ends[vector]:
                    raise self._broken(f"{name} does not lie within one of its sub-groups")
                self.shapes[name] = shape
                self._pieces[name] = [_Piece(rank, vector, start, start + size) for rank in range(len(shards))]
                offset += size

    def _read(self, name: str) -> dict[str, Any]:
        return read_pickle(self._folder / name, mapped=True, trusted=self._trusted)

    def _broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self._folder}: {what}")


def master_weights(checkpoint: Checkpoint, weights: str = TRAINED) -> dict[str, Tensor]:
    """Every parameter and buffer by name, fp32, contiguous, on the CPU; the files are verified first.

    Args:
        checkpoint: of any ZeRO stage and number of ranks.
        weights: ``TRAINED`` or ``AVERAGE``: as they were trained, or their moving average.

    Raises:
        ConfigError: a file is damaged or foreign, would have to be trusted, or weights or averages are missing.
    """
    checkpoint.verify()
    state = SavedState(checkpoint)
    kind = state.kind_of(weights)
    return {name: state.tensor(name, kind) for name in state.model_shapes}
