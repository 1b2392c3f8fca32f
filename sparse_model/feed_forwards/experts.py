"""Mixture of experts: a router chooses one or two of several feed-forwards for each row.

After GShard (Lepikhin et al. 2020) and Switch (Fedus et al. 2021; the idea: Shazeer et al. 2017). Nothing is dropped
and nothing padded: rows are sorted by their expert, and each expert computes the rows that chose it.

Letters: B batch, N positions, R rows, C width, F inner width, E experts, k of them for a row, S = R·k sorted rows.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.feed_forwards import dense
from longstride.sparse_model.feed_forwards.dense import ACTIVATIONS
from longstride.sparse_model.network import NetworkConfig
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    FeedForward,
    FeedForwardConfig,
    MixerOutput,
    Part,
    Work,
    draw,
)

MOST_EXPERTS = 1 << 16


class ExpertsConfig(FeedForwardConfig):
    """Experts, each as wide as a dense feed-forward of the network."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    type: Literal["experts"] = Field(description="experts, each as wide as a dense feed-forward")
    count: int = Field(ge=1, le=MOST_EXPERTS, description="experts")
    top: int = Field(default=2, ge=1, le=2, description="experts for a row: 2 as GShard has it, 1 as Switch")
    activation: Literal["sigmoid_gelu", "squared_relu", "gelu"] = Field(
        default="sigmoid_gelu", description="of each expert, as of a dense feed-forward"
    )
    balance: float = Field(
        default=0.01, ge=0, description="weight of the auxiliary loss, which is 1 where all experts are used alike"
    )
    capacity: Annotated[float, Field(gt=0, le=MOST_EXPERTS)] | None = Field(
        default=None,
        description="in training an expert takes at most this times its even share of a context's choices; null: all",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top > self.count:
            raise ConfigError.at("top", self.top, f"must be at most count {self.count}; nearest {self.count}")
        return self

    def make(self, network: NetworkConfig) -> Experts:
        return Experts(network, self)


class Router(Part):
    """Scores of all experts for each row.

    Muon must not train it: the rows of its gradient add up to zero, as a softmax ignores what is added to all scores.
    Orthogonalised, that direction of mere rounding would be as large as the others.
    """

    trained_as = "vectors"

    def __init__(self, network: NetworkConfig, count: int) -> None:
        super().__init__()
        self.network = network
        self.weight = nn.Parameter(torch.empty(count, network.width))

    def initialize(self) -> None:
        """Draw a tenth of a matrix's values (Fedus et al. 2021, section 2.4), so that choices begin nearly open."""
        draw(self.weight, self.network, 100 * self.network.width)

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (R, C) to scores (R, E), in the precision of the rows."""
        return F.linear(rows, self.weight.to(rows.dtype))


class Experts(FeedForward):
    """Feed-forwards (section 5.2) of which each row uses one or two, weighted by a softmax.

    Each parameter holds all experts. A step gives every one of them a gradient, of zeros for an expert that no row
    chose, so that all ranks have the same gradients to sum. Biases are concatenated, as optimisers treat them as
    vectors.
    """

    part = "experts"

    def __init__(self, network: NetworkConfig, config: ExpertsConfig) -> None:
        super().__init__()
        self.network, self.config, self.count = network, config, config.count
        self.activation, _ = ACTIVATIONS[config.activation]
        self.in_sections = config.capacity is not None  # arrivals are counted by position
        width, inner, bias = network.width, network.feed_forward_width, network.bias
        self.router = Router(network, self.count)
        self.expand = nn.Parameter(torch.empty(self.count, inner, width))
        self.expand_bias = nn.Parameter(torch.zeros(self.count * inner)) if bias else None
        self.contract = nn.Parameter(torch.empty(self.count, width, inner))
        self.contract_bias = nn.Parameter(torch.zeros(self.count * width)) if bias else None

    def initialize(self) -> None:
        """Initialise each expert as a dense feed-forward."""
        draw(self.expand, self.network, self.network.width)
        draw(self.contract, self.network, self.network.feed_forward_width, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Map (B, N, C) to (B, N, C), in training with the auxiliary loss."""
        gates, chosen, auxiliary_loss = self.route(h, context.real)
        if torch.compiler.is_exporting():  # each expert computes all rows: shapes must not depend on the choice
            rows = h.flatten(0, 1)
            out = torch.zeros_like(rows)
            for expert in range(self.count):
                weight = (gates * (chosen == expert)).sum(-1, keepdim=True).to(h.dtype)
                out = out + self._by_expert(rows, expert) * weight
            return MixerOutput(out.view(h.shape))
        if h.shape[1] == 1 and context.real is None and chosen.numel() <= self.count and not torch.is_grad_enabled():
            sums = []  # one position of a few contexts, without sorting
            for row, weights, experts in zip(h, gates.to(h.dtype), chosen.tolist(), strict=True):
                terms = [self._by_expert(row, expert) * weight for weight, expert in zip(weights, experts, strict=True)]
                sums.append(sum(terms[1:], terms[0]))
            return MixerOutput(torch.stack(sums))
        parameters = (self.expand, self.expand_bias, self.contract, self.contract_bias)
        long = dense.CHUNK_ROWS if chosen.numel() > dense.LONG_ROWS else None
        out = SortedExperts.apply(h.flatten(0, 1), gates, chosen, *parameters, self.config.activation, long)
        return MixerOutput(out.view(h.shape), auxiliary_loss)

    def route(self, h: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the experts of each row of h (B, N, C), in fp32 (fp64 for fp64) whatever its precision.

        Args:
            h: rows.
            real: (B, N) bool, False where a row is padding: no expert computes it, and no average or capacity counts
                it; None: all are real.

        Returns:
            - Their weights (R, k): a single expert has its probability (Fedus et al. 2021), two have theirs scaled to
              sum to 1 (Lepikhin et al. 2020).
            - Their numbers (R, k) int64, the more probable first; E for padding and for rows beyond the capacity.
            - In training the auxiliary loss E·Σ f·P over experts, with f the share of rows that choose one first and P
              its mean probability (Lepikhin et al. 2020, algorithm 1). With sequence parallelism it covers whole
              contexts, and is the same on every process.
        """
        config, wide = self.config, torch.promote_types(h.dtype, torch.float32)
        logits = self.router(h.flatten(0, 1).to(wide))
        probabilities = logits.softmax(-1)
        chosen = logits.topk(config.top).indices
        gates = probabilities.gather(-1, chosen)
        auxiliary, fits = None, None if real is None else real.reshape(-1, 1)
        if self.training and config.balance:
            first = chosen[:, :1] == torch.arange(self.count, device=h.device)
            if fits is None:
                means = torch.stack([first.to(wide).mean(0), probabilities.mean(0)])
                share, mean = self.division.sum(means).div(self.division.size)
            else:
                count = fits.to(wide).sum(0).expand(self.count)
                sums = torch.stack([*(x.where(fits, 0.0).sum(0) for x in (first.to(wide), probabilities)), count])
                share, mean, count = self.division.sum(sums)
                share, mean = share / count, mean / count
            auxiliary = config.balance * self.count * (share * mean).sum()
        if self.training and config.capacity is not None:
            fits = self._within_capacity(chosen.view(len(h), -1), real)
        if fits is not None:
            gates, chosen = torch.where(fits, gates, 0.0), torch.where(fits, chosen, self.count)
        if config.top > 1:
            gates = gates / gates.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).eps)
        return gates, chosen, auxiliary

    def work(self, positions: int, batch: int) -> Work:
        """Count the router and the experts of each row. For long inputs the first half is computed again."""
        top = self.config.top
        weights = (self.router.weight, self.expand, self.contract)
        router, expand, contract = (2 * positions * weight.numel() for weight in weights)
        expand, contract = top * expand // self.count, top * contract // self.count
        long = batch * positions * top // self.division.size > dense.LONG_ROWS
        return Work(linear=router + expand + contract, again=expand if long else 0)

    def _within_capacity(self, chosen: Tensor, real: Tensor | None) -> Tensor:
        """Find the choices (B, n·k) of each context that fit the experts' capacity: (R, k) bool, False for padding.

        An expert takes the first choices by position, and the more probable first within a position. So a row depends
        only on earlier rows of its own context. GShard takes all first choices before any second one, and a group may
        hold several contexts: there a row's second choice depends on later rows.
        """
        capacity, top = self.config.capacity, self.config.top
        assert capacity is not None
        arrive = chosen[..., None] == torch.arange(self.count, device=chosen.device)  # (B, n·k, E)
        room: int | Tensor = math.ceil(capacity * chosen.shape[1] * self.division.size / self.count)
        if real is not None:
            counted = real.repeat_interleave(top, 1)[..., None]  # (B, n·k, 1)
            arrive = arrive & counted
            room = (capacity * self.division.sum(counted.sum(1, keepdim=True)).double() / self.count).ceil()
        arrivals = arrive.cumsum(1)
        earlier = self.division.sum_before(arrivals[:, -1:]).expand_as(arrivals)  # of sections before this one
        before, within = (counts.gather(-1, chosen[..., None]) for counts in (earlier, arrivals))
        fits = before + within <= room
        return (fits if real is None else fits & counted).view(-1, top)

    def _by_expert(self, rows: Tensor, expert: int) -> Tensor:
        """Compute rows (…, C) by one expert."""
        expand, contract = (
            None if bias is None else bias.narrow(0, expert * (len(bias) // self.count), len(bias) // self.count)
            for bias in (self.expand_bias, self.contract_bias)
        )
        inner = self.activation(F.linear(rows, self.expand[expert], expand))
        return F.linear(inner, self.contract[expert], contract)


class SortedExperts(torch.autograd.Function):
    """The weighted sum of each row's experts.

    Takes h (R, C), weights (R, k) and numbers (R, k) of experts, expand (E, F, C), its bias (E·F,) or None, contract
    (E, C, F), its bias (E·C,) or None, the kind of activation, and how many rows to compute at a time. With None it
    computes all rows at once and saves the activation's input, which it otherwise computes twice. Returns (R, C).
    Gradients of parameters are summed over chunks in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        gates: Tensor,
        chosen: Tensor,
        expand: Tensor,
        expand_bias: Tensor | None,
        contract: Tensor,
        contract_bias: Tensor | None,
        kind: str,
        rows: int | None,
    ) -> Tensor:
        activation, _ = ACTIVATIONS[kind]
        pieces, saved = [], None
        for x, gate, experts in zip(*(x.split(rows or len(h)) for x in (h, gates, chosen)), strict=True):
            order, ends = _sorted(experts, len(expand))
            before = linear_of_groups(x.index_select(0, order // chosen.shape[1]), expand.mT, expand_bias, ends)
            out = linear_of_groups(activation(before), contract.mT, contract_bias, ends)
            pieces.append(_summed(out.mul_(gate.flatten()[order, None]), order, chosen.shape[1]))
            saved = None if rows else before
        ctx.save_for_backward(h, gates, chosen, expand, expand_bias, contract, contract_bias, saved)
        ctx.kind, ctx.rows = kind, rows
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, gates, chosen, expand, expand_bias, contract, contract_bias, saved = ctx.saved_tensors
        _, activation_and_slope = ACTIVATIONS[ctx.kind]
        count, top = len(expand), chosen.shape[1]
        totals: list[Tensor] = []
        grads_h, grads_gates = [], []
        chunks = (x.split(ctx.rows or len(h)) for x in (h, gates, chosen, grad_out))
        for chunk, gate, experts, grad_chunk in zip(*chunks, strict=True):
            order, ends = _sorted(experts, count)
            x, grad = (rows.index_select(0, order // top) for rows in (chunk, grad_chunk))
            before = linear_of_groups(x, expand.mT, expand_bias, ends) if saved is None else saved
            inner, slope = activation_and_slope(before)
            grad_inner = linear_of_groups(grad, contract, None, ends)  # for a weight of 1
            grad_gate = (grad_inner * inner).sum(-1, dtype=gates.dtype)
            if contract_bias is not None:
                biases = contract_bias.view(count, -1)[experts.flatten()[order].clamp_max(count - 1)]
                grad_gate += (grad * biases).sum(-1, dtype=gates.dtype)
            weights = gate.flatten()[order, None].to(h.dtype)
            grad_before = grad_inner.mul_(slope).mul_(weights)
            gradients = [
                *gradients_of_groups(grad_before, x, ends, count),
                *gradients_of_groups(grad.mul_(weights), inner, ends, count),
            ]
            wide = [x if ctx.rows is None else x.to(gates.dtype) for x in gradients]
            totals = [total.add_(x) for total, x in zip(totals, wide, strict=True)] if totals else wide
            grads_h.append(_summed(linear_of_groups(grad_before, expand, None, ends), order, top))
            grads_gates.append(torch.empty_like(grad_gate).scatter_(0, order, grad_gate).view(-1, top))
        grad_expand, grad_expand_bias, grad_contract, grad_contract_bias = (total.to(h.dtype) for total in totals)
        return (
            torch.cat(grads_h),
            torch.cat(grads_gates),
            None,
            grad_expand,
            None if expand_bias is None else grad_expand_bias.flatten(),
            grad_contract,
            None if contract_bias is None else grad_contract_bias.flatten(),
            None,
            None,
        )


def _sorted(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort the choices (R, k) by expert: their order (S,), and where each expert's end, (E,) int32."""
    experts, order = experts.flatten().sort(stable=True)
    return order, torch.searchsorted(experts, torch.arange(count, device=order.device), right=True, out_int32=True)


def _summed(rows: Tensor, order: Tensor, top: int) -> Tensor:
    """Add up sorted rows (S, C) to the rows that they were sorted from, (R, C)."""
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view(-1, top)
    out = rows.index_select(0, places[:, 0])
    for number in range(1, top):
        out += rows.index_select(0, places[:, number])
    return out


# Custom operations, because the number of rows of an expert depends on the data: torch.compile and a dry run need fixed
# shapes.


@torch.library.custom_op("longstride::linear_of_groups", mutates_args=())
def linear_of_groups(x: Tensor, weights: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Multiply rows x (S, A) by the matrix of their group, weights (E, A, Z), and add its bias, (E·Z,): (S, Z).

    ``ends`` (E,) int32 ascends; group e has the rows before ends[e]. Rows after all groups give zeros.
    """
    bias = None if bias is None else bias.view(len(weights), -1)
    if _fits_grouped_kernel(x, weights):
        group = torch.arange(len(x), device=x.device)[:, None]
        out = F.grouped_mm(x, weights, offs=ends)
        if bias is not None:
            out += bias[torch.searchsorted(ends, group[:, 0], right=True).clamp_max(len(weights) - 1)]
        return out.masked_fill_(group >= ends[-1], 0.0)  # grouped_mm leaves those rows undefined
    out, groups = x.new_empty(len(x), weights.shape[2]), _slices(ends)
    out[groups[-1].stop :] = 0
    for expert, rows in enumerate(groups):
        if bias is None:
            torch.mm(x[rows], weights[expert], out=out[rows])
        else:
            torch.addmm(bias[expert], x[rows], weights[expert], out=out[rows])
    return out


@linear_of_groups.register_fake
def _linear_of_groups_fake(x: Tensor, weights: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("longstride::gradients_of_groups", mutates_args=())
def gradients_of_groups(grad: Tensor, x: Tensor, ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute gradᵀ·x and the sum of grad for each of ``count`` groups of rows (see ``linear_of_groups``).

    grad (S, Z), x (S, A), ``ends`` (E,): (E, Z, A) and (E, Z), zeros for a group without rows.
    """
    sums = grad.new_zeros(count, grad.shape[1])
    if _fits_grouped_kernel(grad, x):
        group = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
        wide = torch.zeros(count + 1, grad.shape[1], device=x.device).index_add_(0, group, grad.float())
        return F.grouped_mm(grad.t(), x, offs=ends), sums.copy_(wide[:count])
    products = grad.new_empty(count, grad.shape[1], x.shape[1])
    for expert, rows in enumerate(_slices(ends)):
        torch.mm(grad[rows].t(), x[rows], out=products[expert])
        torch.sum(grad[rows], 0, out=sums[expert])
    return products, sums


@gradients_of_groups.register_fake
def _gradients_of_groups_fake(grad: Tensor, x: Tensor, ends: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return grad.new_empty(count, grad.shape[1], x.shape[1]), grad.new_empty(count, grad.shape[1])


def _slices(ends: Tensor) -> list[slice]:
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _fits_grouped_kernel(*matrices: Tensor) -> bool:
    """Whether torch's grouped product takes them: bf16 on a GPU, in rows of whole 16 bytes.

    Otherwise each group is a separate product, for which the host has to wait for ``ends``.
    """
    return all(x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 for x in matrices)
