"""`longstride plan`: what it prints, what it refuses, and that it starts nothing."""

from pathlib import Path

import pytest

from longstride.launcher import cli
from longstride.launcher.config import load_config
from longstride.launcher.planning.costs import parameter_parts, states
from longstride.launcher.planning.plan import describe, run_length
from longstride.launcher.planning.rehearsal import activations
from tests.launcher.conftest import Refusal
from tests.launcher.planning.conftest import Plan


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in which no data lies."""
    monkeypatch.chdir(tmp_path)


def test_table_tells_the_plan(capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    assert cli.main(["plan", "enwik8_fixed", "--processes", "1", "8"]) == 0
    out = capsys.readouterr().out
    for text in (
        "parameters  94,949,888, 0.35 GiB in fp32",
        "  feed-forward      62,991,360   66.3%",
        "  attention to 25.79% of the pairs of dense attention; by layer:",
        "     25.79%  layers 0, 1, 2, 3, 4, 5, … (30 layers)",
        "the run  98,304 bytes a step, 73,240 steps, 80 epochs",
    ):
        assert text in out.splitlines()
    assert out.count("*") == 3  # the configured stage of each number of processes, and the legend
    found = plan("enwik8_fixed", "--processes", "1", "8")
    assert [(row["processes"], row["stage"]) for row in found["memory"]] == [(w, s) for w in (1, 8) for s in range(4)]
    # 64.5 keys of the own block and 32 of each of 0 … 95 earlier ones, of 6,144.5
    assert found["attention"]["density"] == pytest.approx([(64.5 + 32 * 47.5) / 6_144.5] * 30)


def test_what_content_decides_is_told_as_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "enwik8_routing", "--processes", "1", "model.layers=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (share,) = (line for line in lines if "of the pairs of dense" in line)
    assert share.startswith("  attention to at most 6.15% of the pairs")
    assert any(line.endswith("  layers 0, 1: at most 256 keys a query of 4 routed heads") for line in lines)


ELSEWHERE = ("enwik8_fixed", "data.path=elsewhere")


@pytest.mark.parametrize(
    ("words", "is_full"),
    [
        (("enwik8_fixed",), True),  # as published
        (("cifar10_strided",), True),
        (("enwik8_fixed", "data.separator=10"), False),
        (("enwik8_fixed", "data.packing=false"), False),
        (("enwik8_fixed", "data.path={data}", "model.context=1536"), True),
        (("enwik8_fixed", "data.path={data}", "data.separator=10"), False),
        (("enwik8_fixed", "data.path={data}", "data.packing=false"), False),
        (ELSEWHERE, False),  # sounds or texts
        ((*ELSEWHERE, "data.packing=true"), True),
        ((*ELSEWHERE, "data.packing=true", "data.separator=10"), False),
    ],
    ids=str,
)
def test_bytes_are_at_most_the_positions_where_these_may_hold_others(
    data: Path, words: tuple[str, ...], is_full: bool
) -> None:
    name, *overrides = (word.format(data=data) for word in words)
    assert run_length(load_config(name, ["train.epochs=null", "train.steps=3", *overrides]), None).is_full is is_full


@pytest.mark.parametrize(("overrides", "most"), [((), ""), (("data.separator=10",), "up to ")])
def test_bytes_of_the_run_say_whether_they_are_a_bound(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], most: str
) -> None:
    assert cli.main(["plan", "paper_small", "train.steps=3", "data.packing=true", "model.layers=1", *overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    (a_step,) = (line for line in lines if line.startswith("the run  "))
    assert a_step.startswith(f"the run  {most}") and a_step.startswith("the run  up to") == bool(most)
    assert sum(line.startswith(f"  {most}") and " bytes and " in line for line in lines) == 1


def test_json_adds_up(plan: Plan) -> None:
    found = plan("cifar10_strided", "train.epochs=12")
    parts = dict(found["parameters"])
    assert parts.pop("total") == sum(parts.values()) == 59_196_928
    step, length = found["step"], found["length"]
    flops = step["forward_flops"] + step["backward_flops"] + step["recompute_flops"]
    assert length["steps"] == 36_000
    assert length["flops"] == 36_000 * flops
    assert length["tokens"] == 36_000 * length["tokens_per_step"] == 12 * 48_000 * 3_072
    assert step["dense_flops"] > 2 * flops
    for row in found["memory"]:
        states = sum(row[name] for name in ("weights", "gradients", "masters", "moments", "average", "buffers"))
        for name, each in found["activations"].items():
            assert row[f"peak_{name}"] == states + max(each["peak"], row["at_step"])
    assert {row["processes"] for row in found["memory"]} == {8}


def test_plan_is_made_for_a_kind_of_device(plan: Plan) -> None:
    """A GPU where nothing says otherwise, what --device tells, or the CPU that the configuration names."""
    words = ["paper_small", "deepspeed=zero1_fp32", "model.dropout=0.1", "model.layers=2"]
    unnamed, gpu, cpu, named = (
        plan(*words, *more) for more in ([], ["--device", "cuda"], ["--device", "cpu"], ["model.backend=cpu"])
    )
    assert unnamed == gpu and gpu["device"] == "cuda"
    assert cpu == named and cpu["device"] == "cpu"
    gpus, cpus = (each["memory"][1] for each in (gpu, cpu))  # stage 1
    assert (gpus["buffers"], cpus["buffers"]) == (4 * 500_000_000, 4 * cpu["parameters"]["total"])
    assert cpu["activations"]["kept"]["kept"] > gpu["activations"]["kept"]["kept"]  # dropout's masks
    for found, device in ((gpu, "GPU"), (cpu, "CPU")):
        assert f"memory of a process on a {device}, GiB: fp32, micro-batch 1" in describe(found).splitlines()


def test_without_recomputation_nothing_is_recomputed(plan: Plan) -> None:
    found = plan("paper_small")
    assert found["activation_checkpointing"] is False and found["sequence"] is None
    assert found["step"]["recompute_flops"] == 0
    assert {row["processes"] for row in found["memory"]} == {2}  # its batch allows no more


def test_shared_contexts_are_told(plan: Plan) -> None:
    words = ["music_65k", "model.context=16384", "model.layers=4"]
    found = plan(*words, "train.sequence_parallel=4", "--processes", "4", "8")
    lines = describe(found).splitlines()
    assert "a context over 4 processes: 4,096 positions and 1/4 of the work each" in lines
    by_layer = [line for line in lines if line.startswith("    by heads ")]
    assert by_layer[0].endswith("keys; layer 0")
    assert "columns; " in by_layer[1] and by_layer[1].endswith("layers 1, 3")
    assert found["sequence"]["micro_batches"] == [8, 4]
    assert [each["taken"] for each in found["sequence"]["layers"]] == ["keys", "columns"] * 2
    assert found["activations"]["recomputed"]["calls"] > 0
    alone = plan("paper_small", "train.sequence_parallel=1", "model.layers=1")
    assert "a context over" not in describe(alone)  # of one process, which sends nothing


@pytest.mark.campaign
def test_million_positions_are_planned(plan: Plan) -> None:
    found = plan("music_1m")
    assert found["length"]["tokens_per_step"] == 2**20
    assert found["step"]["dense_flops"] > 300 * found["step"]["forward_flops"]


@pytest.mark.parametrize(
    "name, processes",
    [
        ("cifar10_dense", 8),
        ("enwik8_fixed", 8),
        ("imagenet64_strided", 8),
        ("music_65k", 8),
        pytest.param("music_262k", 8, marks=pytest.mark.campaign),
        ("music_1m", 1),
    ],
)
def test_published_run_fits_the_cards_that_it_names(name: str, processes: int) -> None:
    config = load_config(name)
    held = states(sum(parameter_parts(config.model).values()), config, processes, config.zero_stage)
    assert held.peak(activations(config, checkpointing=True)) < 14e9  # of 16, the rest for what is not counted


def test_device_that_contradicts_the_configuration_is_refused(refusal: Refusal) -> None:
    rule = "model.backend=cpu computes only on a CPU; leave --device out, or give model.backend=auto"
    assert refusal("plan", "paper_small", "--device", "cuda", "model.backend=cpu") == f"--device=cuda: {rule}"
