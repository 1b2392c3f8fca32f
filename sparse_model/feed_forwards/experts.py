"""Mixture of experts: a router chooses some of several feed-forwards for each row.

After GShard (Lepikhin et al. 2020) and Switch (Fedus et al. 2021; the idea: Shazeer et al. 2017), or by thresholds (Sun
et al. 2026, arXiv 2603.11535). Nothing is dropped and nothing padded: rows are sorted by their expert, and each expert
computes the rows that chose it.

Letters: B batch, N positions, R rows, C width, F inner width, E experts, k choices of a row, S sorted pairs of a row
and one of its experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.nn import functional as F
from typing_extensions import Self

from longstride.kernels import ConfigError
from longstride.sparse_model.division import Division
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
DECAY = 0.99  # of the moving means of thresholds, as in the paper


class ExpertsConfig(FeedForwardConfig):
    """Experts, each as wide as a dense feed-forward of the network."""

    supports: ClassVar = frozenset({"padding", "reversible", "sections"})
    left_out_at_default = ("routing", "zero")
    type: Literal["experts"] = Field(description="experts, each as wide as a dense feed-forward")
    count: int = Field(ge=1, le=MOST_EXPERTS, description="experts")
    top: int = Field(
        default=2,
        ge=1,
        le=MOST_EXPERTS,
        description="experts for a row: 2 as GShard has it, 1 as Switch; or on average",
    )
    routing: Literal["top", "threshold"] = Field(
        default="top",
        description="threshold: an expert takes each row whose score reaches the quantile that makes `top` on average",
    )
    zero: int = Field(default=0, ge=0, le=MOST_EXPERTS, description="choices beside the experts that add nothing")
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
        if self.routing == "top":
            if self.top > 2:
                raise ConfigError.at("top", self.top, 'must be 1 or 2, or an average with "routing": "threshold"')
            return self
        if self.top == self.count:
            rule = f"threshold routing leaves some of {self.count} experts out; take a smaller top, or more experts"
            raise ConfigError.at("top", self.top, rule)
        if self.zero:
            raise ConfigError.at("zero", self.zero, "threshold routing already lets rows have no expert; leave it out")
        if self.capacity is not None:
            raise ConfigError.at("capacity", self.capacity, "threshold routing has no capacity; set it to null")
        if self.balance not in (0, type(self).model_fields["balance"].default):
            raise ConfigError.at("balance", self.balance, "threshold routing has no balance loss; leave it out")
        return self

    def make(self, network: NetworkConfig) -> Experts:
        return (Experts if self.routing == "top" else ThresholdExperts)(network, self)


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


class Choice(NamedTuple):
    """The experts of each row."""

    gates: Tensor  # (R, k), their weights; 0 for no expert
    chosen: Tensor  # (R, k) int64, their numbers; E for no expert
    auxiliary_loss: Tensor | None = None  # of a ``MixerOutput``
    statistics: tuple[Tensor, ...] = ()


class Experts(FeedForward):
    """Feed-forwards (section 5.2) of which each row uses one or two, weighted by a softmax.

    Each parameter holds all experts. A step gives every one of them a gradient, of zeros for an expert that no row
    chose, so that all ranks have the same gradients to sum. Biases are concatenated, as optimisers treat them as
    vectors.
    """

    part = "experts"
    by_expert = ("expand", "expand_bias", "contract", "contract_bias")  # parameters that end to end hold all experts
    holders: Division | None = None  # the P processes that hold E / P experts each; None: this one holds all
    is_varied = False  # whether rows differ in how many experts they have

    def __init__(self, network: NetworkConfig, config: ExpertsConfig) -> None:
        super().__init__()
        self.network, self.config, self.count = network, config, config.count
        self.activation, _ = ACTIVATIONS[config.activation]
        self.in_sections = config.capacity is not None  # arrivals are counted by position
        width, inner, bias = network.width, network.feed_forward_width, network.bias
        self.router = Router(network, self.count + config.zero)
        self.expand = nn.Parameter(torch.empty(self.count, inner, width))
        self.expand_bias = nn.Parameter(torch.zeros(self.count * inner)) if bias else None
        self.contract = nn.Parameter(torch.empty(self.count, width, inner))
        self.contract_bias = nn.Parameter(torch.zeros(self.count * width)) if bias else None

    def initialize(self) -> None:
        """Initialise each expert as a dense feed-forward."""
        draw(self.expand, self.network, self.network.width)
        draw(self.contract, self.network, self.network.feed_forward_width, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Map (B, N, C) to (B, N, C), in training with the auxiliary loss or statistics."""
        gates, chosen, auxiliary_loss, statistics = self.route(h, context.real)
        if torch.compiler.is_exporting():  # each expert computes all rows: shapes must not depend on the choice
            rows = h.flatten(0, 1)
            out = torch.zeros_like(rows)
            for expert in range(self.count):
                weight = (gates * (chosen == expert)).sum(-1, keepdim=True).to(h.dtype)
                out = out + self._by_expert(rows, expert) * weight
            return MixerOutput(out.view(h.shape))
        if self.holders is not None:
            out = self._exchanged(self.holders, h.flatten(0, 1), gates, chosen)
            return MixerOutput(out.view(h.shape), auxiliary_loss, statistics)
        pairs = len(gates) * self.config.top
        if h.shape[1] == 1 and context.real is None and pairs <= self.count and not torch.is_grad_enabled():
            out = torch.zeros_like(h)  # one position of a few contexts, without sorting
            for row, total, weights, experts in zip(h, out, gates.to(h.dtype), chosen.tolist(), strict=True):
                for weight, expert in zip(weights, experts, strict=True):
                    if expert < self.count:
                        total += self._by_expert(row, expert) * weight
            return MixerOutput(out, auxiliary_loss, statistics)
        parameters = (self.expand, self.expand_bias, self.contract, self.contract_bias)
        long = dense.CHUNK_ROWS if pairs > dense.LONG_ROWS else None
        # Listed outside of the function, which torch.compile does not let find out sizes.
        orders = [pairs_by_expert(x, self.config.top) for x in chosen.split(long or pairs)] if self.is_varied else ()
        options = (self.config.activation, long)
        out = SortedExperts.apply(h.flatten(0, 1), gates, chosen, *parameters, *options, *orders)
        return MixerOutput(out.view(h.shape), auxiliary_loss, statistics)

    def route(self, h: Tensor, real: Tensor | None = None) -> Choice:
        """Choose the experts of each row of h (B, N, C), in fp32 (fp64 for fp64) whatever its precision.

        Args:
            h: rows.
            real: (B, N) bool, False where a row is padding: no expert computes it, and no average or capacity counts
                it; None: all are real.

        Returns:
            - Their weights: a single expert has its probability (Fedus et al. 2021), two have theirs scaled to sum to 1
              (Lepikhin et al. 2020), also if one of the two is a zero expert.
            - Their numbers, the more probable first; E for zero experts, padding and rows beyond the capacity.
            - In training the auxiliary loss E·Σ f·P over experts, zero experts included, with f the share of rows that
              choose one first and P its mean probability (Lepikhin et al. 2020, algorithm 1). With sequence parallelism
              it covers whole contexts, and is the same on every process.
        """
        config, wide, total = self.config, torch.promote_types(h.dtype, torch.float32), self.count + self.config.zero
        logits = self.router(h.flatten(0, 1).to(wide))
        probabilities = logits.softmax(-1)
        chosen = logits.topk(config.top).indices
        gates = probabilities.gather(-1, chosen)
        auxiliary, fits = None, None if real is None else real.reshape(-1, 1)
        if self.training and config.balance:
            first = chosen[:, :1] == torch.arange(total, device=h.device)
            if fits is None:
                means = torch.stack([first.to(wide).mean(0), probabilities.mean(0)])
                share, mean = self.division.sum(means).div(self.division.size)
            else:
                count = fits.to(wide).sum(0).expand(total)
                sums = torch.stack([*(x.where(fits, 0.0).sum(0) for x in (first.to(wide), probabilities)), count])
                share, mean, count = self.division.sum(sums)
                share, mean = share / count, mean / count
            auxiliary = config.balance * total * (share * mean).sum()
        if self.training and config.capacity is not None:
            fits = self._within_capacity(chosen.view(len(h), -1), real)
        if fits is not None:
            gates, chosen = torch.where(fits, gates, 0.0), torch.where(fits, chosen, self.count)
        if config.top > 1:
            gates = gates / gates.sum(-1, keepdim=True).clamp_min(torch.finfo(wide).eps)
        if config.zero:
            gates, chosen = torch.where(chosen < self.count, gates, 0.0), chosen.clamp_max(self.count)
        return Choice(gates, chosen, auxiliary)

    def hold(self, holders: Division, parameters: Sequence[Tensor | None]) -> None:
        """Hold only E / P experts from now on, whose ``parameters`` these are, in the order of ``by_expert``."""
        self.holders = holders
        for name, parameter in zip(self.by_expert, parameters, strict=True):
            delattr(self, name)
            setattr(self, name, parameter)

    def work(self, positions: int, batch: int) -> Work:
        """Count the router and each row's experts, in even use. For long inputs the first half is computed again."""
        top, total = self.config.top, self.count + self.config.zero
        weights = (self.router.weight, self.expand, self.contract)
        router, expand, contract = (2 * positions * weight.numel() for weight in weights)
        expand, contract = top * expand // total, top * contract // total
        long = batch * positions * top // self.division.size > dense.LONG_ROWS
        return Work(linear=router + expand + contract, again=expand if long else 0)

    def _within_capacity(self, chosen: Tensor, real: Tensor | None) -> Tensor:
        """Find the choices (B, n·k) of each context that fit the experts' capacity: (R, k) bool, False for padding.

        An expert takes the first choices by position, and the more probable first within a position. So a row depends
        only on earlier rows of its own context. GShard takes all first choices before any second one, and a group may
        hold several contexts: there a row's second choice depends on later rows. Zero experts are counted alike.
        """
        capacity, top, total = self.config.capacity, self.config.top, self.count + self.config.zero
        assert capacity is not None
        arrive = chosen[..., None] == torch.arange(total, device=chosen.device)  # (B, n·k, E)
        room: int | Tensor = math.ceil(capacity * chosen.shape[1] * self.division.size / total)
        if real is not None:
            counted = real.repeat_interleave(top, 1)[..., None]  # (B, n·k, 1)
            arrive = arrive & counted
            room = (capacity * self.division.sum(counted.sum(1, keepdim=True)).double() / total).ceil()
        arrivals = arrive.cumsum(1)
        earlier = self.division.sum_before(arrivals[:, -1:]).expand_as(arrivals)  # of sections before this one
        before, within = (counts.gather(-1, chosen[..., None]) for counts in (earlier, arrivals))
        fits = before + within <= room
        return (fits if real is None else fits & counted).view(-1, top)

    def _exchanged(self, holders: Division, h: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """Map rows h (R, C) by the experts of all ``holders``: every row travels to its experts and back.

        An expert computes its rows in the order of processes, and of rows in each.
        """
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.count, device=h.device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1)).view(holders.size, -1)  # (P, E / P)
        sent, received = holders.swap_counts(counts)
        to, of = ([sum(numbers) for numbers in side] for side in (sent, received))
        order = order[: sum(to)]  # without choices of no expert
        arrived = holders.swap_rows(_RowsOfPairs.apply(h, order // chosen.shape[1]), to, of)
        local = torch.arange(counts.shape[1], device=h.device).repeat(holders.size)
        repeats = torch.tensor(received, device=h.device).flatten()
        local = torch.repeat_interleave(local, repeats, output_size=sum(of))[:, None]
        parameters = (self.expand, self.expand_bias, self.contract, self.contract_bias)
        long = dense.CHUNK_ROWS if len(arrived) > dense.LONG_ROWS else None
        ones = gates.new_ones(len(arrived), 1)
        out = SortedExperts.apply(arrived, ones, local, *parameters, self.config.activation, long)
        return _WeightedSums.apply(holders.swap_rows(out, of, to), gates, order)

    def _by_expert(self, rows: Tensor, expert: int) -> Tensor:
        """Compute rows (…, C) by one expert."""
        expand, contract = (
            None if bias is None else bias.narrow(0, expert * (len(bias) // self.count), len(bias) // self.count)
            for bias in (self.expand_bias, self.contract_bias)
        )
        inner = self.activation(F.linear(rows, self.expand[expert], expand))
        return F.linear(inner, self.contract[expert], contract)


class ThresholdExperts(Experts):
    """Experts that take each row whose score reaches the expert's threshold (Sun et al. 2026, arXiv 2603.11535).

    A threshold is the moving mean of the score above which ``top`` / E of a step's rows lie, so that rows have ``top``
    experts on average. It is a buffer: a row's experts depend on that row alone, in training too, and no balance loss
    is needed. An expert's weight is the sigmoid of its score, not normalised (appendix E.4). Before the first step,
    rows take the ``top`` experts of the highest scores. (The paper begins with steps in which experts choose rows,
    which reads later rows.) A mean begins anew if the expert took less than half or more than twice its share: no
    gradient reaches an expert without rows, so a mean that lags must not last.

    A quantile is no sum over ranks and micro-batches. So scores are counted by their distance from the threshold,
    between edges that are finest at the threshold, and the quantile is interpolated between two edges.
    """

    is_varied = True
    thresholds: Tensor  # (E,)
    observations: Tensor  # (E,), how many steps they are the mean of

    def __init__(self, network: NetworkConfig, config: ExpertsConfig) -> None:
        super().__init__(network, config)
        self.register_buffer("thresholds", torch.zeros(self.count))
        self.register_buffer("observations", torch.zeros(self.count))

    def route(self, h: Tensor, real: Tensor | None = None) -> Choice:
        """Choose the experts of each row of h (B, N, C), in fp32 (fp64 for fp64) whatever its precision.

        Args:
            h: rows.
            real: (B, N) bool, False where a row is padding: no expert computes it, and no threshold counts it; None:
                all are real.
        """
        scores = self.router(h.flatten(0, 1).to(torch.promote_types(h.dtype, torch.float32)))  # (R, E)
        least = scores.topk(self.config.top).values[:, -1:]
        taken = scores >= torch.where(self.observations > 0, self.thresholds, least)
        if real is not None:
            taken = taken & real.reshape(-1, 1)
        gates = torch.where(taken, scores.sigmoid(), 0.0)
        chosen = torch.where(taken, torch.arange(self.count, device=h.device), self.count)
        return Choice(gates, chosen, statistics=(self._counted(scores.detach(), real),) if self.training else ())

    def observe(self, total: Tensor) -> None:
        """Move the thresholds towards the quantiles of a step's scores, counted between the edges: (E, edges + 1)."""
        edges = self._edges(total)
        wanted = total.sum(-1, keepdim=True) * self.config.top / self.count
        above = total.flip(-1).cumsum(-1).flip(-1)[:, 1:]  # (E, edges), how many scores lie above each
        upper = (above > wanted).sum(-1, keepdim=True).clamp(1, len(edges) - 1)
        more, fewer = above.gather(-1, upper - 1), above.gather(-1, upper)
        share = ((more - wanted) / (more - fewer).clamp_min(1)).clamp(0, 1)
        moved = torch.lerp(edges[upper - 1], edges[upper], share)[:, 0]
        taken = above[:, len(edges) // 2, None]
        is_off = (2 * taken < wanted) | (taken > 2 * wanted)
        self.observations.copy_(self.observations.where(~is_off[:, 0], 0) + 1)
        self.thresholds += moved * (1 - DECAY) / (1 - DECAY ** self.observations.to(total.dtype))

    def _counted(self, scores: Tensor, real: Tensor | None) -> Tensor:
        """Count the scores (R, E) of real rows between the edges around each threshold: (E, edges + 1)."""
        edges = self._edges(scores)
        counts = self.thresholds.new_zeros(self.count, len(edges) + 1)
        place = torch.bucketize(scores - self.thresholds, edges)
        place += torch.arange(self.count, device=scores.device) * counts.shape[1]
        rows = torch.ones_like(scores) if real is None else real.reshape(-1, 1).expand_as(scores)
        counts.view(-1).scatter_add_(0, place.flatten(), rows.flatten().to(counts.dtype))  # sums of ones: exact
        return counts

    def _edges(self, like: Tensor) -> Tensor:
        """Return the distances between which scores are counted: ±2^-10 to ±2^4 in steps of √2, and 0."""
        upper = torch.exp2(torch.arange(29, dtype=like.dtype, device=like.device) / 2 - 10)
        return torch.cat([-upper.flip(0), upper.new_zeros(1), upper])


class SortedExperts(torch.autograd.Function):
    """The weighted sum of each row's experts.

    Takes h (R, C), weights (R, k) and numbers (R, k) of experts, expand (E, F, C), its bias (E·F,) or None, contract
    (E, C, F), its bias (E·C,) or None, the kind of activation, and how many rows to compute at a time. With None it
    computes all rows at once and saves the activation's input, which it otherwise computes twice. If rows differ in
    their number of experts, it also takes the pairs of each chunk, see ``pairs_by_expert``. Returns (R, C). Gradients
    of parameters are summed over chunks in fp32 (fp64 for fp64).
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
        *orders: Tensor,
    ) -> Tensor:
        activation, _ = ACTIVATIONS[kind]
        pieces, saved = [], None
        chunks = (x.split(rows or len(h)) for x in (h, gates, chosen))
        for number, (x, gate, experts) in enumerate(zip(*chunks, strict=True)):
            order, ends = _sorted(experts, len(expand), orders[number] if orders else None)
            before = linear_of_groups(x.index_select(0, order // chosen.shape[1]), expand.mT, expand_bias, ends)
            out = linear_of_groups(activation(before), contract.mT, contract_bias, ends)
            pieces.append(_summed(out.mul_(gate.flatten()[order, None]), order, experts, bool(orders)))
            saved = None if rows else before
        ctx.save_for_backward(h, gates, chosen, expand, expand_bias, contract, contract_bias, saved, *orders)
        ctx.kind, ctx.rows = kind, rows
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        h, gates, chosen, expand, expand_bias, contract, contract_bias, saved, *orders = ctx.saved_tensors
        _, activation_and_slope = ACTIVATIONS[ctx.kind]
        count, top = len(expand), chosen.shape[1]
        totals: list[Tensor] = []
        grads_h, grads_gates = [], []
        chunks = (x.split(ctx.rows or len(h)) for x in (h, gates, chosen, grad_out))
        for number, (chunk, gate, experts, grad_chunk) in enumerate(zip(*chunks, strict=True)):
            order, ends = _sorted(experts, count, orders[number] if orders else None)
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
            grads_h.append(_summed(linear_of_groups(grad_before, expand, None, ends), order, experts, bool(orders)))
            grads_gates.append(torch.zeros_like(gate.flatten()).scatter_(0, order, grad_gate).view(-1, top))
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
            *len(orders) * [None],
        )


class _RowsOfPairs(torch.autograd.Function):
    """The rows of h (R, C) with these numbers (S,): (S, C). Gradients are summed in a fixed order."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = len(h)
        return h.index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sums_of_pairs(grad, ctx.saved_tensors[0], ctx.rows), None


class _WeightedSums(torch.autograd.Function):
    """The sums (R, C) of rows out (S, C) times their weights, the elements ``order`` (S,) of gates (R, k)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, gates: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(out, gates, order)
        weighted = torch.mul(out, gates.flatten()[order, None], out=torch.empty_like(out))
        return sums_of_pairs(weighted, order // gates.shape[1], len(gates))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        out, gates, order = ctx.saved_tensors
        grad = grad.index_select(0, order // gates.shape[1])
        grad_gates = torch.zeros_like(gates)
        grad_gates.view(-1)[order] = (grad * out).sum(-1, dtype=gates.dtype)
        return grad.mul_(gates.flatten()[order, None]), grad_gates, None


def _sorted(experts: Tensor, count: int, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort the choices (R, k) by expert: their order (S,), unless it is known, and each expert's end, (E,) int32."""
    if order is not None:
        return order, (experts < count).sum(0).cumsum(0, dtype=torch.int32)
    experts, order = experts.flatten().sort(stable=True)
    return order, torch.searchsorted(experts, torch.arange(count, device=order.device), right=True, out_int32=True)


def _summed(rows: Tensor, order: Tensor, experts: Tensor, is_varied: bool) -> Tensor:
    """Add up sorted rows (S, C) to the rows that they were sorted from by ``experts`` (R, k): (R, C)."""
    top = experts.shape[1]
    if is_varied:
        return sums_of_pairs(rows, order // top, len(experts))
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view(-1, top)
    out = rows.index_select(0, places[:, 0])
    for number in range(1, top):
        out += rows.index_select(0, places[:, number])
    return out


# Custom operations, because the number of rows of an expert depends on the data: torch.compile and a dry run need fixed
# shapes.


@torch.library.custom_op("longstride::pairs_by_expert", mutates_args=())
def pairs_by_expert(experts: Tensor, average: int) -> Tensor:
    """Return where ``experts`` (R, E) is below E, by column: (S,) int64 in its flattened form.

    On fake tensors without shapes to be found out, S is R times ``average``.
    """
    columns, rows = (experts.mT < experts.shape[1]).nonzero().unbind(1)
    return rows * experts.shape[1] + columns


@pairs_by_expert.register_fake
def _pairs_by_expert_fake(experts: Tensor, average: int) -> Tensor:
    try:
        return experts.new_empty(torch.library.get_ctx().new_dynamic_size())
    except DynamicOutputShapeException:  # a dry run
        return experts.new_empty(experts.shape[0] * average)


@torch.library.custom_op("longstride::sums_of_pairs", mutates_args=())
def sums_of_pairs(x: Tensor, numbers: Tensor, rows: int) -> Tensor:
    """Add up x (S, C) to the rows of these ``numbers`` (S,), in a fixed order: (R, C), R = ``rows``."""
    if not len(x):
        return x.new_zeros(rows, x.shape[1])
    numbers, order = numbers.sort(stable=True)
    starts = torch.searchsorted(numbers, torch.arange(rows, device=numbers.device))
    return F.embedding_bag(order, x, starts, mode="sum")


@sums_of_pairs.register_fake
def _sums_of_pairs_fake(x: Tensor, numbers: Tensor, rows: int) -> Tensor:
    return x.new_empty(rows, x.shape[1])


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
        inside = grad.float().masked_fill_((group == count)[:, None], 0)
        is_of_group = group == torch.arange(count, device=x.device)[:, None]
        sums.copy_(is_of_group.float() @ inside)  # index_add_ is not deterministic on a GPU
        return F.grouped_mm(grad.t(), x, offs=ends), sums
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
    """Whether torch's grouped product takes them: bf16 on a GPU, in one row or more of whole 16 bytes.

    Otherwise each group is a separate product, for which the host has to wait for ``ends``.
    """
    return all(x.is_cuda and x.dtype == torch.bfloat16 and len(x) and x.shape[-1] % 8 == 0 for x in matrices)
