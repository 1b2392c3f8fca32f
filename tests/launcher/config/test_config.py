"""RunConfig: every wrong field is named, and every configuration that is shipped is right."""

import json
from pathlib import Path

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.config.deepspeed_keys import KNOWN, OWNED
from longstride.launcher.config.loading import DEEPSPEED_CONFIGS
from tests.harness.runs import configuration


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(configuration(Path("data"), Path("run"))))
    return file


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.learnign_rate=1", "train.learnign_rate: unknown key; nearest learning_rate"),
        ("trian={}", "trian: unknown key; nearest train"),
        ("train.learning_rate=-1", "train.learning_rate=-1: must be greater than 0"),
        ("train.betas=[0.9, 1.0]", "train.betas[1]=1.0: must be less than 1"),
        ("train.schedule=linear", "train.schedule=\"linear\": must be 'cosine' or 'constant'"),
        (
            'train.schedule={"type": "wsd", "decay_fraction": 2}',
            "train.schedule.decay_fraction=2: must be less than or equal to 1",
        ),
        ("train.optimizer=muon", 'train.optimizer="muon": must be an object'),
        ('train.optimizer={"type": "mun"}', 'train.optimizer.type="mun": is not known; nearest muon'),
        (
            'train.optimizer={"type": "muon", "rates": {"matrix": 1}}',
            "train.optimizer.rates.matrix: unknown key; nearest matrices",
        ),
        (
            'model.attention={"type": "indexed", "keys": 8, "blok": 2}',
            "model.attention.blok: unknown key; nearest block",
        ),
        ("train.final_learning_rate=1", "train.final_learning_rate=1.0: must be at most learning_rate 0.003"),
        ("train.global_batch=7", "train.global_batch=7: must be a multiple of micro_batch 2; nearest 6, 8"),
        ("model.contxt=64", "model.contxt: unknown key; nearest context"),
        ("data.path=", 'data.path="": String should have at least 1 character'),
        ("deepspeed=zero1_bf61", 'deepspeed="zero1_bf61": no such file in ds_configs; nearest zero1_bf16'),
        ("deepspeed=3", "deepspeed=3: must be an object"),
        ("deepspeed.zero_optimisation={}", "deepspeed.zero_optimisation: unknown key; nearest zero_optimization"),
        ("deepspeed.zero_optimization=2", "deepspeed.zero_optimization=2: must be an object"),
        ("train.keep_last=0", "train.keep_last=0: must be greater than 0"),
        ("train.keep_best=-1", "train.keep_best=-1: must be greater than or equal to 0"),
        ('train.stop_when={"evaluations": 0}', "train.stop_when.evaluations=0: must be greater than 0"),
        ('train.stop_when={"evaluations": 2, "by": -1}', "train.stop_when.by=-1: must be greater than or equal to 0"),
        ('train.stop_when={"by": 0.5}', "train.stop_when.evaluations: required, and missing"),
        ("train.guards.spike.window=1", "train.guards.spike.window=1: must be greater than or equal to 2"),
        ("train.guards.spike.deviations=0", "train.guards.spike.deviations=0: must be greater than 0"),
        ("train.guards.non_finite=ignore", "train.guards.non_finite=\"ignore\": must be 'skip', 'rewind' or 'stop'"),
        ("train.guards.max_skips=1", "train.guards.max_skips: unknown key; nearest max_skips_in_a_row"),
        ("train.epochs=0", "train.epochs=0: must be greater than 0"),
        ("train.epochs=many", 'train.epochs="many": must be a valid number'),
        ("deepspeed.elasticity={}", None),
    ],
)
def test_wrong_field_is_named_with_its_rule(path: Path, override: str, line: str | None) -> None:
    lines = refused(path, override)
    if line is None:
        assert lines[0].startswith("deepspeed.elasticity: unknown key;")
    else:
        assert lines == [line]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("learning_rat=3", "did you mean train.learning_rate or train.context_schedule.learning_rate"),
        ("train.rotary=true", "did you mean model.rotary"),
        ("model.momentum=0.5", "did you mean train.optimizer.momentum"),
        ("gradient_clipping=1", "did you mean deepspeed.gradient_clipping"),
        ("heads=2", "did you mean model.heads or model.attention.heads or model.feed_forward.heads"),
        ("nothing_like_it=2", "known: model, data, train, deepspeed, notes"),
    ],
)
def test_a_key_at_the_wrong_place_is_led_to_its_own(path: Path, override: str, rule: str) -> None:
    assert refused(path, override) == [f"{override.partition('=')[0]}: unknown key; {rule}"]


def test_a_key_of_another_type_is_not_led_to_where_it_is(path: Path) -> None:
    told = refused(path, 'model.attention={"type": "match", "window": 4, "stride": 3}')
    assert told == ["model.attention.stride: unknown key; known: type, window, order, matches, key_value_heads"]


def test_fewer_steps_on_the_command_line_shorten_a_files_warm_up(path: Path) -> None:
    def warm_up(*overrides: str) -> tuple[int, list[str]]:
        told: list[str] = []
        return load_config(path, overrides, told.append).train.warmup_steps, told

    content = json.loads(path.read_text())
    content["train"] |= {"steps": 100, "warmup_steps": 50}
    path.write_text(json.dumps(content))
    rule = "in proportion to train.steps=6; set it too for another value"
    assert warm_up("train.steps=6") == (3, [f"train.warmup_steps=50: becomes 3, {rule}"])
    assert warm_up("train.steps=50") == (50, [])
    assert warm_up("train.steps=6", "train.warmup_steps=2") == (2, [])
    assert refused(path, "train.steps=6", "train.warmup_steps=7") == ["train.warmup_steps=7: must be at most steps 6"]
    assert refused(path, "train.steps=0")[0] == "train.steps=0: must be greater than 0"
    content["train"] |= {"epochs": content["train"].pop("steps")}  # of which nobody knows yet how many steps they are
    path.write_text(json.dumps(content))
    assert warm_up("train.steps=20")[0] == 2
    content["train"] |= {"steps": 40, "epochs": None}
    path.write_text(json.dumps(content))
    assert refused(path, "train.steps=6") == ["train.warmup_steps=50: must be at most steps 6"]
    assert refused(path) == ["train.warmup_steps=50: must be at most steps 40"]


def test_every_wrong_field_is_told_at_once(path: Path) -> None:
    overrides = ("model.layers=0", "data.sed=1", "train.steps=-1", "deepspeed.optimizer={}", "nots=1")
    assert refused(path, *overrides) == [
        "model.layers=0: must be greater than 0",
        "data.sed: unknown key; nearest seed",
        "train.steps=-1: must be greater than 0",
        "deepspeed.optimizer: give train.optimizer, train.learning_rate and train.weight_decay instead",
        "nots: unknown key; nearest notes",
    ]


@pytest.mark.parametrize("key", OWNED)
def test_keys_that_are_ours_are_refused_with_their_place(path: Path, key: str) -> None:
    assert refused(path, f"deepspeed.{key}=1") == [f"deepspeed.{key}: {OWNED[key]}"]


def test_resolved_configuration_loads_again(path: Path, tmp_path: Path) -> None:
    config = load_config(path, ["train.betas=[0.9, 0.95]", "notes=a try"])
    (tmp_path / "resolved.json").write_text(json.dumps(config.to_json()))
    assert load_config(tmp_path / "resolved.json") == config


@pytest.mark.parametrize(
    ("sharing", "processes", "line"),
    [
        (
            1,
            3,
            "train.global_batch=8: must be a multiple of micro_batch 2 × 3 processes; nearest 6, 12; or start 2 or 4",
        ),
        (1, 32_768, "32768 processes: a run has at most 16,384; start fewer"),
        (2, 1, "train.sequence_parallel=2: must divide the 1 process; nearest 1; or start 2 processes"),
        (2, 5, "train.sequence_parallel=2: must divide the 5 processes; nearest 1; or start 6 processes"),
        (
            2,
            6,
            "train.global_batch=8: must be a multiple of micro_batch 2 × 6 processes / 2 that share a context; nearest "
            "6, 12; or start 4 or 8 processes",
        ),
    ],
)
def test_number_of_processes_that_does_not_fit_is_refused(path: Path, sharing: int, processes: int, line: str) -> None:
    config = load_config(path, [f"train.sequence_parallel={sharing}"])
    for fitting in (2, 4, 4 * sharing):
        config.check_world_size(fitting)
    with pytest.raises(ConfigError) as caught:
        config.check_world_size(processes)
    assert str(caught.value).startswith(line)


def test_experts_divide_the_processes(path: Path) -> None:
    config = load_config(path, ["train.expert_parallel=2", EXPERTS])
    config.check_world_size(4)
    with pytest.raises(ConfigError, match=r"^train\.expert_parallel=2: must divide the 1 process; nearest 1$"):
        config.check_world_size(1)


ALONE = "only applies with keep_last, because otherwise all checkpoints stay"
UNEVALUATED = "needs evaluations during training, but evaluate_every is"
BEST = ("train.keep_best=3", "train.keep_last=1")
STOP = 'train.stop_when={"evaluations": 2}'
EXPERTS = 'model.feed_forward=[{"type": "experts", "count": 4}, {"type": "experts", "count": 6}]'


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["deepspeed.fp16.enabled=true", "deepspeed.bf16.enabled=true"],
            "deepspeed.fp16.enabled=true: fp16 and bf16 cannot both be on",
        ),
        (
            ["deepspeed.bf16.enabled=true", "deepspeed.data_types.grad_accum_dtype=fp32"],
            'deepspeed.data_types.grad_accum_dtype="fp32": ZeRO 0 gathers gradients in the model\'s own bf16; take',
        ),
        (
            ['train.optimizer={"type": "adafactor"}', "deepspeed=zero2_bf16"],
            'train.optimizer.type="adafactor": needs complete matrices, but ZeRO 2 divides them; take muon or adamw',
        ),
        (
            ["train.sequence_exchange=keys"],
            'train.sequence_exchange="keys": only applies with sequence_parallel; give that too, '
            "such as 2, or leave this out",
        ),
        (
            ["train.sequence_parallel=2", "train.compile=true"],
            "train.compile=true: compiles complete blocks, but train.sequence_parallel exchanges rows within them; "
            "give false",
        ),
        (
            ["train.sequence_parallel=7"],
            "model.context=64: must be a multiple of the 7 processes that share each context; nearest 63 or 70, or ",
        ),
        (
            ["train.sequence_parallel=4", "train.sequence_exchange=heads"],
            "model.heads=2: must be a multiple of the 4 processes that share each context, as ",
        ),
        (
            ["train.expert_parallel=2"],
            "train.expert_parallel=2: divides experts, and no layer of model.feed_forward has",
        ),
        (
            ["train.expert_parallel=4", EXPERTS],
            "train.expert_parallel=4: must divide the experts of each layer, 4, 6; nearest 2",
        ),
        (
            ["train.expert_parallel=2", EXPERTS, "train.compile=true"],
            "train.compile=true: compiles complete blocks, but train.expert_parallel exchanges rows within them; ",
        ),
        (
            ["train.expert_parallel=2", EXPERTS, 'train.optimizer={"type": "adafactor"}'],
            'train.optimizer.type="adafactor": clips the update of all experts, but train.expert_parallel divides',
        ),
        (["train.steps=null"], "train.steps: required, and missing; or give epochs"),
        (["train.epochs=2", "train.steps=9"], "train.epochs=2.0: conflicts with steps 9; give only one of them"),
        (["train.keep_every=100"], f"train.keep_every=100: {ALONE}"),
        (["train.keep_best=3"], f"train.keep_best=3: {ALONE}"),
        ([*BEST, "train.evaluate_every=0"], f"train.keep_best=3: {UNEVALUATED} 0; set"),
        ([*BEST, "train.evaluate_every=null"], f"train.keep_best=3: {UNEVALUATED} null; set it, such as 1000"),
        ([STOP, "train.evaluate_every=0"], f"train.stop_when.evaluations=2: {UNEVALUATED} 0; set it, such as 1000"),
        ([STOP, "train.evaluate_every=null"], f"train.stop_when.evaluations=2: {UNEVALUATED} null; set it, such as "),
    ],
)
def test_settings_that_contradict_each_other_are_refused(path: Path, overrides: list[str], line: str) -> None:
    (found,) = refused(path, *overrides)
    assert found.startswith(line)


@pytest.mark.parametrize("file", sorted(DEEPSPEED_CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_deepspeed_configuration_is_right(path: Path, file: Path) -> None:
    section = load_config(path, [f"deepspeed={file.stem}"]).deepspeed
    assert section["gradient_clipping"] == 1.0
    assert f"zero{section['zero_optimization']['stage']}_" in file.stem


def test_no_key_is_both_known_and_owned() -> None:
    assert not set(KNOWN) & set(OWNED)


@pytest.mark.parametrize(
    "location",
    ["https://me:secret@host/data", "https://host/data?signature=secret", "s3://key@b/data", "https://h/a?b=\nsecret"],
)
def test_credentials_in_the_data_path_are_refused_and_not_shown(path: Path, location: str) -> None:
    """They would be saved with the run."""
    (line,) = refused(path, f"data.path={location}")
    assert line.startswith("data.path=") and "leave them out" in line
    assert "secret" not in line and "key" not in line


@pytest.mark.parametrize("location", ["/a/b@c?d", "s3://bucket/a@b", "https://host:8080/data", "data"])
def test_paths_and_plain_urls_are_taken(path: Path, location: str) -> None:
    assert load_config(path, [f"data.path={location}"]).data.path == location


def test_the_streaming_order_is_refused_with_the_command_that_converts(path: Path) -> None:
    (line,) = refused(path, "data.order=streaming", "data.path=shards", "data.modality=audio", "data.extension=wav")
    assert line == (
        'data.order="streaming": is no longer supported: run `longstride data index shards --output DIR --modality '
        "audio --extension wav`, set data.path to DIR, leave out order, modality and extension; such as exact, in "
        "a new run"
    )
    (line,) = refused(path, "data.modality=text")
    assert line.startswith('data.modality="text": is stored in the data folder; leave it out')


def test_keys_of_later_versions_are_only_saved_if_they_are_set(path: Path) -> None:
    saved = load_config(path).to_json()["train"]
    assert not {"optimizer", "sequence_parallel", "sequence_exchange", "expert_parallel"} & saved.keys()
    muon = load_config(path, ["train.sequence_parallel=1", 'train.optimizer={"type": "muon"}'])
    assert muon.to_json()["train"]["sequence_parallel"] == 1 and RunConfig.model_validate(muon.to_json()) == muon
    properties = RunConfig.model_json_schema()["$defs"]["TrainConfig"]["properties"]
    assert {"sequence_parallel", "sequence_exchange"} < properties.keys()


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        (["train.timeout_seconds=1800"], 900.0),
        (["train.timeout_seconds=60"], 30.0),
        (["train.timeout_seconds=60", "data.path=https://example.org/data", "data.remote.attempts=5"], 300.0),
        (["data.worker_timeout_seconds=7"], 7.0),
    ],
)
def test_worker_is_waited_for_less_than_a_rank_and_longer_than_a_store_tries(
    path: Path, overrides: list[str], seconds: float
) -> None:
    assert load_config(path, overrides).worker_timeout_seconds == seconds
