"""The configuration decides, a checkpoint supplies only state: all keys that may change, in every layout."""

import copy
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
from pydantic import BaseModel

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.order import StreamState
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints import Saver, load, open_checkpoint, restore
from longstride.launcher.checkpoints.checkpoint import Checkpoint
from longstride.launcher.config import RunConfig, TrainConfig
from longstride.launcher.config.deepspeed_keys import _Section
from longstride.launcher.config.run_config import schema_entries
from longstride.launcher.engine import EngineStep, build_engine, check_engine, prepare_accelerator
from longstride.launcher.engine.build import _PART_MODELS
from longstride.launcher.engine.optimizer import rate_factor
from longstride.launcher.engine.states import dynamic_scale, loss_scaler
from longstride.launcher.identity import check_matches
from longstride.launcher.models import ModelData
from longstride.launcher.ranks.processes import Ranks, process_group
from tests.harness.runs import configuration

# Of what DeepSpeed calls in torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
RANKS = Ranks()
LEAST_KEYS = 90
STREAM = StreamState(fingerprint="0" * 64, seed=0, epoch=0, step=2, global_batch=8)
DATA = ModelData(modality_named("text"), {}, fingerprint=STREAM.fingerprint)
LAYOUT_KEYS = {
    f"deepspeed.zero_optimization.{name}" for name in ("round_robin_gradients", "parameter_alignment", "sub_group_size")
}
# What the cases vary themselves; what only DeepSpeed refuses, or can be set with what is refused alone.
APART = {
    *(
        "train.output",
        "train.epochs",
        "train.optimizer.type",
        "train.schedule.type",
        "deepspeed.zero_optimization.stage",
    ),
    *("deepspeed.fp16.enabled", "deepspeed.bf16.enabled", "deepspeed.data_types.grad_accum_dtype"),
    *("deepspeed.fp16.loss_scale", "deepspeed.aio.use_gds", "deepspeed.bf16.bf16_optimizer_states"),
    *("deepspeed.gradient_predivide_factor", "deepspeed.prescale_gradients"),
}
# What is measured and said, which DeepSpeed keeps for the whole process; old names of keys; what is refused whole.
SKIPPED = tuple(
    f"deepspeed.{name}"
    for name in (
        *("comms_logger", "dump_state", "flops_profiler", "log_level", "memory_breakdown", "steps_per_print"),
        *("timers", "wall_clock_breakdown", "zero_optimization.cpu_offload", "zero_optimization.zenflow"),
        "zero_optimization.stage3_gather_fp16",
    )
)
LOADED_PARTS = ("zero_optimization", "fp16", "bf16")  # monitors and the compiler are no part of what is loaded
# Where the value that is made from the type breaks the rule of another key.
OTHERS: dict[str, Any] = {
    "train.steps": 16,
    "train.global_batch": 16,
    "train.learning_rate": 0.01,
    "train.final_learning_rate": 0.001,
    "train.schedule": {"type": "wsd"},
    "train.betas": [0.8, 0.95],
    "train.keep_last": 3,
    "deepspeed.fp16.min_loss_scale": 2**11,
    "deepspeed.zero_optimization.allgather_bucket_size": 10_000,
}
OPTIMIZERS = {"fp32": "muon", "bf16": "muon", "fp16": "adamw"}


class Layout(NamedTuple):
    """What decides about DeepSpeed's optimiser and its files."""

    stage: int
    precision: str

    def section(self) -> dict[str, Any]:
        section: dict[str, Any] = {"zero_optimization": {"stage": self.stage}, "gradient_clipping": 1.0}
        return section | ({} if self.precision == "fp32" else {self.precision: {"enabled": True}})


LAYOUTS = [Layout(stage, precision) for stage in range(4) for precision in ("fp32", "bf16", "fp16")]
SAMPLED = [Layout(0, "fp32"), Layout(0, "fp16"), Layout(1, "bf16"), Layout(2, "fp16"), Layout(3, "bf16")]


def other_value(entry: dict[str, Any]) -> Any:
    """Another value than an entry's default, by its type; None where the type has no other by itself."""
    default = entry.get("default")
    for each in (entry, *entry.get("anyOf", ())):
        if "enum" in each:
            return next(value for value in each["enum"] if value != default)
        if each.get("type") == "boolean":
            return not default
        if each.get("type") == "integer":
            return 2 * (default if isinstance(default, int) else 0) + 1
        if each.get("type") == "number":
            return (default if isinstance(default, float) and default else 1.0) / 2
    return None


def known_entries(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of a class of DeepSpeed's, whose own schema pydantic cannot write."""
    words = {bool: "boolean", int: "integer", float: "number"}
    for name, field in model.model_fields.items():
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        place = f"{prefix}.{field.alias or name}"
        yield place, {"default": field.default, "anyOf": [{"type": words.get(kind)} for kind in kinds]}
        for kind in kinds:
            if isinstance(kind, type(BaseModel)):
                yield from known_entries(kind, place)


def other_values() -> dict[str, Any]:
    """Every key of `train` and `deepspeed`, by its path, with another value than its default."""
    schemas = {"train": TrainConfig.model_json_schema(), "deepspeed": _Section.model_json_schema()}
    own = (pair for prefix, schema in schemas.items() for pair in schema_entries(schema, prefix))
    theirs = (pair for name in LOADED_PARTS for pair in known_entries(_PART_MODELS[name], f"deepspeed.{name}"))
    values = {
        place: OTHERS.get(place, other_value(entry))
        for place, entry in (*own, *theirs)
        if place not in APART and not place.startswith(SKIPPED)
    }
    return {place: value for place, value in values.items() if value is not None}


def with_values(content: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of a configuration with other values at some paths."""
    content = copy.deepcopy(content)
    for path, value in values.items():
        *parents, name = path.split(".")
        part = content
        for parent in parents:
            if part.get(parent) is None:
                part[parent] = {}
            part = part[parent]
        part[name] = value
    return content


# What training moves, of the engine, its optimisers, its schedule and its loss scaler; all else is a setting.
MOVED = frozenset(
    (
        *("global_steps", "global_samples", "skipped_steps", "micro_steps", "last_epoch", "_step_count", "_last_lr"),
        *(
            "state",
            "params",
            "param_groups",
            "cur_scale",
            "cur_iter",
            "last_overflow_iter",
            "cur_hysteresis",
            "overflow",
            "lr",
        ),
        *("loaded_checkpoint_mp_world_size", "loaded_checkpoint_dp_world_size"),  # DeepSpeed's notes of the load
    )
)


def plain(value: Any) -> bool:
    """Whether a value is made of numbers, names and types alone."""
    if isinstance(value, (list, tuple)):
        return all(map(plain, value))
    if isinstance(value, dict):
        return all(map(plain, (*value.keys(), *value.values())))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def settings_of(engine: Any) -> dict[str, Any]:
    """Every setting of a live engine, by where it stands."""
    parts = {
        "engine": vars(engine),
        "optimizer": vars(engine.optimizer),
        "basic": vars(engine.basic_optimizer),
        "schedule": vars(engine.lr_scheduler),
        "scaler": vars(loss_scaler(engine)) if loss_scaler(engine) is not None else {},
        **{f"group {number}": group for number, group in enumerate(engine.basic_optimizer.param_groups)},
    }
    return {
        f"{part}.{name}": value
        for part, content in parts.items()
        for name, value in content.items()
        if name not in MOVED and plain(value)
    }


def base_config(layout: Layout, folder: Path, **section: Any) -> RunConfig:
    """A tiny run."""
    content = configuration(Path("data"), folder / "run")
    attention = {"type": "local", "window": 4}
    content["model"] |= {"context": 16, "layers": 1, "width": 16, "attention": attention}
    content["train"] |= {"probe": False, "optimizer": {"type": OPTIMIZERS[layout.precision]}}
    return RunConfig.model_validate(content | {"deepspeed": layout.section() | section})


def accepted(base: RunConfig, values: dict[str, Any], checkpoint: Checkpoint) -> tuple[RunConfig, set[str]]:
    """The configuration with those of the values that a resume does not refuse by name; and what it refuses."""
    values, refused = dict(values), set[str]()
    while True:
        try:
            config = RunConfig.model_validate(with_values(base.to_json(), values))
            check_engine(config, RANKS)
            check_matches(checkpoint, config, DATA)
        except ConfigError as error:
            paths = [problem.path for problem in error.problems if problem.path]
            named = {key for key in values if key in paths}
            named = named or {key for key in values for path in paths if key.startswith(f"{path}.")}
            assert named, f"refused, and by none of the keys that were changed: {error}"
            refused |= named
            values = {key: value for key, value in values.items() if key not in named}
        else:
            return config, refused


def take_steps(engine: Any, count: int) -> None:
    """Some steps with drawn bytes."""
    for _ in range(count):
        step = EngineStep(engine)
        for number in range(engine.gradient_accumulation_steps(), 0, -1):
            loss = engine.module(torch.randint(256, (2, 16)), return_nats=True).mean()
            step.accumulate(loss) if number > 1 else step.take(loss)


def saved(config: RunConfig, scale: float = 2.0**9) -> Checkpoint:
    """The checkpoint of a run after two steps, whose loss scale, where it moves, has moved."""
    engine = build_engine(config, RANKS)
    take_steps(engine, 2)
    if (scaler := dynamic_scale(engine)) is not None:
        moved = {"cur_scale": scale, "cur_iter": 7, "last_overflow_iter": 3, "cur_hysteresis": 1}
        scaler |= {name: value for name, value in moved.items() if name in scaler}
    (Path(config.train.output) / "checkpoints").mkdir(parents=True)
    saver = Saver(engine, config, RANKS, pytest.fail)
    saver.saved = -1
    saver.save_last(STREAM, {})
    engine.destroy()
    return open_checkpoint(Path(config.train.output), None)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process, and nothing left of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        patch.setenv("LOCAL_RANK", "0")
        prepare_accelerator()
        with process_group(RANKS, 60):
            yield
        deepspeed.checkpointing.reset()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each in SAMPLED else pytest.mark.campaign) for each in LAYOUTS],
    ids=lambda layout: f"zero{layout.stage}-{layout.precision}",
)
def test_live_settings_after_a_load_are_a_fresh_engines(layout: Layout, tmp_path: Path) -> None:
    """All keys at once, in the layout that saved and in another; one that may not change is refused by its name."""
    values = other_values()
    base = base_config(layout, tmp_path)
    checkpoint = saved(base)
    other_stage = {"deepspeed.zero_optimization.stage": (layout.stage + 1) % 4}
    same = {key: value for key, value in values.items() if key not in LAYOUT_KEYS}
    for changes in (same, values | other_stage):
        config, refused = accepted(base, changes, checkpoint)
        assert len(changes) - len(refused) > LEAST_KEYS and "train.global_batch" in refused
        assert not refused & {"deepspeed.gradient_clipping", "train.betas", "train.weight_decay", "train.schedule"}
        engine = build_engine(config, RANKS)
        fresh = settings_of(engine)
        assert fresh["optimizer.clip_grad"] == 0.5 if "optimizer.clip_grad" in fresh else engine.gradient_clipping()
        restore(engine, checkpoint, config, RANKS)
        assert settings_of(engine) == fresh
        assert_state_is_the_checkpoints(engine, config)
        if changes is same:  # as a rewind does, whose checkpoint may be of the time before the change
            take_steps(engine, 1)
            before = settings_of(engine)
            load(engine, checkpoint, config, RANKS)
            assert settings_of(engine) == before
            assert_state_is_the_checkpoints(engine, config)
        engine.destroy()


def assert_state_is_the_checkpoints(engine: Any, config: RunConfig) -> None:
    """Whether what moves is where the checkpoint of ``saved`` had it, within the bounds of the configuration."""
    assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (2, 2)
    for group in engine.basic_optimizer.param_groups:
        assert group["lr"] == config.train.rate_of(group["part"]) * rate_factor(config.train, 2)
    if (scaler := dynamic_scale(engine)) is not None:
        assert (scaler["cur_scale"], scaler["cur_iter"], scaler["last_overflow_iter"]) == (2**11, 7, 3)
        assert scaler.get("cur_hysteresis") == scaler.get("delayed_shift")  # of which another number is asked for


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.campaign), 2, pytest.param(3, marks=pytest.mark.campaign)]
)
def test_loss_scale_is_taken_over_where_it_moves_before_and_after(stage: int, tmp_path: Path) -> None:
    """From fixed or moving to fixed or moving, in the layout that saved and in another."""
    layout = Layout(stage, "fp16")
    sections: dict[str, dict[str, Any]] = {
        "moving": {"loss_scale": 0, "initial_scale_power": 12},
        "fixed": {"loss_scale": 64.0},
        "other": {"loss_scale": 32.0},
    }
    for before in ("moving", "fixed"):
        folder = tmp_path / before
        checkpoint = saved(base_config(layout, folder, fp16={"enabled": True} | sections[before]))
        for after, to_stage in (("moving", stage), ("other", stage), ("moving", (stage + 1) % 4)):
            config = base_config(Layout(to_stage, "fp16"), folder, fp16={"enabled": True} | sections[after])
            engine = build_engine(config, RANKS)
            fresh = dict(vars(loss_scaler(engine)))
            restore(engine, checkpoint, config, RANKS)
            moved = {"cur_scale": 2.0**9, "cur_iter": 7, "last_overflow_iter": 3}
            # ZeRO 0 counts no hysteresis: from there, it begins anew
            moved |= {"cur_hysteresis": 1} if "cur_hysteresis" in fresh and stage else {}
            # A fixed scale of ZeRO 0 counts steps.
            counted = {"cur_iter": engine.global_steps} if after == "other" and "cur_iter" in fresh else {}
            expected = fresh | (moved if before == after == "moving" else counted)
            assert vars(loss_scaler(engine)) == expected
            take_steps(engine, 1)
            engine.destroy()
