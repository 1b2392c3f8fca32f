"""`--from`: initialise a run from an exported model or from a checkpoint of another run.

Tensors are copied by name if their shapes are equal. The model is filled before the engine is built, so every ZeRO
stage and precision treats them like random weights. Optimiser, schedule and data begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError, Problem
from longstride.launcher.checkpoints import Checkpoint, SavedState, open_checkpoint
from longstride.launcher.config import flattened
from longstride.launcher.data import RunSetup, WeightSource
from longstride.launcher.engine import states
from longstride.launcher.identity import trained_on
from longstride.launcher.models import AVERAGE, TRAINED, Exported, ModelData, Shapes
from longstride.launcher.output import AgreedError, file_names, say
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import ModelConfig, SparseTransformer

_POSITIONS = "embedding.positions."  # prefix of the position tables
_TOKENS, _START = "embedding.tokens.weight", "embedding.start"  # objectives decide about a mask's row, and the start
_INDEXER = ".attention.indexer."  # in the names of an indexer's tensors, which the rest of its layer does without
_LOGITS = "logits."  # prefix of the tensors after the last norm: of tokens or of classes, as the objective decides
_FREE = ("backend", "dropout")  # keys of the model that do not change what its weights compute
_MOST_NAMES = 4  # of tensors or keys, in a line
Shape = Sequence[int] | None  # of a tensor; None if there is none


class _Export:
    """An exported model. ``place`` is its name in messages, ``digest`` the SHA-256 of its weights as it states it."""

    def __init__(self, options: WeightSource, *, trusted: bool) -> None:
        for option, value in (("--from-step", options.step), ("--from-weights", options.weights)):
            if value not in (None, TRAINED):
                rule = f"only applies to runs, and {options.path} is an export; leave it out"
                raise ConfigError(f"{option}={value}: {rule}")
        self._exported = Exported(options.path, trust_code=trusted)
        self.config, self.place = self._exported.config, str(options.path)
        stated = self._exported.content.get("fingerprint")  # exports of older versions may lack it
        self.digest = stated if isinstance(stated, str) else self._exported.fingerprint()

    def verify(self) -> None:
        """Raise ConfigError unless the files match the digest."""
        if self._exported.fingerprint() != self.digest:
            rule = "its tensors do not match its fingerprint: they are damaged or were changed; export it again"
            raise ConfigError(f"{self._exported.folder}: {rule}")

    def tensor(self, name: str) -> Tensor:
        return self._exported.tensor(name)

    def record(self) -> dict[str, Any]:
        """Return the source as recorded in a manifest. The folder's name is all it has of the machine."""
        return {"export": self._exported.folder.resolve().name, "fingerprint": self.digest}

    def trained_on(self, data: ModelData) -> ModelData:
        """Return the data of the source's model. Unknown properties are those of ``data``, the new run's."""
        kind = {"modality": data.modality.name, "properties": data.properties}  # older exports lack it
        return ModelData.from_json(self._exported.content.get("data", kind), self.config)


class _Run:
    """A checkpoint of a run, with the interface of ``_Export``."""

    def __init__(self, options: WeightSource, *, trusted: bool) -> None:
        self.checkpoint = open_checkpoint(options.path, options.step, trusted=trusted)
        self.config = self.checkpoint.config.model
        SavedState.check_size(self.checkpoint)
        self._weights, self._name = options.weights, options.path.resolve().name
        step, average = self.checkpoint.manifest.step, " (moving average)" if options.weights == AVERAGE else ""
        self.place = f"step {step} of {options.path}{average}"
        self.digest = self.checkpoint.manifest_digest()

    def verify(self) -> None:
        self.checkpoint.verify()

    def open(self) -> None:
        """Map the verified files. Raises ConfigError if they lack the weights."""
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
    """The names of tensors by their treatment."""

    taken: tuple[str, ...]
    extended: tuple[str, ...] = ()  # position tables
    unmasked: tuple[str, ...] = ()  # the token table, where only one of both models has a row for masks
    anew: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # only in the source
    changed: tuple[str, ...] = ()  # a phrase for each key of the model that changes what the weights compute


def fit(source: ModelConfig, model: ModelConfig, options: WeightSource, place: str) -> Fit:
    """Decide which tensors of a source a model takes; ``place`` names the source in messages.

    Raises:
        ConfigError: some do not fit, and no option says what to do; a line for each key that causes it.
    """
    source_shapes, shapes = Shapes.of_model(source).of, Shapes.of_model(model).of
    names: dict[str, list[str]] = {treatment: [] for treatment in ("taken", "extended", "unmasked", "anew", "unused")}
    misfits: dict[str, tuple[Shape, Shape]] = {}
    starts_differ = source.objective.causal != model.objective.causal
    logits_differ = (source.objective.num_classes > 0) != (model.objective.num_classes > 0)
    same_rows = (source.ngrams, source.vocabulary) == (model.ngrams, model.vocabulary)  # the same hash
    # Rows of the position tables mean the same if all but the size of the grid is equal.
    layouts = [config.embedding.model_dump(mode="json", exclude={"height", "width"}) for config in (source, model)]
    for name in dict.fromkeys((*shapes, *source_shapes)):
        shape, before = shapes.get(name), source_shapes.get(name)
        is_positions, treatment = name.startswith(_POSITIONS), "anew"
        is_fresh = is_positions and options.positions == "fresh"
        is_of_objective = (name == _START and starts_differ) or (name.startswith(_LOGITS) and logits_differ)
        is_only_in_one = _INDEXER in name and None in (shape, before)
        may_differ = options.partly or is_fresh or is_of_objective or is_only_in_one
        same_columns = shape is not None and before is not None and before[1:] == shape[1:]
        if shape is None:
            treatment = "unused"
        elif before == shape and not is_fresh and not is_of_objective and (name != states.TABLES or same_rows):
            treatment = "taken"
        elif name == _TOKENS and same_columns and source.vocabulary == model.vocabulary:
            treatment = "unmasked"
        elif is_positions and not is_fresh and same_columns and layouts[0] == layouts[1]:
            if before is not None and not options.positions and not options.partly:
                rule = f"{name} has {shape[0]} rows in this run (model.context={model.context}), and in {place} "
                rule += f"{before[0]}; take repeat, interpolate or fresh"
                raise ConfigError(f"--from-positions: required: {rule}")
            treatment = "extended" if options.positions else "anew"
            may_differ = True
        names[treatment].append(name)
        if treatment in ("anew", "unused") and not may_differ:
            misfits[name] = shape, before
    if misfits:
        raise ConfigError(*_misfit_problems(misfits, source, model, place))
    if options.positions in ("repeat", "interpolate") and not names["extended"]:
        raise ConfigError(f"--from-positions={options.positions}: no position table needs extending; leave it out")
    if not names["taken"]:
        raise ConfigError(f"--from={options.path}: none of its tensors fits the model; leave it out")
    old, new = (flattened(config.model_dump(mode="json"), "model") for config in (source, model))
    changed = tuple(
        f"{path} was {Problem.format_value(old[path]) if path in old else 'left out'}, "
        f"is {Problem.format_value(new[path]) if path in new else 'left out'}"
        for path in sorted((old.keys() | new.keys()) - {f"model.{key}" for key in _FREE})
        if old.get(path, ...) != new.get(path, ...)
    )
    return Fit(changed=changed, **{treatment: tuple(listed) for treatment, listed in names.items()})


def _misfit_problems(
    misfits: dict[str, tuple[Shape, Shape]], source: ModelConfig, model: ModelConfig, place: str
) -> list[Problem]:
    """Describe tensors that do not fit, by the key of the model that causes it.

    ``misfits`` has the shape of each tensor in the model and in the source; None where there is no such tensor.
    """
    old, new = (config.model_dump(mode="json") for config in (source, model))
    trials: dict[str, Shapes | None] = {}  # by differing key, the shapes of the source's model with the new value
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or key in _FREE:
            continue
        trial = {**old, key: new[key]} if key in new else {k: v for k, v in old.items() if k != key}
        try:
            trials[key] = Shapes.of_model(ModelConfig.model_validate(trial))
        except ConfigError:  # there is no such model
            trials[key] = None
    by_key: dict[str, dict[str, str]] = {}  # by key, a phrase for each tensor
    for name, (shape, source_shape) in misfits.items():
        if name == states.TABLES and source.vocabulary == model.vocabulary:
            cause = "ngrams" if source.ngrams != model.ngrams else "width"
        else:  # the key whose new value alone changes the tensor, or else the first key that differs
            alone = (key for key, shapes in trials.items() if shapes and shapes.of.get(name) != source_shape)
            cause = next(alone, next(iter(trials)))
        run_words, source_words = ("missing" if size is None else str(list(size)) for size in (shape, source_shape))
        if shape == source_shape:
            source_words = "hashed otherwise"
        by_key.setdefault(cause, {})[name] = f"{name} is {run_words} in this run and {source_words} in {place}"
    problems = []
    for key, phrases in by_key.items():
        others = f", as {len(phrases) - 1} more do not fit" if len(phrases) > 1 else ""
        value = f"{Problem.format_value(old[key])} as there" if key in old else "the model without it"
        fresh = all(name.startswith(_POSITIONS) for name in phrases)
        option = "--from-positions fresh" if fresh else "--from-partly"
        rule = f"{next(iter(phrases.values()))}{others}; take {value}, or {option}, which initialises what does not fit"
        problems.append(Problem(f"model.{key}", rule, new.get(key)))
    return problems


def extend_table(table: Tensor, rows: int, way: str) -> Tensor:
    """Extend a position table (n, C) to (rows, C) fp32.

    With ``repeat``, row i is row i mod n. With ``interpolate``, the first and last rows stay, and rows between are
    interpolated linearly, like the positions of Chen et al. 2023.
    """
    if way == "repeat":
        return table.float()[torch.arange(rows) % len(table)]
    return F.interpolate(table.float().T[None], rows, mode="linear", align_corners=True)[0].T


class InitialWeights:
    """The source of a run's first weights, and how the run's model uses it.

    ConfigError means that there is no such source, that it does not fit the model, or that its tokens or positions have
    another meaning in the run's data.
    """

    def __init__(self, options: WeightSource, model: ModelConfig, data: ModelData, *, trusted: bool) -> None:
        self._options, self._model = options, model
        source_type: type[_Run] | type[_Export] = _Run if (options.path / file_names.CHECKPOINTS).is_dir() else _Export
        self._source: _Run | _Export = source_type(options, trusted=trusted)
        self.place = self._source.place
        self.fit = fit(self._source.config, model, options, self.place)
        self._differences = self._source.trained_on(data).differences(data)
        self._differences.pop("data", None)  # such a run usually has other data
        rule = f"--from={options.path}: the run's data differs: "
        if "palette" in self._differences and self._source.config.vocabulary == model.vocabulary:
            advice = f"build it with --palette-from the data of {self.place}"
            raise ConfigError(f"{rule}{self._differences['palette']} than there; {advice}")
        new_tables = (name for name in (*self.fit.extended, *self.fit.anew) if name.startswith(_POSITIONS))
        if "arrangement" in self._differences and options.positions != "fresh" and not any(new_tables):
            advice = "take --from-positions fresh, or data of that size"
            raise ConfigError(f"{rule}{self._differences['arrangement']}; {advice}")
        shapes = Shapes.of_model(model)
        self._parameters = shapes.parameters
        self._taken = sum(shapes.of[name].numel() for name in self.fit.taken if name not in shapes.buffers)

    @property
    def record(self) -> dict[str, Any]:
        """The source as recorded in the run's checkpoints and exports."""
        positions = {} if self._options.positions is None else {"positions": self._options.positions}
        return self._source.record() | positions | {"parameters_taken": self._taken}

    def agree(self, ranks: Ranks, hosts: Sequence[str]) -> None:
        """Raise AgreedError on every rank unless every host has the same intact source. All ranks must call."""
        digests = ranks.gather_objects(self._source.digest)
        differing = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if differing is not None:
            first, second = (f"{digests[n][:12]} for rank {n} on {hosts[n].split()[0]}" for n in (0, differing))
            raise AgreedError(f"--from={self._options.path}: has {first}, and {second}; give all hosts the same")
        ranks.run_on_all(self._source.verify if ranks.local_rank == 0 else lambda: None)  # once per host
        if isinstance(self._source, _Run):
            self._source.checkpoint.check_trust(ranks)
            ranks.run_on_all(self._source.open)

    @torch.no_grad()
    def fill(self, model: SparseTransformer) -> None:
        """Copy the weights into a freshly initialised model on the CPU."""
        state = model.state_dict()
        for name in self.fit.taken:
            state[name].copy_(self._source.tensor(name))
        for name in self.fit.extended:
            assert self._options.positions is not None
            state[name].copy_(extend_table(self._source.tensor(name), len(state[name]), self._options.positions))
        for name in self.fit.unmasked:
            rows = slice(self._model.vocabulary)
            state[name][rows].copy_(self._source.tensor(name)[rows])

    def check(self, run: RunSetup, engine: DeepSpeedEngine) -> None:
        """Check on its checkpoint's probe that the engine has the loss of an equal source model. All ranks call."""
        same = not (self.fit.extended or self.fit.unmasked or self.fit.anew or self.fit.unused or self.fit.changed)
        if same and isinstance(self._source, _Run) and self._options.weights == TRAINED:
            probe = self._source.checkpoint.probe
            if probe is not None:
                probe.check(engine, run.config, run.ranks)

    def lines(self) -> list[str]:
        """Return lines for the user: what was taken, and what begins anew."""
        lines = [
            f"from {self.place}: {self._taken:,} of {self._parameters:,} parameters; "
            "the optimiser and the schedule start over, at step 0"
        ]
        shapes, source_shapes = Shapes.of_model(self._model).of, Shapes.of_model(self._source.config).of
        extended = [f"{name} from {source_shapes[name][0]} to {shapes[name][0]} rows" for name in self.fit.extended]
        for treatment, phrases in (
            (f"extended ({self._options.positions})", extended),
            ("taken except for the row of masks", self.fit.unmasked),
            ("newly initialised", self.fit.anew),
            ("not used", self.fit.unused),
            ("the model differs", self.fit.changed),
        ):
            if phrases:
                others = f" and {len(phrases) - _MOST_NAMES} more" if len(phrases) > _MOST_NAMES else ""
                lines.append(f"from {self.place}: {treatment}: {', '.join(phrases[:_MOST_NAMES])}{others}")
        if self._differences:
            kinds = "; ".join(self._differences.values())
            lines.append(f"notice: from {self.place}: the data is of a different kind: {kinds}")
        return lines


def open_initial(run: RunSetup, checkpoint: Checkpoint | None = None) -> InitialWeights | None:
    """Open the source of a run's first weights; None if they are random or come from its own checkpoint."""
    if run.source is None or checkpoint is not None:
        return None
    return InitialWeights(run.source, run.config.model, run.data.identity, trusted=run.trusted)


def agree_on_initial(
    run: RunSetup, initial: InitialWeights | None, checkpoint: Checkpoint | None, hosts: Sequence[str]
) -> InitialWeights | None:
    """Agree on the source among all ranks; return None if the run resumes from a checkpoint. All ranks must call.

    AgreedError on every rank means that the source is damaged or differs between hosts.
    """
    if run.source is None:
        return None
    if checkpoint is not None:
        if run.ranks.is_first:
            say(f"--from={run.source.path}: not needed, because the run continues from its own checkpoint")
        return None
    if not all(run.ranks.gather_objects(initial is not None)):
        raise AgreedError(f"{run.folder}: a checkpoint has disappeared since the start; start again")
    assert initial is not None
    initial.agree(run.ranks, hosts)
    return initial
