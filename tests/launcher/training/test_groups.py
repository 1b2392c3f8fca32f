"""Runs in which processes share each context, beside runs in which every process has its own (train.sequence_parallel).

Where 1 is given, contexts are whole, and dropout is drawn by positions as in groups of any size. So a run and that of
as many groups differ by rounding alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from longstride.launcher.checkpoints import master_weights, open_checkpoint
from longstride.launcher.models import AVERAGE, TRAINED
from longstride.sparse_model import SparseTransformer
from tests.harness.runs import complete, configuration, metrics
from tests.launcher.conftest import Make, chunks
from tests.launcher.training.test_training import ADAFACTOR, EXPERTS, HIGH_SCALE, MUON, TABLES

# A large epsilon: where gradients are near zero, Adam's steps would have their signs, and these be rounding.
COMMON = ("model.heads=4", "train.steps=4", "train.eps=0.001", "train.checkpoint_every=0", "train.evaluate_every=0")
APART = 'data.packing={"attend": "document"}'
CLIPPED = "deepspeed.gradient_clipping=0.05"
RECOMPUTED = "train.activation_checkpointing=true"
RECIPE = ("model.convolution=4", "model.query_key_norm=true", "model.rotary={}", "model.attention.key_value_heads=2")
COLUMNS = 'model.attention={"type": "strided", "stride": 8, "combine": "interleaved"}'
SAMPLES = 'deepspeed.csv_monitor={"enabled": true, "output_path": "{folder}", "job_name": "csv"}'
SETTINGS: dict[str, tuple[str, ...]] = {
    "recipe": (*RECIPE, MUON, TABLES, EXPERTS, APART, CLIPPED, RECOMPUTED),
    "short": ("data.packing=false", "train.micro_batch=1", COLUMNS, SAMPLES),
    "scaled": ("train.steps=8", HIGH_SCALE, TABLES),  # of which the first ones overflow
}
OTHER_SETTINGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "heads": ("train.sequence_exchange=heads",),
    "keys": ("train.sequence_exchange=keys",),
    "columns": (COLUMNS,),
    "accumulated": ("train.micro_batch=1",),
    "at once": ("train.micro_batch=4",),
    "short alone": ("data.packing=false",),
    "apart": (APART, "data.separator=10"),
    "recomputed": (RECOMPUTED,),
    "reversible": ("model.reversible=true", TABLES),
    "tables": (TABLES,),
    "muon": (MUON,),
    "adafactor": (ADAFACTOR,),
    "experts": (EXPERTS,),
    "clipped": (CLIPPED,),
    "routing": ('model.attention={"type": "routing", "clusters": 4, "window": 16}',),
    "published": RECIPE,
}


class Layout(NamedTuple):
    """Groups, processes of each, and how DeepSpeed computes."""

    groups: int
    shared: int
    stage: int
    precision: str


def layouts(setting: str) -> list[Layout]:
    """All that a setting is tried in; Adafactor is for ZeRO 0."""
    places = [(groups, shared, stage) for groups, shared in ((1, 2), (1, 4), (2, 2)) for stage in range(4)]
    every = [Layout(*place, "fp32") for place in places]
    every += [
        Layout(*place, half) for place in (places[0], places[1], places[7], places[10]) for half in ("bf16", "fp16")
    ]
    return [each for each in every if not each.stage or setting != "adafactor"]


CASES = [
    ("recipe", Layout(1, 2, 3, "fp32")),
    ("recipe", Layout(1, 4, 1, "fp32")),
    ("short", Layout(2, 2, 2, "fp32")),
    ("scaled", Layout(1, 2, 2, "fp16")),
    *(
        pytest.param(setting, layout, marks=pytest.mark.campaign)
        for setting in OTHER_SETTINGS
        for layout in layouts(setting)
    ),
]
FIRST_LOSS = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 1e-3}  # relative
Trained = Callable[..., Path]


@pytest.fixture(scope="session")
def run_of(shared: Callable[[str, Make], Path], short_documents: Path) -> Callable[[str, Layout], Path]:
    """A function (setting, layout) -> folder of a run on documents that are mostly short, made once."""

    def get(setting: str, layout: Layout) -> Path:
        groups, size, stage, precision = layout
        overrides = [*COMMON, *(SETTINGS | OTHER_SETTINGS)[setting], f"train.sequence_parallel={size}"]

        def make(folder: Path) -> None:
            config = folder / "run.json"
            config.write_text(json.dumps(configuration(short_documents, folder / "run")))
            placed = [override.replace("{folder}", str(folder)) for override in overrides]
            more = [f"deepspeed=zero{stage}_{precision}", *placed]
            ended = complete(["--config", str(config), *more], groups * size, chunks(f"zero{stage}"))
            (folder / "stderr").write_text(ended.stderr[0])

        return shared(f"groups-{setting}-{'-'.join(map(str, layout))}".replace(" ", "-"), make)

    return get


@pytest.mark.parametrize(("setting", "layout"), CASES)
def test_groups_train_as_single_processes_do(
    setting: str, layout: Layout, run_of: Callable[[str, Layout], Path]
) -> None:
    """The same batches, and losses, norms and weights but for rounding.

    Tolerances: in fp32 gradients are sums of thousands of terms in another order, 2^-23 each, over four steps. What
    weights have moved by is as good as the gradients, and each step rounds them, 2^-24. In half precision the gradients
    of a process are rounded before they are added up, 2^-8 of terms that may cancel; weights are off by twice what the
    undivided run is off in the same precision.
    """
    exact = layout.precision == "fp32"
    single = layout._replace(shared=1, stage=0, precision="fp32")
    # In half precision each stage rounds in its own way.
    reference = single if exact else layout._replace(shared=1)
    alone, together = (run_of(setting, each) / "run" for each in (reference, layout))
    lines, wanted = metrics(together), metrics(alone)
    assert len(lines) == len(wanted) == (9 if setting == "scaled" else 5)  # the last is an evaluation
    for number, (line, other) in enumerate(zip(lines, wanted, strict=True)):
        rounded = {"loss_nats", "bits_per_byte", "grad_norm"}
        assert {k: v for k, v in line.items() if k not in rounded} == {
            k: v for k, v in other.items() if k not in rounded
        }
        later = 2**-17 if exact else 2**-8
        assert line["loss_nats"] == pytest.approx(
            other["loss_nats"], rel=later if number else FIRST_LOSS[layout.precision]
        )
        if (norm := other.get("grad_norm")) is None:
            assert line.get("grad_norm") is None
        else:
            assert line["grad_norm"] == pytest.approx(norm, rel=2**-13 if exact else 2**-4)
    if setting == "scaled":  # in fp32 it drops no steps
        return
    ones, others, without = (open_checkpoint(run, 4) for run in (alone, together, run_of(setting, single) / "run"))
    torch.manual_seed(ones.config.train.seed)
    drawn = SparseTransformer(ones.config.model).state_dict()
    for kind in (TRAINED, AVERAGE):
        expected, found, rounded_less = (master_weights(each, kind) for each in (ones, others, without))
        for name, first in drawn.items():
            moved = (expected[name] - first).norm()
            most = 2**-13 * moved if exact else 2 * (expected[name] - rounded_less[name]).norm()
            assert moved > 0 and (found[name] - expected[name]).norm() <= most + 2**-21 * expected[name].norm(), name


def test_deepspeed_counts_contexts_and_the_first_line_tells_groups(run_of: Callable[[str, Layout], Path]) -> None:
    """Its own events are by samples: eight contexts a step, and not sixteen."""
    folder = run_of("short", Layout(2, 2, 2, "fp32"))
    lines = (folder / "csv/Train_Samples_lr.csv").read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(8, 33, 8))
    assert "context 64, 4 processes on cpu, 2 share each context, ZeRO 2, fp32\n" in (folder / "stderr").read_text()
