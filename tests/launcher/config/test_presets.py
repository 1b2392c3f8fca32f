"""The published runs in ds_configs/experiments: complete, right, and of the published size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels.patterns import Column, Dense, Fixed, Local, Strided
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.config.loading import EXPERIMENTS
from longstride.launcher.engine.build import check_section
from longstride.launcher.planning.costs import dense_pairs, parameter_parts, states, step_flops, work
from longstride.launcher.planning.plan import run_length
from longstride.launcher.planning.rehearsal import activations
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.network import OutputConfig

PRESETS = sorted(path.stem for path in EXPERIMENTS.glob("*.json"))
RECIPES = ("demo", "bytes_small", "bytes_base", "dense_to_sparse", "paper_small", "pictures_miniature")  # recipes.md
SYSTEMS = {  # docs/systems.md, with their parameters
    "enwik8_adaptive_span": 38_092_384,
    "cifar10_routing": 95_096_832,
    "enwik8_experts": 315_481_088,
    "enwik8_longformer": 38_247_936,
    "enwik8_reformer": 139_742_208,
    "enwik8_routing": 240_081_920,
    "enwik8_sandwich": 208_425_216,
    "enwik8_synthesizer": 66_491_928,
    "imagenet64_routing": 189_663_232,
    "pg19_routing": 277_316_096,
    "bert_bytes": 86_238_976,
    "bert_labels": 86_237_954,  # of bert_bytes 592,384 of the output and the mask's 768; a pooler (590,592), 2 classes
    "bigbird_bytes": 88_991_488,
    "image_gpt_masked": 76_681_728,  # Image GPT's without the start
    "linformer_bytes": 87_811_840,
    "longformer_bytes": 88_991_488,
    "mpnet_bytes": 86_239_360,
    "transformer_xl_enwik8": 38_330_112,
    "xlnet_bytes": 86_238_976,
}
IMAGE_GPT = ("image_gpt_small", "image_gpt_miniature")  # docs/systems.md
DEEP = "dense_16384"  # which the paper mentions, without a figure of it
LONG = "music_1m_152m"  # the paper's longest context in the shape of its largest network, which it did not train
PUBLISHED = [name for name in PRESETS if name not in (*RECIPES, *SYSTEMS, *IMAGE_GPT, DEEP, LONG)]
# context, layers, heads, width, feed-forward ratio, query-key ratio, dropout, epochs, parameters
CIFAR10 = (3_072, 128, 2, 256, 2, 0.5, 0.25, 120, 59_196_928)
ENWIK8 = (12_288, 30, 8, 512, 4, 1, 0.40, 80, 94_949_888)
STATED = {
    "cifar10_dense": CIFAR10,
    "cifar10_strided": CIFAR10,
    "enwik8_dense": ENWIK8,
    "enwik8_fixed": ENWIK8,
    "enwik8_strided": ENWIK8,
    "imagenet64_strided": (12_288, 48, 16, 512, 4, 1, 0.01, 70, 151_645_184),
}
MUSIC = {"music_65k": (65_536, 256, 152e6), "music_262k": (262_144, 512, 25e6), "music_1m": (1_048_576, 1_024, 3e6)}


DOCUMENT = Path(__file__).resolve().parents[3] / "docs/experiments.md"


def preset(name: str) -> RunConfig:
    return load_config(name)


def test_every_published_run_is_here() -> None:
    assert {*STATED, *MUSIC} == set(PUBLISHED)


@pytest.mark.parametrize(("name", "parameters"), SYSTEMS.items())
def test_a_systems_preset_has_its_size(name: str, parameters: int) -> None:
    assert SparseTransformer.num_parameters(preset(name).model) == parameters


@pytest.mark.parametrize("name", PRESETS)
def test_preset_passes_our_checks_and_deepspeeds(name: str) -> None:
    config = preset(name)
    units = config.train.global_batch // config.train.micro_batch
    check_section(config, min(8, units), on_cpu=False)
    assert RunConfig.model_validate(config.to_json()) == config
    assert config.train.output == f"runs/{name}" and config.notes


@pytest.mark.parametrize("name", STATED)
def test_preset_is_the_papers(name: str) -> None:
    config = preset(name)
    model, train = config.model, config.train
    assert (
        model.context, model.layers, model.heads, model.width, model.feed_forward_ratio, model.query_key_ratio,
        model.dropout, train.epochs, sum(parameter_parts(model).values()),
    ) == STATED[name]  # fmt: skip
    assert config.data.path == f"data/{name.split('_')[0]}"
    assert model.embedding.table_sizes(model.context) == {
        "cifar10": (32, 32, 3), "enwik8": (96, 128), "imagenet64": (64, 64, 3),
    }[name.split("_")[0]]  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLISHED, DEEP, LONG])
def test_preset_trains_as_the_paper_does(name: str) -> None:
    config = preset(name)
    train, section = config.train, config.deepspeed
    assert (train.warmup_steps, train.schedule, train.weight_decay) == (5_000, "cosine", 0.01)
    assert train.learning_rate == 0.00035  # stated of CIFAR-10 alone
    assert train.activation_checkpointing
    assert config.model.initialization == "released"
    assert section["gradient_clipping"] == 1.0
    fp16 = section["fp16"]
    assert fp16["enabled"] and fp16["loss_scale"] == 0 and fp16["loss_scale_window"] == 2_000
    assert (2 ** fp16["initial_scale_power"], fp16["min_loss_scale"]) == (2**16, 2**10)
    assert min(train.checkpoint_every, train.evaluate_every) > 0
    assert "Not stated by the paper, and ours: " in config.notes
    assert config.notes.endswith(("Eight cards of 16 GB.", "One card of 16 GB.", "eight of 80 GB that share each."))


def test_small_pictures_read_two_rows_of_the_predicted_byte_s_colour() -> None:
    model = preset("pictures_miniature").model
    assert model.context == 32 * 32 * 3
    (pattern,) = {pattern for heads in model.layer_patterns() for pattern in heads}
    positions = torch.arange(model.context)
    read = positions[pattern.mask(torch.tensor(2_000), positions)]  # row k holds token k - 1
    assert (2_000 - (read - 1)).tolist() == list(range(195, 0, -3))


@pytest.mark.parametrize("name", MUSIC)
def test_music_has_the_published_size_within_two_percent(name: str) -> None:
    context, stride, parameters = MUSIC[name]
    model = preset(name).model
    assert (model.context, model.embedding.row_width) == (context, stride)  # type: ignore[union-attr]
    assert abs(sum(parameter_parts(model).values()) / parameters - 1) < 0.02
    assert {heads[0] for heads in model.layer_patterns()} == {Local(stride), Column(stride)}


def test_longest_and_largest_music_has_both_shapes() -> None:
    model, largest, longest = (preset(name).model for name in (LONG, "music_65k", "music_1m"))
    for name in ("layers", "heads", "width", "feed_forward_ratio", "query_key_ratio"):
        assert getattr(model, name) == getattr(largest, name)
    assert (model.context, model.attention, model.embedding) == (longest.context, longest.attention, longest.embedding)
    assert sum(parameter_parts(model).values()) == 152_626_688
    assert f"{152_626_688:,}" in preset(LONG).notes and "152,626,688" in DOCUMENT.read_text()


@pytest.mark.parametrize(
    "processes, on_host, card_gib, planned, told",
    [
        (1, False, 139, 63, "63 GiB, one card of 141 GB"),
        (8, False, 78, 12.5, "12.5 GiB on each of eight cards"),
        pytest.param(1, True, 78, 17, "17 in place of 63 on the card", marks=pytest.mark.campaign),
    ],
)
def test_longest_and_largest_music_fits(
    processes: int, on_host: bool, card_gib: int, planned: float, told: str
) -> None:
    """One card of 141 GB; eight of 80 that share the context; one of 80 whose block inputs wait on the host."""
    changes = [f"train.sequence_parallel={processes}"]
    changes += ['deepspeed.activation_checkpointing={"cpu_checkpointing": true}'] * on_host
    config = load_config(LONG, changes)
    config.check_world_size(processes)
    held = states(152_626_688, config, processes, config.zero_stage)
    peak = held.peak(taken := activations(config, checkpointing=True)) / 2**30
    assert peak == pytest.approx(planned, abs=0.1) and peak < 0.9 * card_gib
    assert told in DOCUMENT.with_name("clusters.md").read_text()
    assert (taken.on_host > 0) == on_host and (taken.calls > 0) == (processes > 1)


def test_image_gpt_has_the_published_size() -> None:
    config = preset("image_gpt_small")
    assert sum(parameter_parts(config.model).values()) == 76_682_240
    assert (config.train.global_batch, config.train.betas, config.train.steps) == (128, (0.9, 0.95), 1_000_000)


def test_mpnet_has_the_published_size() -> None:
    """Count MPNet base without a pooler. Its table of 30,527 rows has one for masks, as ours has."""
    model = preset("mpnet_bytes").model
    encoder = {"vocabulary": 30_526, "output": OutputConfig(tied=True)}  # without the layer before logits
    assert SparseTransformer.num_parameters(model.model_copy(update=encoder)) == 108_894_336
    without_bias = model.model_copy(update={**encoder, "relative_bias": None})
    assert SparseTransformer.num_parameters(without_bias) == 108_894_336 - 32 * 12


def test_layers_take_the_papers_patterns() -> None:
    def kinds(name: str) -> list[Any]:
        return [heads[0] for heads in preset(name).model.layer_patterns()]

    assert kinds("cifar10_strided")[:8] == [Column(96), Local(96), Local(96), Local(96)] * 2
    fixed = preset("enwik8_fixed").model.layer_patterns()
    assert set(fixed) == {tuple(Fixed(128, 32, 4, index=head % 4) for head in range(8))}
    for name in ("enwik8_strided", "imagenet64_strided"):
        assert kinds(name)[:4] == [Local(128), Column(128)] * 2
        assert Strided(128).factors() == (Local(128), Column(128))
    assert set(kinds("cifar10_dense")) == set(kinds("enwik8_dense")) == {Dense()}


@pytest.mark.parametrize(
    "one, other",
    [("cifar10_strided", "cifar10_dense"), ("enwik8_fixed", "enwik8_dense"), ("enwik8_fixed", "enwik8_strided")],
)
def test_variants_differ_in_attention_alone(one: str, other: str) -> None:
    first, second = preset(one).to_json(), preset(other).to_json()
    assert first["model"].pop("attention") != second["model"].pop("attention")
    assert first["train"].pop("output") != second["train"].pop("output")
    first.pop("notes"), second.pop("notes")
    assert first == second


def test_deep_network_is_dense_at_16_384_positions() -> None:
    model, document = preset(DEEP).model, DOCUMENT.read_text()
    assert (model.context, model.layers) == (16_384, 256)
    assert {heads[0] for heads in model.layer_patterns()} == {Dense()}
    assert f"{sum(parameter_parts(model).values()):,} parameters" in document
    assert f"({run_length(preset(DEEP), None).steps:,} steps)" in document


def test_parts_of_two_layers_tell_the_parameters_of_all() -> None:
    model = preset("enwik8_fixed").model
    assert sum(parameter_parts(model).values()) == SparseTransformer.num_parameters(model)
    assert parameter_parts(model) == {
        "embedding": (256 + 96 + 128 + 1) * 512,
        "attention": 30 * (4 * 512 * 512 + 4 * 512),
        "feed-forward": 30 * (2 * 4 * 512 * 512 + 5 * 512),
        "norms": (2 * 30 + 1) * 2 * 512,
        "output": 256 * 512,
    }


def rows(columns: int) -> Iterator[list[str]]:
    """The rows of the document's tables that begin with a preset's name and have so many columns."""
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == columns and cells[0] in (*PUBLISHED, DEEP, LONG):
            yield cells


def test_documents_presets_are_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where no data lies
    found = list(rows(7))
    assert sorted(name for name, *_ in found) == PUBLISHED
    for name, _, parameters, _, _, length, batch in found:
        config = preset(name)
        assert int(parameters.replace(",", "")) == sum(parameter_parts(config.model).values())
        steps = run_length(config, None).steps
        told = f"{steps:,} steps" if config.train.epochs is None else f"{config.train.epochs:g} ({steps:,})"
        assert (length, int(batch)) == (told, config.train.global_batch)


@pytest.mark.parametrize("memory", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_documents_figures_are_what_plan_says(memory: bool) -> None:
    found = list(rows(6))
    assert {name for name, *_ in found} >= {DEEP, LONG, *MUSIC}
    for name, step, dense_step, share, *peaks in found:
        config = preset(name)
        with_dense = config.model.model_copy(update={"attention": {"type": "dense"}})
        works = [work(model, config.train.micro_batch) for model in (config.model, with_dense)]
        steps = [sum(step_flops(each, config).values()) / 1e12 for each in works]
        assert [number(step), number(dense_step)] == pytest.approx(steps, rel=0.005)
        assert works[1].total.pairs == config.model.layers * dense_pairs(config.model)
        assert share == f"{works[0].total.pairs / works[1].total.pairs:.2%}".replace("%", " %")
        if memory:
            held = states(sum(parameter_parts(config.model).values()), config, min(8, config.train.global_batch), 1)
            held = held if name not in ("music_1m", LONG) else states(held.weights // 2, config, 1, 0)
            planned = [held.peak(activations(config, recomputed)) / 2**30 for recomputed in (True, False)]
            assert list(map(number, peaks)) == pytest.approx(planned, rel=0.03)


def number(text: str) -> float:
    return float(text.replace(",", ""))
