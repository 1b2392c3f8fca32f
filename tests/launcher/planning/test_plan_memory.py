"""Planned memory against what real steps keep, and what DeepSpeed really writes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.planning import rehearsal
from longstride.launcher.planning.costs import buffer_numbers, exchanges, parameter_parts, states, table_step
from longstride.launcher.planning.rehearsal import Activations, activations, count
from longstride.sparse_model import SparseTransformer, Table
from tests.harness.configs import LATER
from tests.harness.runs import ROOT, plain_environment
from tests.launcher.training.test_training import RUNS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def config(config_file: Path) -> Callable[..., RunConfig]:
    """A function of overrides -> a run of six layers on this CPU, dropout included."""
    return lambda *overrides: load_config(config_file, ["model.layers=6", "model.backend=cpu", *overrides])


def real_model(config: RunConfig, on_checkpoint: Any = None) -> tuple[SparseTransformer, Tensor]:
    """The model with its weights, and a micro-batch."""
    torch.manual_seed(0)
    model = SparseTransformer(config.model)
    for parameter in model.parameters():  # and no buffers
        parameter.data = parameter.data.to(DTYPES[config.precision])
    for table in (module for module in model.modules() if isinstance(module, Table)):
        table.rows.requires_grad_(False)  # a step stores what it has read
    model.activation_checkpoint = on_checkpoint
    return model, torch.randint(256, (config.train.micro_batch, config.model.context), dtype=torch.uint8)


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Checkpointing of torch, in the form that DeepSpeed's has too."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=True)


HALF_SIZE = ("model.dropout=0", "model.feed_forward_ratio=2", "model.query_key_ratio=0.5")
LATER_PARTS = tuple(f"model.{name}={json.dumps(value)}" for name, value in LATER.items())
ALL_SCORES = ('model.attention={"type": "synthesizer", "kind": ["factorized_dense", "random", "attention"]}',)
EXPERTS = ('model.feed_forward={"type": "experts", "count": 4}',)
THRESHOLDS = (  # before the first step, rows have as many as on average
    'model.feed_forward=[{"type": "experts", "count": 4, "routing": "threshold"}, '
    '{"type": "experts", "count": 2, "zero": 1}]',
)
LOCAL, SCORED = '{"type": "local", "window": 16}', '{"type": "synthesizer", "kind": ["factorized_dense", "attention"]}'
FIXED = '{"type": "synthesizer", "kind": ["random", "factorized_random"], "fixed": true}'
SANDWICH = (f"model.attention=[{LOCAL}, {SCORED}]", "model.order=s2 (sf)4 f2")
ONE_LARGE = (f"model.attention=[{SCORED}, {LOCAL}, {LOCAL}, {LOCAL}, {LOCAL}, {LOCAL}]",)
EXPERTS_IN_TURN = (
    f"model.attention=[{LOCAL}, {LOCAL}, {FIXED}]",
    'model.feed_forward=[{"type": "dense"}, {"type": "experts", "count": 4, "top": 2}]',
    "model.order=s2 (sf)11 f3",
    "model.layers=13",
)
SHARED = ('model.attention={"type": "strided", "stride": 8, "key_value_heads": 1}', "model.rotary.base=1000")
HASHED = ('model.attention={"type": "lsh", "buckets": 4, "rounds": 2, "chunk": 8}',)
MATCHED = ('model.attention={"type": "match", "window": 8, "order": 2, "matches": 4}',)
MEMORY = ('model.attention={"type": "transformer_xl", "memory": 0, "position_channels": 6}',)
RECURRENT = (
    f'model.attention=[{{"type": "recurrent", "width": 24}}, {LOCAL}, {{"type": "recurrent", "cell": "brc"}}]',
)
DELTA = ('model.attention={"type": "delta", "heads": 2}',)
COMPRESSED = ('model.attention={"type": "compressed", "block": 4, "distance": 2, "key_value_heads": 1}',)
NSA = ('model.attention={"type": "nsa", "block": 4, "distance": 2, "selected_block": 4, "selected": 4, "window": 8}',)
INDEXER = '{"type": "indexed", "keys": 16, "block": 4, "index_width": 8, "local": {"heads": 1, "window": 8}}'
INDEXED = (f"model.attention=[{LOCAL}, {INDEXER}]",)
PRODUCT_KEYS = ('model.feed_forward={"type": "product_keys", "keys": 9, "top": 5, "heads": 2, "query_width": 8}',)
MIXTURES = (SANDWICH, ONE_LARGE, EXPERTS_IN_TURN)
CARRIED = (
    'model.attention=[{"type": "transformer_xl", "memory": 9}, {"type": "delta", "stateful": true}]',
    "data.shuffle_bytes=0",
)
STATES = (CARRIED, MEMORY, RECURRENT, DELTA, COMPRESSED, NSA)
PARTS = (
    HALF_SIZE,
    LATER_PARTS,
    ALL_SCORES,
    EXPERTS,
    THRESHOLDS,
    HASHED,
    MATCHED,
    SHARED,
    PRODUCT_KEYS,
    INDEXED,
    *STATES,
)
CASES = [(name, more) for name in DTYPES for more in ((), *PARTS, *MIXTURES)]
DEFAULT_CASES = (
    ("fp32", ()),
    ("fp16", HALF_SIZE),
    ("bf16", LATER_PARTS),
    ("bf16", ALL_SCORES),
    ("bf16", ONE_LARGE),
    ("fp32", EXPERTS_IN_TURN),
    ("bf16", THRESHOLDS),
    ("fp32", HASHED),
    ("bf16", MATCHED),
    ("bf16", RECURRENT),
    ("bf16", MEMORY),
    ("bf16", SHARED),
    ("bf16", DELTA),
    ("bf16", CARRIED),
    ("fp32", COMPRESSED),
    ("bf16", NSA),
    ("bf16", PRODUCT_KEYS),
    ("bf16", INDEXED),
)


@pytest.mark.parametrize(
    "name, overrides",
    [pytest.param(*case, marks=() if case in DEFAULT_CASES else pytest.mark.campaign) for case in CASES],
)
def test_planned_activations_are_those_of_a_real_step(
    config: Callable[..., RunConfig], name: str, overrides: tuple[str, ...]
) -> None:
    """To the byte: real layers on this CPU against two rehearsed of each kind."""
    enough = ("model.layers=3",) if len({*config(*overrides).model.blocks()}) == 1 else ()
    run = config(f"deepspeed=zero0_{name}", *overrides, *enough)
    assert sum(parameter_parts(run.model).values()) == SparseTransformer.num_parameters(run.model)
    # The running sum of auxiliary losses begins in the first block that has one: a number less in each block after it.
    close = 4 * len(run.model.blocks()) if "experts" in str(overrides) else 0
    if "product_keys" in str(overrides):  # torch's sums of rows store the position of each one on a GPU alone
        close = 8 * 10 * run.train.micro_batch * run.model.context * len(run.model.blocks())
    for checkpointing in (None, recomputed):
        planned = activations(run, checkpointing is not None, "cpu")
        model, tokens = real_model(run, checkpointing)
        carried = model.new_carried(len(tokens), torch.device("cpu"), DTYPES[name])
        found = count(model, tokens, carried=carried)
        assert (planned.kept, planned.peak) == pytest.approx((found.kept, found.peak), rel=0, abs=close)


DEEPSPEEDS_OWN = """
import json, sys
import deepspeed, torch
from longstride.launcher.config import load_config
from longstride.launcher.engine.device import prepare_accelerator
from longstride.launcher.planning.rehearsal import activations, count
from longstride.launcher.ranks.processes import Ranks, process_group
from longstride.sparse_model import SparseTransformer
prepare_accelerator()
config = load_config(sys.argv[1], sys.argv[2:])
with process_group(Ranks(), 60):
    deepspeed.checkpointing.configure(None, deepspeed_config={"train_batch_size": 1})
    model = SparseTransformer(config.model)
    model.activation_checkpoint = deepspeed.checkpointing.checkpoint
    tokens = torch.randint(256, (config.train.micro_batch, config.model.context))
    found, planned = count(model, tokens.byte()), activations(config, True, "cpu")
print(found.kept, planned.kept, found.peak, planned.peak)
"""


@pytest.mark.campaign
def test_planned_recomputation_is_deepspeeds_own(config_file: Path) -> None:
    """Within 1 %: DeepSpeed keeps random states beside a block's input. It wants a process group of its own."""
    overrides = ["model.layers=6", "model.backend=cpu", "model.context=512", "deepspeed=zero0_fp32"]
    command = [sys.executable, "-c", DEEPSPEEDS_OWN, str(config_file), *overrides]
    ended = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    kept, planned_kept, peak, planned_peak = map(int, ended.stdout.split()[-4:])
    assert (kept, peak) == (pytest.approx(planned_kept, rel=0.01), pytest.approx(planned_peak, rel=0.01))


def saved_bytes(model: SparseTransformer, tokens: Tensor) -> int:
    """What autograd itself saves for the backward pass, each storage once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens, return_nats=True).sum()
    assert loss.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_activations_are_what_autograd_saves(config: Callable[..., RunConfig], checkpointing: bool) -> None:
    """Counted by autograd's hooks, which know nothing of our counting: within 1 %, for what lives and is not saved."""
    run = config("deepspeed=zero0_fp32", "model.width=64")

    saved = saved_bytes(*real_model(run, recomputed if checkpointing else None))
    assert activations(run, checkpointing, "cpu").kept == pytest.approx(saved, rel=0.01)


def test_a_gpu_keeps_dropouts_masks_in_bytes(config: Callable[..., RunConfig]) -> None:
    run = config("model.dropout=0.1")
    model, train = run.model, run.train
    masks = 2 * model.layers * train.micro_batch * model.context * model.width
    found = [activations(run, False, device).kept for device in ("cpu", "cuda")]
    assert found[0] - found[1] == (4 - 1) * masks


def test_recomputing_keeps_an_input_a_layer(config: Callable[..., RunConfig]) -> None:
    few, many = (activations(config(f"model.layers={layers}"), checkpointing=True) for layers in (10, 20))
    run = config()
    layer_input = 4 * run.train.micro_batch * run.model.context * run.model.width
    assert many.kept - few.kept == many.peak - few.peak == 10 * layer_input


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.campaign)])
def test_reversible_blocks_take_no_memory_of_their_own(config: Callable[..., RunConfig], precision: str) -> None:
    """In real steps of 4 and 16 blocks: two streams are kept, and one sub-layer at a time is at work."""
    few, many = (config("model.reversible=true", f"model.layers={n}", f"deepspeed=zero0_{precision}") for n in (4, 16))
    measured = count(*real_model(many))
    assert measured == count(*real_model(few))
    assert (
        activations(few, False, "cpu") == activations(many, False, "cpu") == activations(many, True, "cpu") == measured
    )
    one_stream = activations(config("model.layers=16", f"deepspeed=zero0_{precision}"), True, "cpu")
    assert measured.kept < one_stream.kept and measured.peak < one_stream.peak


def test_fixed_tables_are_buffers_and_no_activations(config: Callable[..., RunConfig]) -> None:
    """Of a step's activations, they leave out at most what only the tables' training takes."""
    fixed, trained = (config(f"model.attention={FIXED.replace('true', value)}") for value in ("true", "false"))
    numbers = sum(buffer.numel() for buffer in SparseTransformer(fixed.model).buffers())
    context, layers, heads = fixed.model.context, fixed.model.layers, fixed.model.heads
    assert buffer_numbers(fixed.model) == numbers == layers * heads * (context**2 + 2 * 8 * context)
    assert buffer_numbers(trained.model) == 0
    assert activations(fixed, checkpointing=False).kept <= activations(trained, checkpointing=False).kept
    weights = [states(1_000_000, run, 4, 3).weights for run in (fixed, trained)]
    assert weights[0] - weights[1] == 4 * numbers  # whole on every process, whatever the stage


def test_memory_of_the_optimiser_is_shared_out_by_stages(config: Callable[..., RunConfig]) -> None:
    """16 bytes a parameter in half precision, and what is left of them (Rajbhandari et al. 2020, figure 1)."""
    run, parameters, processes = config("deepspeed=zero1_fp16", "train.ema_decay=null"), 1_000_000, 4
    held = [states(parameters, run, processes, stage) for stage in range(4)]
    without_buffers = [each.resident() - each.buffers for each in held]
    assert without_buffers == [16_000_000, 7_000_000, 5_500_000, 4_000_000]
    assert [each.buffers for each in held] == [0, 10**9, 10**9, 10**9 + 2 * parameters]
    assert held[0].peak(Activations(0, 0)) - held[0].resident() == 4 * parameters
    assert held[0].peak(Activations(5, 10**8)) - held[0].resident() == 10**8
    averaged = [states(parameters, config("deepspeed=zero1_fp16"), processes, stage) for stage in range(4)]
    assert [each.average for each in averaged] == [4_000_000, 1_000_000, 1_000_000, 1_000_000]
    alone = states(parameters, config("deepspeed=zero0_fp32", "train.ema_decay=null"), 1, 0)
    assert alone.resident() == 16_000_000 and alone.masters == alone.at_step == 0


def test_buckets_are_as_configured(config: Callable[..., RunConfig]) -> None:
    run = config("deepspeed=zero2_fp16", "deepspeed.zero_optimization.reduce_bucket_size=1000")
    assert states(10, run, 1, 2).buffers == 2_000
    both = config(
        "deepspeed=zero2_bf16",
        "deepspeed.zero_optimization.reduce_bucket_size=1000",
        "deepspeed.zero_optimization.overlap_comm=true",
        "deepspeed.data_types.grad_accum_dtype=fp32",
    )
    assert states(10, both, 1, 2).buffers == 2 * 2_000  # in half precision, whatever they are added up in
    assert states(10, both, 1, 2).gradients == 40


def test_a_cpus_bucket_is_what_is_written_of_it(config: Callable[..., RunConfig]) -> None:
    """A gradient a parameter at most, and once at a time: no more of DeepSpeed's 5e8 is ever touched."""
    run = config("deepspeed=zero2_fp16", "deepspeed.zero_optimization.overlap_comm=true")
    few, many = 1_000_000, 2_000_000_000
    assert [states(few, run, 4, stage, "cpu").buffers for stage in (0, 1, 2)] == [0, 2 * few, 2 * few]
    assert states(few, run, 4, 3, "cpu").buffers == 2 * few + 2 * few  # and the weights that it gathers
    assert states(many, run, 4, 2, "cpu").buffers == states(many, run, 4, 2, "cuda").buffers == 2 * 10**9
    gpu, cpu = (states(few, run, 4, 1, device) for device in ("cuda", "cpu"))
    assert gpu.buffers == 2 * 10**9
    assert gpu.resident() - gpu.buffers == cpu.resident() - cpu.buffers


@pytest.mark.parametrize("name", ["zero1-bf16", "zero2-fp16", "zero2_fp32"])
def test_planned_optimiser_is_what_deepspeed_writes(name: str, trained: Callable[..., Path]) -> None:
    """Masters, moments and average in a rank's checkpoint: tensors alone, up to padding to equal shares."""
    run = trained(name, 2, *RUNS[name]) if name in RUNS else ROOT / "tests/made_before" / name
    config = load_config(run / "config.json")
    tables = table_step(config)
    numel = SparseTransformer.num_parameters(config.model) - tables.rows * config.model.width
    planned = states(numel, config, 2, config.zero_stage)
    folder = sorted(run.glob("checkpoints/step-*/deepspeed"))[-1]
    for rank in range(2):
        (path,) = folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        content = torch.load(path, weights_only=False)["optimizer_state_dict"]
        found = sum(_bytes(content[key]) for key in ("single_partition_of_fp32_groups", "base_optimizer_state"))
        assert found == pytest.approx(planned.masters + planned.moments + planned.average, rel=0.01)
    written = sum(path.stat().st_size for path in folder.parent.glob("tables-*.safetensors"))
    assert written == pytest.approx(tables.rows * tables.row_bytes, abs=2_000)  # but for names and shapes


def _bytes(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.nbytes if content.dim() else 0
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list | tuple) else ()
    return sum(_bytes(part) for part in parts)


STRIDED = ('model.attention={"type": "strided", "stride": 8, "combine": "interleaved"}',)
FIXED_ALIKE = ('model.attention={"type": "fixed", "stride": 8, "summary": 2}',)
BY_HEADS, BY_FOUR = "train.sequence_exchange=heads", "train.sequence_parallel=4"
KEPT, RECOMPUTED, ON_HOST = (False, False), (True, False), (True, True)  # checkpointing, block inputs on the host
DEFAULT_DIVIDED = ((STRIDED, KEPT), (STRIDED, ON_HOST), ((*FIXED_ALIKE, BY_HEADS), RECOMPUTED))


@pytest.mark.parametrize(
    "changes, memory",
    [
        pytest.param(changes, memory, marks=() if (changes, memory) in DEFAULT_DIVIDED else pytest.mark.campaign)
        for pattern in (STRIDED, FIXED_ALIKE)
        for changes in (pattern, (*pattern, BY_HEADS), (*pattern, BY_FOUR))
        for memory in (KEPT, RECOMPUTED, ON_HOST)
    ],
)
def test_few_blocks_tell_all(
    config: Callable[..., RunConfig],
    changes: tuple[str, ...],
    memory: tuple[bool, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where rows are divided by sections and by columns, more blocks than are rehearsed."""
    checkpointing, on_host = memory
    host = f"deepspeed.activation_checkpointing.cpu_checkpointing={str(on_host).lower()}"
    layers = (12 if on_host else 8) // (1 if "strided" in changes[0] else 2)
    run = config("train.sequence_parallel=2", *changes, host, f"model.layers={layers}")
    few = activations(run, checkpointing)
    monkeypatch.setattr(rehearsal, "REHEARSED_BLOCKS", 99)
    assert activations(run, checkpointing) == few
    assert few.calls > 0 and few.sent_bytes > 0


def test_a_divided_context_divides_its_activations_and_sends_a_count(config: Callable[..., RunConfig]) -> None:
    shared = (
        'model.attention={"type": "fixed", "stride": 8, "summary": 2, "key_value_heads": 1}',
        "model.rotary.base=1000",
    )
    ways = ("train.sequence_exchange=heads", "deepspeed=zero0_fp32")
    alone, halves = (activations(config(f"train.sequence_parallel={size}", *ways), False) for size in (1, 2))
    assert halves.kept * 2 == pytest.approx(alone.kept, rel=0.1)
    assert (alone.calls, alone.sent_bytes) == (0, 0)
    run = config("train.sequence_parallel=2", *ways, *shared)
    divided, model = activations(run, checkpointing=False), run.model
    batch, head_width = run.train.micro_batch, model.width // model.heads
    # Of n rows of q, one head of k and v copied to both, and the output: a half, there and back.
    numbers = batch * model.context // 2 * (2 * model.width + 2 * 2 * head_width)
    assert divided.sent_bytes == divided.received_bytes == model.layers * 2 * 4 * numbers // 2
    assert divided.calls == model.layers * 4
    (told, *others) = exchanges(run)
    assert (told.taken, told.copies, told.heads_bytes) == ("heads", 2, 4 * numbers // 2)
    assert {told} == {told, *others}


def test_what_waits_on_the_host_is_not_on_the_card(config: Callable[..., RunConfig]) -> None:
    on_host = "deepspeed.activation_checkpointing.cpu_checkpointing=true"
    on_card, off_card = (activations(config("model.layers=20", *more), True) for more in ((), (on_host,)))
    run = config()
    layer_input = 4 * run.train.micro_batch * run.model.context * run.model.width
    assert off_card.on_host == 19 * layer_input  # the last one's is needed at once
    assert on_card.kept - off_card.kept == (20 - rehearsal.ON_THEIR_WAY) * layer_input
    assert activations(config("model.layers=20", on_host), checkpointing=False).on_host == 0
