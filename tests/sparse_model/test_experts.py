"""Mixtures of experts against their formulas, and against DeepSpeed's gating."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import top1gating, top2gating
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from longstride.launcher.engine.muon import matrices_in
from longstride.sparse_model import ModelConfig, SparseTransformer
from longstride.sparse_model.feed_forwards import dense, experts
from longstride.sparse_model.feed_forwards.experts import Experts, ExpertsConfig, ThresholdExperts
from tests.harness.configs import small
from tests.harness.stochastic import assert_rounding_explains, with_gradients

COUNT, WIDTH, INNER = 4, 16, 24


def make(network: ModelConfig | None = None, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Experts in training, every parameter of which matters; with thresholds of one observation."""
    network = network or small(width=WIDTH, feed_forward_ratio=INNER / WIDTH)
    asked = {"type": "experts", "count": COUNT, **changes}
    module = ExpertsConfig.model_validate(asked).make(network)
    random = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=random)
    module = module.to(dtype)
    if isinstance(module, ThresholdExperts):
        observe(module, rows(dtype, network.width).detach() + 0.3)
    return module


def observe(module: Any, h: Tensor, **options: Any) -> None:
    module.observe(module.route(h, **options).statistics[0].double())


def rows(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    """(B, N, C)."""
    return torch.randn(2, 20, width, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def by_definition(module: Experts, h: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N, C) and the auxiliary loss: every expert computes every row, and what is not chosen counts nothing."""
    config = module.config
    scores, total = h @ module.router.weight.mT, config.count + config.zero
    probabilities = scores.softmax(-1) if config.routing == "top" else scores.sigmoid()
    chosen = scores.argsort(-1, descending=True)[..., : config.top]
    weights = torch.zeros_like(probabilities)
    room = math.inf if config.capacity is None else math.ceil(config.capacity * config.top * h.shape[1] / total)
    for context in range(len(h)):
        taken = [0] * total
        for position in range(h.shape[1]):
            for expert in chosen[context, position].tolist():
                taken[expert] += 1
                if taken[expert] <= room:
                    weights[context, position, expert] = probabilities[context, position, expert]
    if isinstance(module, ThresholdExperts) and module.observations.any():
        weights = probabilities * (scores >= module.thresholds)
    elif config.routing == "top" and config.top == 2:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(h.dtype).eps)
    out: Any = 0
    for expert in range(config.count):
        expand_bias, contract_bias = (
            None if bias is None else bias.view(config.count, -1)[expert]
            for bias in (module.expand_bias, module.contract_bias)
        )
        inner = module.activation(F.linear(h, module.expand[expert], expand_bias))
        out = out + weights[..., expert : expert + 1] * F.linear(inner, module.contract[expert], contract_bias)
    share = F.one_hot(chosen[..., 0], total).to(h.dtype).mean((0, 1))
    return out, config.balance * total * (share * probabilities.mean((0, 1))).sum()


THRESHOLD = {"routing": "threshold", "balance": 0}
DEFINED: list[dict[str, Any]] = [
    {},
    {"top": 1},
    {"capacity": 0.75},
    {"top": 1, "capacity": 0.75},
    {"zero": 2},
    {"zero": 3, "top": 1, "capacity": 1.0},
    {"zero": 1, "capacity": 0.75},
    THRESHOLD,
    {**THRESHOLD, "count": 9, "top": 4},
    {**THRESHOLD, "count": 2, "top": 1},
]


@pytest.mark.parametrize("changes", DEFINED, ids=str)
@pytest.mark.parametrize(("bias", "chunk"), [(True, None), (False, 7), (True, 7)])
def test_experts_give_what_their_definition_gives(
    changes: dict[str, Any], bias: bool, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk:
        monkeypatch.setattr(dense, "LONG_ROWS", 0)
        monkeypatch.setattr(dense, "CHUNK_ROWS", chunk)
    module = make(small(width=WIDTH, feed_forward_ratio=INNER / WIDTH, bias=bias), activation="squared_relu", **changes)
    inputs = [rows(), *module.parameters()]

    def joined(out: Tensor, auxiliary: Tensor | None) -> Tensor:
        return torch.cat([out.flatten(), out.new_zeros(1) if auxiliary is None else auxiliary.view(1)])

    def agree() -> None:
        found = with_gradients(lambda h, *_: joined(*module(h)[:2]), inputs)
        wanted = with_gradients(lambda h, *_: joined(*by_definition(module, h)), inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    agree()
    if isinstance(module, ThresholdExperts):
        assert len(set((module.route(rows()).chosen < module.count).sum(-1).tolist())) > 1
        module.observations.zero_()  # before the first step
        agree()


@pytest.mark.parametrize("changes", DEFINED, ids=str)
def test_one_position_without_gradients_is_what_it_is_with_them(changes: dict[str, Any]) -> None:
    module = make(**changes).eval()
    for h in rows().detach()[:1].split(1, 1):
        with torch.no_grad():
            found = module(h).rows
        torch.testing.assert_close(found, module(h.requires_grad_()).rows.detach(), rtol=1e-12, atol=1e-12)


def test_thresholds_move_towards_quantiles() -> None:
    """By the moving mean's share of a distance that edges a factor of √2 apart bound; they end on the quantile."""
    module, h = make(**THRESHOLD, count=5, top=2), rows().detach()
    module.thresholds.zero_()
    module.observations.zero_()
    edges = module._edges(h)
    assert len(edges) == 59 and edges[[0, 29, -1]].tolist() == [-16, 0, 16]
    scores = h.flatten(0, 1) @ module.router.weight.mT
    for step in range(1, 4):
        distance = (step * scores).quantile(1 - 2 / 5, dim=0) - module.thresholds
        before, share = module.thresholds.clone(), 0.01 / (1 - 0.99**step)
        observe(module, step * h)
        spread = (step * scores).sort(0).values.diff(dim=0)[22:26].amax(0)  # between scores around it
        error = (module.thresholds - before - share * distance).abs()
        assert (error <= share * (0.42 * distance.abs() + spread + 2**-10)).all()
    for _ in range(2000):
        observe(module, h)
    shares = (scores > module.thresholds).double().mean(0)
    torch.testing.assert_close(shares, torch.full((5,), 2 / 5).double(), rtol=0, atol=1 / len(scores))


def test_padding_is_not_counted_and_evaluation_observes_nothing() -> None:
    module, h = make(**THRESHOLD), rows().detach()
    real = torch.arange(20).expand(2, -1) < torch.tensor([[20], [7]])
    choice = module.route(h, real)
    assert choice.statistics[0].sum(1).tolist() == [27] * COUNT
    assert (choice.chosen[~real.flatten()] == COUNT).all()
    alone = sum(module.route(h[b : b + 1, :n]).statistics[0] for b, n in ((0, 20), (1, 7)))
    assert torch.equal(choice.statistics[0], alone)
    assert module.eval()(h).statistics == ()


def test_shares_come_near_their_average_in_a_training() -> None:
    """And top-2 with zero experts, which the balance loss makes used alike."""
    model: Any = SparseTransformer(
        small(
            layers=2,
            feed_forward=[{"type": "experts", "count": 8, **THRESHOLD}, {"type": "experts", "count": 3, "zero": 1}],
        )
    )
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    part = model.blocks[0].feed_forward
    taken: list[Tensor] = []
    part.register_forward_hook(lambda module, inputs, _: taken.append(module.route(inputs[0]).chosen))
    for _ in range(150):
        start, step = torch.randint(256, (2, 8, 1))
        tokens = (start + torch.arange(40) * (step % 7)) % 256
        output = model(tokens, return_nats=True, return_extras=True)
        (output.rows.mean() + output.auxiliary_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        part.observe(output.statistics[0].double())
    chosen = torch.stack(taken[-50:])
    shares = torch.stack([(chosen == expert).double().sum() for expert in range(8)]) / chosen[..., 0].numel()
    assert shares.tolist() == pytest.approx([2 / 8] * 8, abs=0.1)


@pytest.mark.parametrize("top", [1, 2])
def test_weights_and_balance_are_those_of_deepspeeds_gating(top: int) -> None:
    """Where it drops nothing and draws nothing."""
    module, h = make(balance=1.0, top=top), rows(torch.float32)
    gates, chosen, auxiliary, _ = module.float().route(h)
    logits = h.flatten(0, 1) @ module.router.weight.mT
    if top == 1:
        balance, combine, *_ = top1gating(logits, 1.0, 0, drop_tokens=False, use_rts=False)
    else:
        balance, combine, *_ = top2gating(logits, 1.0, 0, drop_tokens=False, top2_2nd_expert_sampling=False)
    weights = torch.zeros_like(logits).scatter(1, chosen, gates)
    torch.testing.assert_close(weights, combine.sum(-1))
    torch.testing.assert_close(auxiliary, balance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_expert_is_the_dense_feed_forward(dtype: torch.dtype) -> None:
    """Rows to the bit; gradients, which are computed in another order, as precise as their dtype."""
    network = small()
    module = make(network, dtype, count=1, top=1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.2)
    plain = dense.DenseFeedForward(network, "sigmoid_gelu").to(dtype)
    names = {"expand.weight": "expand", "expand.bias": "expand_bias", "contract.weight": "contract"}
    names["contract.bias"] = "contract_bias"
    own = dict(module.named_parameters())
    plain.load_state_dict(
        {name: own[name_here].view(plain.get_parameter(name).shape) for name, name_here in names.items()}
    )
    h = rows(torch.float32, network.width).to(dtype).detach().requires_grad_()
    out = module(h).rows
    assert torch.equal(out, plain(h).rows)
    inputs = [h, *(plain.get_parameter(name) for name in names)]
    found = torch.autograd.grad(out.square().sum(), [h, *(own[name] for name in names.values())])

    def formula(h: Tensor, *parameters: Tensor) -> Sequence[Tensor]:
        out = functional_call(plain, dict(zip(names, parameters, strict=True)), (h,)).rows
        return torch.autograd.grad(out.square().sum(), (h, *parameters))

    assert_rounding_explains([g.view(x.shape) for g, x in zip(found, inputs, strict=True)], formula, inputs)


def test_the_router_computes_in_fp32() -> None:
    module, h = make(dtype=torch.bfloat16), rows(torch.bfloat16)
    gates, chosen, auxiliary, _ = module.route(h)
    probabilities = (h.float().flatten(0, 1) @ module.router.weight.float().mT).softmax(-1)
    assert gates.dtype == auxiliary.dtype == torch.float32
    expected = probabilities.gather(1, chosen)
    torch.testing.assert_close(gates, expected / expected.sum(-1, keepdim=True))


def test_an_expert_without_rows_has_gradients_of_zero() -> None:
    module, h = make(top=1), rows()
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[2] = h.sum((0, 1))
        h = module.router.weight[2].expand(1, 3, WIDTH).clone()
    module(h).rows.sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
    grad = module.expand.grad
    assert [bool(each.any()) for each in grad] == [False, False, True, False]


@pytest.mark.parametrize("changes", [{"zero": 2}, {"zero": 2, "top": 1}, THRESHOLD], ids=str)
def test_a_rows_experts_depend_on_that_row_alone(changes: dict[str, Any]) -> None:
    """In training too: the choice to the bit; a product's last bits depend on how many rows its expert gets."""
    module, h = make(**changes), rows().detach()
    changed = torch.cat([h[:, :10], -h[:, 10:]], 1)
    assert torch.equal(
        module.route(h).gates.view(2, 20, -1)[:, :10], module.route(changed).gates.view(2, 20, -1)[:, :10]
    )
    torch.testing.assert_close(module(h).rows[:, :10], module(changed).rows[:, :10], rtol=0, atol=2**-40)


def test_a_row_of_zero_experts_gets_nothing() -> None:
    module, h = make(zero=2), rows()
    with torch.no_grad():
        module.router.weight[:COUNT] = 0
        module.router.weight[COUNT:] = h[0, 0]
    out = module(h[:, :1]).rows
    assert not out[0].any() and (module.route(h).gates[0] == 0).all()


@pytest.mark.parametrize("capacity", [0.5, 1.25])
def test_capacity_in_training_reads_no_future(capacity: float) -> None:
    """Nor another context of the batch; in evaluation there is none."""
    module = make(capacity=capacity)
    h = rows().detach()
    changed = torch.cat([h[:, :10], -h[:, 10:]], 1)
    torch.testing.assert_close(module(h).rows[:, :10], module(changed).rows[:, :10], rtol=0, atol=1e-12)
    torch.testing.assert_close(module(h).rows[1:], module(h[1:]).rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(module.eval()(h), make().eval()(h), rtol=0, atol=0)


@pytest.mark.parametrize("ends", [(10, 10, 30, 36), (0, 40, 40, 40)])
def test_groups_by_torchs_own_kernel_are_those_by_loops(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where torch computes it in its own way; no card has run it."""
    random = torch.Generator().manual_seed(3)
    x, weights, bias, grad = (
        torch.randn(shape, generator=random).bfloat16() for shape in ((40, 16), (4, 16, 24), (96,), (40, 24))
    )
    found = []
    for fits in (False, True):
        monkeypatch.setattr(experts, "_fits_grouped_kernel", lambda *_, fits=fits: fits)
        stops = torch.tensor(ends, dtype=torch.int32)
        some = [experts.linear_of_groups(x, weights, each, stops) for each in (None, bias)]
        found.append([*some, *experts.gradients_of_groups(grad, x, stops, 4)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-5)  # an addition more in bf16
    assert not found[1][1][ends[-1] :].any()


def test_operations_are_as_torch_wants_them() -> None:
    x, weights, bias = torch.randn(10, 4), torch.randn(3, 4, 5), torch.randn(15)
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    torch.library.opcheck(torch.ops.longstride.linear_of_groups.default, (x, weights, bias, ends))
    torch.library.opcheck(torch.ops.longstride.gradients_of_groups.default, (x, torch.randn(10, 5), ends, 3))
    taken = torch.tensor([[0, 3, 2], [3, 3, 3], [0, 1, 3]])
    assert experts.pairs_by_expert(taken, 2).tolist() == [0, 6, 7, 2]
    torch.library.opcheck(torch.ops.longstride.pairs_by_expert.default, (taken, 2))
    numbers = torch.tensor([0, 2, 2, 0])
    wanted = torch.zeros(3, 4).index_add(0, numbers, x[:4])
    torch.testing.assert_close(experts.sums_of_pairs(x[:4], numbers, 3), wanted)
    torch.library.opcheck(torch.ops.longstride.sums_of_pairs.default, (x[:4], numbers, 3))


def test_each_expert_is_a_matrix_and_biases_are_vectors() -> None:
    model = SparseTransformer(small(layers=1, feed_forward={"type": "experts", "count": COUNT}))
    path = "blocks.0.feed_forward."
    parts = {name.removeprefix(path): role.part for name, role in model.parameter_roles().items() if path in name}
    matrices, vectors = ("expand", "contract"), ("expand_bias", "contract_bias", "router.weight")
    assert parts == dict.fromkeys(matrices, "matrices") | dict.fromkeys(vectors, "vectors")
    expand = model.get_parameter(f"{path}expand")
    assert [(each.rows, each.columns) for each in matrices_in(expand.shape)] == [expand.shape[1:]] * COUNT


def test_first_values_are_those_of_dense_parts() -> None:
    torch.manual_seed(0)
    model: Any = SparseTransformer(small(layers=2, width=256, feed_forward={"type": "experts", "count": COUNT}))
    module = model.blocks[0].feed_forward
    own = [module.expand.std().item(), module.contract.std().item(), module.router.weight.std().item()]
    std = (0.125 / 256) ** 0.5
    assert own == pytest.approx([std, std / 2 / 4**0.5, std / 10], rel=0.05)
    assert not module.expand_bias.any() and not module.contract_bias.any()


def test_rows_without_any_expert_have_gradients_of_zero() -> None:
    module, h = make(**THRESHOLD), rows()
    module.thresholds.fill_(1e9)
    out = module(h).rows
    assert not out.any()
    out.sum().backward()
    assert not any(parameter.grad.any() for parameter in module.parameters()) and not h.grad.any()
