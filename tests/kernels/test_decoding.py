"""One query at a time: against the row of attention over the whole context in fp64, and its reads against the mask."""

import json
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.kernels import (
    CachedAttention,
    ConfigError,
    allowed_keys,
    attend_one,
    num_keys_read,
    plan,
)
from longstride.kernels.attention import head_patterns
from longstride.kernels.backends.reference import pattern_mask
from longstride.kernels.patterns import Block, Column, Dense, Fixed, Local, Pattern, Strided, Summary
from tests.harness.backends import DEVICES, DTYPES, MIXES, WITH_TRITON, on, repeats
from tests.harness.oracles import (
    Inputs,
    Shape,
    assert_explained,
    example_patterns,
    expected,
    make_inputs,
)

BACKENDS = [on(name) for name in ("cpu", "reference", "triton")]
LISTS = [
    *MIXES[:2],
    [Fixed(8, 2, num_summaries=2), Fixed(8, 2, num_summaries=2), Strided(8), Fixed(8, 2, num_summaries=2)],
    [Strided(8), Local(5), Local(5), Strided(8), Strided(8)],
]
ROOT = pathlib.Path(__file__).parents[2]


def some_positions(context: int) -> list[int]:
    """The ends, the edges of blocks and columns, and one between."""
    return sorted({0, 7, 8, 37, context - 1} & set(range(context)))


def one_by_one(
    backend: str, inputs: Inputs, pattern: Pattern | Sequence[Pattern], positions: list[int], scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of output (B, H, P, Dv) and logsumexp (B, H, P); whatever a head must not read is NaN."""
    device = DEVICES[backend]
    mask = pattern_mask(head_patterns(pattern, inputs.q.shape[1]), inputs.q.shape[2], torch.device("cpu"))
    rows = []
    for position in positions:
        hidden = ~mask[:, position, :, None]
        k, v = (x.masked_fill(hidden, float("nan")).to(device) for x in (inputs.k, inputs.v))
        q = inputs.q[:, :, position].to(device)
        rows.append(attend_one(q, k, v, pattern, position, scale=scale, backend=backend, return_lse=True))
    return tuple(torch.stack(found, 2).cpu() for found in zip(*rows, strict=True))  # type: ignore[return-value]


def check(
    backend: str,
    pattern: Pattern | Sequence[Pattern],
    dtype: torch.dtype,
    shape: Shape,
    *,
    scale: float | None = None,
    positions: list[int] | None = None,
) -> None:
    """Assert that rows are within the precision of their dtype."""
    inputs = make_inputs(shape, dtype, seed=shape.context)
    positions = some_positions(shape.context) if positions is None else positions
    found = one_by_one(backend, inputs, pattern, positions, scale)
    wanted = expected(inputs, pattern, scale)
    for name, rows in zip(("out", "lse"), found, strict=True):
        assert_explained(name, rows, wanted[name].at(positions), pattern)


@pytest.mark.parametrize(
    "backend, pattern, dtype, context",
    [
        *(on("cpu", p, dtype, (50, 72)[i % 2]) for p in example_patterns() for i, dtype in enumerate(DTYPES)),
        *(on("reference", p, torch.float32, 50) for p in example_patterns()),
        *(
            on("triton", p, dtype, context, marks=[] if number % 8 == 2 * i + j else [pytest.mark.campaign])
            for number, p in enumerate(example_patterns())
            for i, dtype in enumerate(DTYPES)
            for j, context in enumerate((72, 50))
        ),
    ],
    ids=str,
)
def test_a_row_is_within_precision(backend: str, pattern: Pattern, dtype: torch.dtype, context: int) -> None:
    """By default each pattern once in the slow interpreter, at three of the positions."""
    if backend == "triton":
        check(backend, pattern, dtype, Shape(1, 3, context, 24, 16), positions=[7, 37, context - 1])
    else:
        check(backend, pattern, dtype, Shape(2, 3, context, 24, 16))


@pytest.mark.parametrize(
    "backend, dtype, patterns",
    [
        on(name, dtype, patterns, marks=repeats(i + j) if name == "triton" else ())
        for name in ("cpu", "reference", "triton")
        for i, dtype in enumerate((torch.bfloat16, torch.float32))
        for j, patterns in enumerate(LISTS)
    ],
    ids=str,
)
def test_heads_may_differ(backend: str, dtype: torch.dtype, patterns: list[Pattern]) -> None:
    for context in (50, 72):
        positions = [context - 1] if backend == "triton" else [0, 6, context - 1]
        check(backend, patterns, dtype, Shape(2, len(patterns), context, 16, 24), positions=positions)


@pytest.mark.parametrize(
    "backend, pattern, context",
    [
        on(name, pattern, context, marks=repeats(i + j) if name == "triton" else ())
        for name in ("cpu", "triton")
        for i, pattern in enumerate((Dense(), Column(4), Fixed(4, 1)))
        for j, context in enumerate((1, 2, 15, 16, 17))
    ],
    ids=str,
)
def test_short_contexts(backend: str, pattern: Pattern, context: int) -> None:
    positions = sorted({0, context // 2, context - 1})
    check(backend, pattern, torch.float16, Shape(16, 1, context, 16, 16), positions=positions)


@pytest.mark.usefixtures("tiles_of_a_card")
@pytest.mark.parametrize("width, value_width", [(1, 3), (64, 64), (96, 40), (256, 256)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_width(backend: str, width: int, value_width: int) -> None:
    shape = Shape(2, 2, 300, width, value_width)
    check(backend, [Dense(), Strided(16)], torch.float16, shape, positions=[17, 150, 299])


@pytest.mark.parametrize("scale", [0.5, -0.5, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_scale(backend: str, scale: float) -> None:
    check(backend, Strided(8), torch.float32, Shape(2, 2, 50, 16, 16), scale=scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_has_the_same_bits_again_and_by_a_tensor(backend: str, dtype: torch.dtype) -> None:
    """And nearly the same from caches that lie position by position."""
    q, k, v = (x.to(DEVICES[backend]) for x in make_inputs(Shape(2, 2, 72, 16, 16), torch.float32)[:3])
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    for pattern, position in ((Dense(), 70), (Column(7), 71), ([Strided(8), Fixed(8, 2)], 16)):
        stored = torch.tensor(position, dtype=dtype, device=k.device)
        wanted, repeated, by_tensor, by_position = (
            attend_one(q[:, :, 5], *caches, pattern, at, backend=backend, return_lse=True)
            for caches, at in (((k, v), position), ((k, v), position), ((k, v), stored), (turned, position))
        )
        for found in (repeated, by_tensor):
            assert all(map(torch.equal, found, wanted))
        torch.testing.assert_close(by_position, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_is_empty(backend: str) -> None:
    q, k = (torch.empty(shape, device=DEVICES[backend]) for shape in ((0, 2, 16), (0, 2, 8, 16)))
    out, lse = attend_one(q, k, k, Strided(4), 5, backend=backend, return_lse=True)
    assert out.shape == (0, 2, 16) and lse.shape == (0, 2)


@pytest.mark.parametrize("context", [3, 16])  # in the shorter one no query has a key
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_without_keys_is_zero(backend: str, context: int) -> None:
    k = torch.randn(1, 2, context, 16, device=DEVICES[backend])
    out, lse = attend_one(k[:, :, 2], k, k, Summary(8, 2), 2, backend=backend, return_lse=True)
    assert not out.any() and bool((lse == -math.inf).all())


def test_autocast_leaves_the_products_wide() -> None:
    q, k, v = make_inputs(Shape(1, 2, 40, 16, 16), torch.float32)[:3]
    for backend in ("cpu", "reference"):
        wanted = attend_one(q[:, :, 30], k, v, Strided(8), 30, backend=backend)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(attend_one(q[:, :, 30], k, v, Strided(8), 30, backend=backend), wanted)


# What is read


@pytest.mark.parametrize("context", [1, 7, 50, 72])
@pytest.mark.parametrize("pattern", [*example_patterns(), Column(7), Strided(90), Summary(9, 9), Fixed(6, 6)], ids=str)
def test_the_keys_are_those_of_the_mask(pattern: Pattern, context: int) -> None:
    position = torch.arange(context)
    for head in range(3):
        own = pattern.for_head(head)
        mask = own.mask(position[:, None], position[None, :])
        counts = [num_keys_read(own, i, context) for i in range(context)]
        assert counts == mask.sum(1).tolist() and sum(counts) == plan.num_pairs(own, context)
        assert all(count <= plan.most_reads(own, context) for count in counts)
        for i in range(context):
            assert torch.equal(allowed_keys(own, i, context), mask[i].nonzero().squeeze(1))


@pytest.mark.parametrize(
    "pattern, most",
    [
        (Local(256), 256),
        (Column(256), 256),
        (Block(256), 256),
        (Summary(256, 8), 8 * 256),
        (Strided(256), 2 * 256),
        (Fixed(256, 8), 9 * 256),
        (Column(255), 258),
    ],
    ids=str,
)
def test_no_more_is_touched_than_is_read(pattern: Pattern, most: int) -> None:
    context, width, position = 65_536, 4, 65_530
    assert num_keys_read(pattern, position, context) <= most
    k = torch.ones(1, 1, context, width)
    q = k[:, :, 0]
    attend_one(q, k, k, pattern, position)  # vectors of an order without a closed form are made once
    with Elements() as made:
        attend_one(q, k, k, pattern, position)
    assert 0 < made.largest <= most * width
    with Elements() as made:
        allowed_keys(pattern, position, context)
    assert 0 < made.largest <= most


class Elements(TorchDispatchMode):
    """The most elements of any tensor that an operation reads or gives while this is entered; views do neither."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            rows = func in (torch.ops.aten.index_select.default, torch.ops.aten.index_select.out)
            read = args[2:] if rows else args  # of the first, some rows
            touched = [x for x in (*read, out) if isinstance(x, Tensor)]
            self.largest = max([self.largest, *(x.numel() for x in touched)])
        return out


@WITH_TRITON
@pytest.mark.usefixtures("tiles_of_a_card")
def test_splits_follow_from_pattern_and_context() -> None:
    from longstride.kernels.backends.triton.decode import KEYS_A_SPLIT, MOST_SPLITS, plan_layout

    def splits(pattern: Pattern, context: int) -> int:
        return plan_layout((pattern,), context, KEYS_A_SPLIT, torch.device("cpu")).splits

    assert [splits(p, 65_536) for p in (Local(256), Strided(256), Fixed(256, 8), Dense())] == [1, 2, 16, MOST_SPLITS]
    assert [splits(Dense(), context) for context in (100, 256, 257, 1024)] == [1, 1, 2, 4]


# What is refused


Q, K = torch.zeros(1, 2, 16), torch.zeros(1, 2, 9, 16)


@pytest.mark.parametrize(
    "q, k, v, message",
    [
        (torch.zeros(1, 2, 1, 16), K, K, r"q must be \(B, H, D\), not \(1, 2, 1, 16\)"),
        (Q, K[0], K, r"k must be \(B, H, N, D\), not \(2, 9, 16\)"),
        (Q[..., :8], K, K, r"k \(1, 2, 9, 16\) must have the batch and channels of q \(1, 2, 8\)"),
        (Q, K, K[:, :, :8], r"v \(1, 2, 8, 16\) must have the batch, heads and positions of k"),
        (Q[:, :0], K[:, :0], K[:, :0], r"[qk] \(1, 0, .*16\) must have at least one head"),
        (Q, K.half(), K, r"[kv] is torch.float.*: q, k and v must share one of"),
        (Q.half(), K, K, r"[qk] is torch.float.*: q, k and v must share one of"),
        (Q, K, torch.zeros(1, 2, 16, 9).transpose(2, 3), r"v has strides .*: its channels must be adjacent"),
        (Q.clone().requires_grad_(), K, K, "q requires a gradient"),
    ],
)
def test_unfit_tensors_are_refused(q: Tensor, k: Tensor, v: Tensor, message: str) -> None:
    for attend in (
        lambda: attend_one(q, k, v, Dense(), 0),
        lambda: CachedAttention(k, v, Dense(), heads=q.shape[1])(q, 0),
    ):
        with pytest.raises(ValueError, match=message):
            attend()


def test_unfit_options_are_refused() -> None:
    meta = K.to("meta")
    with pytest.raises(ValueError, match=r"k is on meta, q on cpu"):
        attend_one(Q, meta, K, Dense(), 0)
    with pytest.raises(ValueError, match=r"scale=nan: must be a finite number"):
        attend_one(Q, K, K, Dense(), 0, scale=float("nan"))
    with pytest.raises(ConfigError, match='backend="cpu": cannot run here: it needs CPU tensors, not meta'):
        attend_one(Q.to("meta"), meta, meta, Dense(), 0, backend="cpu")
    with pytest.raises(ValueError, match="heads differ in"):
        allowed_keys(Summary(8, 2, num_summaries=3), 8, 16)
    for attend in (lambda *given, **options: attend_one(Q, K, K, *given, 0, **options), partial(CachedAttention, K, K)):
        with pytest.raises(ValueError, match="3 patterns for 2 heads"):
            attend([Dense()] * 3)
        with pytest.raises(ConfigError, match='backend="flex": must be one of auto, triton, cpu, reference'):
            attend(Dense(), backend="flex")


@pytest.mark.parametrize("position", [-1, 9, 100])
def test_positions_outside_the_context_are_refused(position: int) -> None:
    for call in (
        lambda: attend_one(Q, K, K, Dense(), position),
        lambda: CachedAttention(K, K, Dense())(Q, position),
        lambda: allowed_keys(Dense(), position, 9),
        lambda: num_keys_read(Dense(), position, 9),
    ):
        with pytest.raises(ValueError, match=rf"position={position}: must be 0 to 8, within the context"):
            call()


@pytest.mark.parametrize("position", [1.0, True, torch.tensor(1.0), torch.tensor([1]), torch.tensor(9)], ids=str)
def test_positions_that_are_none_are_refused(position: Any) -> None:
    rule = "must be 0 to 8" if torch.is_tensor(position) and position == 9 else "must be an int"
    with pytest.raises(ValueError, match=rf"position.*{rule}"):
        attend_one(torch.zeros(1, 2, 16), *[torch.zeros(1, 2, 9, 16)] * 2, Dense(), position, backend="cpu")
    with pytest.raises(ValueError, match="position is on meta: cpu reads an int, or a tensor on the CPU"):
        elsewhere = torch.tensor(1, device="meta")
        attend_one(torch.zeros(1, 2, 16), *[torch.zeros(1, 2, 9, 16)] * 2, Dense(), elsewhere, backend="cpu")


@WITH_TRITON
def test_the_host_does_not_read_a_position_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a captured launch serves other positions; those beyond the context are brought into it."""
    q, k, v = (x.to(DEVICES["triton"]) for x in make_inputs(Shape(1, 2, 40, 16, 16), torch.float32)[:3])
    wanted = {at: attend_one(q[:, :, 5], k, v, Strided(8), at, backend="triton") for at in (0, 7, 21, 39)}
    from longstride.kernels.backends.triton.launch_plan import Launch

    launches: list[Any] = []
    launch = Launch.run
    monkeypatch.setattr(Launch, "run", lambda *given: launches.append(given))
    position = torch.tensor(7, device=k.device)
    out = CachedAttention(k, v, Strided(8), backend="triton")(q[:, :, 5], position)
    for value, at in ((7, 7), (21, 21), (99, 39), (-3, 0)):
        position.fill_(value)
        for given in launches:
            launch(*given)
        assert torch.equal(out, wanted[at])


def test_inputs_may_require_gradients_where_none_are_computed() -> None:
    q, k = Q.clone().requires_grad_(), K.clone().requires_grad_()
    with torch.no_grad():
        assert attend_one(q, k, k, Dense(), 3).shape == CachedAttention(k, k, Dense())(q, 8).shape == (1, 2, 16)


# The kernels on cards that need not be there


@WITH_TRITON
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.campaign)])
def test_the_kernels_compile_without_spilling_and_once_for_all_positions(share: int) -> None:
    """By default each case for one of the architectures in turn."""
    from triton.backends import backends

    architectures = ["sm_80", "sm_90", *(["gfx942"] if "amd" in backends else [])]
    cases = [
        "decode:bfloat16:64:natural",
        "split:bfloat16:64:merged",
        "split:bfloat16:64:merged:stored",
        "split:float16:128:strided",
        "split:bfloat16:64:shifted",
        "decode:float32:256:listed",
        "merge:bfloat16:64:natural",
        "merge:float32:256:natural",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/harness/compile_decode.py"),
            *(f"{each}:{case}" for number, each in enumerate(architectures) for case in cases[number % share :: share]),
        ],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for found in map(json.loads, done.stdout.splitlines()):
        print(found)
        assert found["spilled_bytes"] == 0 and not found["by_position"], found
