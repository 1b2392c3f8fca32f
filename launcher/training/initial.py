"""`--from`: the first weights of a run, from an exported model or from a checkpoint of another run.

Tensors are taken by their names, where their shapes are the same. The model is filled before the engine is made: so
each ZeRO stage and precision begins with them as it does with drawn ones. Optimiser, schedule and data begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import Checkpoint, SavedState, open_checkpoint
from longstride.launcher.config import flattened
from longstride.launcher.data import FromOptions, Run
from longstride.launcher.engine import states
from longstride.launcher.identity import trained_on
from longstride.launcher.models import AVERAGE, TRAINED, Exported, ModelData, Shapes
from longstride.launcher.output import AgreedError, file_names, say
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

_POSITIONS = "embedding.positions."  # how the names of the position tables begin
_FREE = ("backend", "dropout")  # keys of the model that change nothing of what its weights compute
_MOST_NAMES = 4  # of tensors or keys, in a line
_MOST_CHARACTERS = 80  # of a value


class Source(Protocol):
    """A folder with weights."""

    config: ModelConfig
    place: str  # in words
    digest: str  # SHA-256 that names the weights, as the folder states it

    def verify(self) -> None:
        """Raise ConfigError unless the files are those that the digest names."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU."""

    def record(self) -> dict[str, Any]:
        """What names it in a manifest: nothing of the machine but the folder's name."""

    def trained_on(self, data: ModelData) -> ModelData:
        """What its model was trained on; what is not known is as in ``data``, which another is to be trained on."""


class _Export:
    """An exported model."""

    def __init__(self, asked: FromOptions, *, trusted: bool) -> None:
        for option, given in (("--from-step", asked.step), ("--from-weights", asked.weights)):
            if given not in (None, TRAINED):
                rule = f"chooses among what a run has, and {asked.path} is an export; leave it out"
                raise ConfigError(f"{option}={given}: {rule}")
        self._exported = Exported(asked.path, trust_code=trusted)
        self.config, self.place = self._exported.config, str(asked.path)
        stated = self._exported.content.get("fingerprint")  # which exports of older versions may lack
        self.digest = stated if isinstance(stated, str) else self._exported.fingerprint()

    def verify(self) -> None:
        if self._exported.fingerprint() != self.digest:
            rule = "its tensors are not those that its fingerprint names: damaged, or changed since; export it anew"
            raise ConfigError(f"{self._exported.folder}: {rule}")

    def tensor(self, name: str) -> Tensor:
        return self._exported.tensor(name)

    def record(self) -> dict[str, Any]:
        return {"export": self._exported.folder.resolve().name, "fingerprint": self.digest}

    def trained_on(self, data: ModelData) -> ModelData:
        kind = {"modality": data.modality.name, "properties": data.properties}  # older exports say nothing
        return ModelData.from_json(self._exported.content.get("data", kind), self.config)


class _Run:
    """A checkpoint of a run."""

    def __init__(self, asked: FromOptions, *, trusted: bool) -> None:
        self.checkpoint = open_checkpoint(asked.path, asked.step, trusted=trusted)
        self.config = self.checkpoint.config.model
        SavedState.check_size(self.checkpoint)
        self._weights, self._name = asked.weights, asked.path.resolve().name
        step, average = self.checkpoint.manifest.step, " (moving average)" if asked.weights == AVERAGE else ""
        self.place = f"step {step} of {asked.path}{average}"
        self.digest = self.checkpoint.manifest_digest()

    def verify(self) -> None:
        self.checkpoint.verify()

    def open(self) -> None:
        """Maps the verified files; ConfigError where they lack the weights."""
        self._state = SavedState(self.checkpoint, remapped=True)
        self._kind = self._state.kind_of(self._weights)

    def tensor(self, name: str) -> Tensor:
        return self._state.tensor(name, self._kind)

    def record(self) -> dict[str, Any]:
        step = self.checkpoint.manifest.step
        return {"run": self._name, "step": step, "weights": self._weights, "manifest_sha256": self.digest}

    def trained_on(self, data: ModelData) -> ModelData:
        return trained_on(self.checkpoint, data)


@dataclass(frozen=True, slots=True)
class Fit:
    """What becomes of each tensor, by its name."""

    taken: tuple[str, ...]
    extended: tuple[str, ...] = ()  # position tables
    anew: tuple[str, ...] = ()
    left: tuple[str, ...] = ()  # of the source alone
    changed: tuple[str, ...] = ()  # a piece of a line for each key of the model that changes what weights compute


class _Misfits:
    """Tensors that do not fit, by the key of the model that causes it."""

    def __init__(self, source: ModelConfig, model: ModelConfig, place: str) -> None:
        self.source, self.model, self._place = source, model, place
        self._found: dict[str, dict[str, str]] = {}  # by the key, a piece of a line for each name

    def add(self, name: str, here: Sequence[int] | None, there: Sequence[int] | None) -> None:
        """One more; a model without it has no shape of it."""
        rows = "hashed otherwise" if here == there else None
        is_here, is_there = ("missing" if shape is None else list(shape) for shape in (here, there))
        line = f"{name} is {is_here} in this run and {rows or is_there} in {self._place}"
        self._found.setdefault(self._cause(name, there), {})[name] = line

    def _cause(self, name: str, there: Sequence[int] | None) -> str:
        """The key whose new value alone gives the source's model another such tensor; else the first that differs."""
        if name == states.TABLES and self.source.vocabulary == self.model.vocabulary:
            return "ngrams" if self.source.ngrams != self.model.ngrams else "width"
        alone = (key for key, shapes in self._trials.items() if shapes and shapes.of.get(name) != there)
        return next(alone, next(iter(self._trials)))

    @cached_property
    def _trials(self) -> dict[str, Shapes | None]:
        """For each key that differs, the shapes of the source's model with the new value; None: no such model."""
        source, model = (each.model_dump(mode="json") for each in (self.source, self.model))
        trials: dict[str, Shapes | None] = {}
        for key in sorted(source.keys() | model.keys()):
            if source.get(key) == model.get(key) or key in _FREE:
                continue
            changed = {**source, key: model[key]} if key in model else {k: v for k, v in source.items() if k != key}
            try:
                trials[key] = Shapes.of_model(ModelConfig.model_validate(changed))
            except ConfigError:
                trials[key] = None
        return trials

    def problems(self) -> list[Problem]:
        """A line for each key."""
        source, model = (each.model_dump(mode="json") for each in (self.source, self.model))
        problems = []
        for key, lines in self._found.items():
            more = f", as {len(lines) - 1} more do not fit" if len(lines) > 1 else ""
            good = f"{_cut(source[key])} as there" if key in source else "the model without it"
            fresh = all(name.startswith(_POSITIONS) for name in lines)
            way = "--from-positions fresh" if fresh else "--from-partly"
            rule = f"{next(iter(lines.values()))}{more}; take {good}, or {way}, which begins anew what does not fit"
            problems.append(Problem(f"model.{key}", rule, model.get(key)))
        return problems


def fit(source: ModelConfig, model: ModelConfig, asked: FromOptions, place: str) -> Fit:
    """What a model takes of a source's tensors; ``place`` is where they are, in words.

    Raises:
        ConfigError: one does not fit, and nothing says what becomes of it; a line for each key that causes it.
    """
    there, here = Shapes.of_model(source).of, Shapes.of_model(model).of
    taken: list[str] = []
    extended: list[str] = []
    anew: list[str] = []
    misfits = _Misfits(source, model, place)
    same_rows = (source.ngrams, source.vocabulary) == (model.ngrams, model.vocabulary)  # by the same hash
    for name, shape in here.items():
        is_positions, before = name.startswith(_POSITIONS), there.get(name)
        if is_positions and asked.positions == "fresh":
            anew.append(name)
        elif before == shape and (name != states.TABLES or same_rows):
            taken.append(name)
        elif is_positions and before is not None and before[1:] == shape[1:] and _is_extendable(source, model):
            (extended if asked.positions else anew).append(name)
            if not asked.positions and not asked.partly:
                rule = f"{name} has {shape[0]} rows in this run (model.context={model.context}), and in {place} "
                rule += f"{before[0]}; take repeat, interpolate or fresh"
                raise ConfigError(f"--from-positions: required: {rule}")
        else:
            anew.append(name)
            if not asked.partly:
                misfits.add(name, shape, before)
    left = tuple(name for name in there if name not in here)
    for name in () if asked.partly else left:
        if not (name.startswith(_POSITIONS) and asked.positions == "fresh"):
            misfits.add(name, None, there[name])
    if problems := misfits.problems():
        raise ConfigError(*problems)
    if asked.positions in ("repeat", "interpolate") and not extended:
        raise ConfigError(f"--from-positions={asked.positions}: no position table is to be extended; leave it out")
    if not taken:
        raise ConfigError(f"--from={asked.path}: no tensor of it fits the model; leave it out")
    changed = _changed(source, model)
    return Fit(tuple(taken), tuple(extended), tuple(anew), left, changed)


def _is_extendable(source: ModelConfig, model: ModelConfig) -> bool:
    """Whether rows of the position tables mean the same in both, but for how many there are."""
    grown = {"height", "width"}
    one, other = (each.embedding.model_dump(mode="json", exclude=grown) for each in (source, model))
    return one == other


def _changed(source: ModelConfig, model: ModelConfig) -> tuple[str, ...]:
    one, other = (flattened(each.model_dump(mode="json"), "model") for each in (source, model))
    paths = sorted((one.keys() | other.keys()) - {f"model.{key}" for key in _FREE})
    return tuple(
        f"{path} was {_cut(one[path]) if path in one else 'left out'}, "
        f"is {_cut(other[path]) if path in other else 'left out'}"
        for path in paths
        if one.get(path, ...) != other.get(path, ...)
    )


def extended_table(table: Tensor, rows: int, way: str) -> Tensor:
    """A position table (n, C) for other positions: (rows, C) fp32.

    ``repeat``: row i is row i mod n, so that each stretch of n positions has those that were learned. ``interpolate``:
    the first and the last row stay the first and the last, and those between are on straight lines between neighbours
    (the positions of Chen et al. 2023 are squeezed so).
    """
    if way == "repeat":
        return table.float()[torch.arange(rows) % len(table)]
    return F.interpolate(table.float().T[None], rows, mode="linear", align_corners=True)[0].T


class InitialWeights:
    """The source of a run's first weights, and what the run's model takes of it.

    Raises:
        ConfigError: there is no such source, or it does not fit the model.
    """

    def __init__(self, asked: FromOptions, model: ModelConfig, data: ModelData, *, trusted: bool) -> None:
        self._asked, self._model = asked, model
        self._source: Source
        if (asked.path / file_names.CHECKPOINTS).is_dir():
            self._source = _Run(asked, trusted=trusted)
        else:
            self._source = _Export(asked, trusted=trusted)
        self.place = self._source.place
        self.fit = fit(self._source.config, model, asked, self.place)
        self._differences = self._source.trained_on(data).differences(data)
        self._differences.pop("data", None)  # a run from other weights is mostly one on other data
        self._check_meaning()
        shapes = Shapes.of_model(model)
        self._parameters = shapes.parameters
        self._taken = sum(shapes.of[name].numel() for name in self.fit.taken if name not in shapes.buffers)

    def _check_meaning(self) -> None:
        """Raise ConfigError where tokens or positions that are taken mean something else in the run's data."""
        found, rule = self._differences, f"--from={self._asked.path}: the run's data is another: "
        if "palette" in found and self._source.config.vocabulary == self._model.vocabulary:
            way = f"build it with --palette-from the data of {self.place}"
            raise ConfigError(f"{rule}{found['palette']} than there; {way}")
        made = (name for name in (*self.fit.extended, *self.fit.anew) if name.startswith(_POSITIONS))
        if "arrangement" in found and self._asked.positions != "fresh" and not any(made):
            raise ConfigError(f"{rule}{found['arrangement']}; take --from-positions fresh, or data of that size")

    @property
    def record(self) -> dict[str, Any]:
        """What checkpoints and exports of the run say of it."""
        how = {} if self._asked.positions is None else {"positions": self._asked.positions}
        return self._source.record() | how | {"parameters_taken": self._taken}

    def agree(self, ranks: Ranks, hosts: Sequence[str]) -> None:
        """Whether every host's source is whole, and all have the same one. All ranks must call.

        Raises:
            AgreedError: on every rank, where one's is not.
        """
        digests = ranks.gather_objects(self._source.digest)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            first, second = (f"{digests[rank][:12]} for rank {rank} on {hosts[rank].split()[0]}" for rank in (0, other))
            raise AgreedError(f"--from={self._asked.path}: has {first}, and {second}; give all hosts the same")
        ranks.all_work(self._source.verify if ranks.local_rank == 0 else lambda: None)  # once a host
        if isinstance(self._source, _Run):
            self._source.checkpoint.check_trust(ranks)
            ranks.all_work(self._source.open)

    @torch.no_grad()
    def fill(self, model: SparseTransformer) -> None:
        """Brings a freshly initialised model on the CPU to these weights."""
        state = model.state_dict()
        for name in self.fit.taken:
            state[name].copy_(self._source.tensor(name))
        for name in self.fit.extended:
            assert self._asked.positions is not None
            state[name].copy_(extended_table(self._source.tensor(name), len(state[name]), self._asked.positions))

    def check(self, run: Run, engine: DeepSpeedEngine) -> None:
        """Whether the engine computes what the source did, where its model is the same. All ranks must call.

        Raises:
            AgreedError: on every rank, where the loss on the checkpoint's probe is another one.
        """
        same = not (self.fit.extended or self.fit.anew or self.fit.left or self.fit.changed)
        if same and isinstance(self._source, _Run) and self._asked.weights == TRAINED:
            probe = self._source.checkpoint.probe
            if probe is not None:
                probe.check(engine, run.config, run.ranks)

    def lines(self) -> list[str]:
        """What was taken, and what begins anew."""
        lines = [
            f"from {self.place}: {self._taken:,} of {self._parameters:,} parameters; "
            "the optimiser and the schedule begin anew, at step 0"
        ]
        here = Shapes.of_model(self._model).of
        there = Shapes.of_model(self._source.config).of
        each = [f"{name} from {there[name][0]} to {here[name][0]} rows" for name in self.fit.extended]
        told = (
            (f"extended ({self._asked.positions})", each),
            ("begun anew", self.fit.anew),
            ("left there", self.fit.left),
            ("the model is another", self.fit.changed),
        )
        lines += [f"from {self.place}: {what}: {_some(pieces)}" for what, pieces in told if pieces]
        if self._differences:
            kinds = "; ".join(self._differences.values())
            lines.append(f"notice: from {self.place}: the data is of another kind: {kinds}")
        return lines


def open_initial(run: Run, checkpoint: Checkpoint | None = None) -> InitialWeights | None:
    """Where the run's first weights come from; None: they are drawn, or it goes on from a checkpoint of its own.

    Raises:
        ConfigError: there is no such source, or it does not fit the run's model.
    """
    if run.source is None or checkpoint is not None:
        return None
    return InitialWeights(run.source, run.config.model, run.data.identity, trusted=run.trusted)


def agreed_initial(
    run: Run, initial: InitialWeights | None, checkpoint: Checkpoint | None, hosts: Sequence[str]
) -> InitialWeights | None:
    """The source, once all ranks have agreed on it; None where the run goes on from a checkpoint. All ranks must call.

    Raises:
        AgreedError: on every rank, where it is not whole, or not the same everywhere.
    """
    if run.source is None:
        return None
    if checkpoint is not None:
        if run.ranks.is_first:
            say(f"--from={run.source.path}: not needed, as the run goes on from its own checkpoint")
        return None
    if not all(run.ranks.gather_objects(initial is not None)):
        raise AgreedError(f"{run.folder}: a checkpoint that was there at the start is gone; start again")
    assert initial is not None
    initial.agree(run.ranks, hosts)
    return initial


def _some(pieces: Sequence[str]) -> str:
    more = f" and {len(pieces) - _MOST_NAMES} more" if len(pieces) > _MOST_NAMES else ""
    return ", ".join(pieces[:_MOST_NAMES]) + more


def _cut(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
