"""Bistable recurrent cells (Vecoven et al. 2020), whose state can keep a value for any number of positions.

The recurrence runs in fp32 (fp64 for fp64): 1 + tanh has steps of 2^-7 in bf16. Its backward pass is written by hand,
with memory and time linear in the positions.

Letters: B batch, N positions, C width, R width of the state.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from longstride.kernels.patterns import Pattern
from longstride.sparse_model.network import MOST_WIDTH, NetworkConfig
from longstride.sparse_model.part import (
    PLAIN,
    BlockContext,
    Carried,
    HeadWidths,
    Mixer,
    MixerConfig,
    MixerOutput,
    Work,
    draw_linear,
)
from longstride.sparse_model.rotary import Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import TILE, wide_of


class RecurrentConfig(MixerConfig, StrictModel):
    """A recurrence of bistable cells, and a projection back to the network's width."""

    supports: ClassVar = frozenset({"documents", "padding", "reversible"})
    left_out_at_default: ClassVar[tuple[str, ...]] = ("stateful",)

    type: Literal["recurrent"] = Field(description="a recurrence of bistable cells (Vecoven et al. 2020)")
    cell: Literal["nbrc", "brc"] = Field(
        default="nbrc", description="gates read all channels of the state (nbrc), or their own channel alone (brc)"
    )
    width: Annotated[int, Field(gt=0, le=MOST_WIDTH)] | None = Field(
        default=None, description="channels of the state; null: the network's width"
    )
    stateful: bool = Field(default=False, description="each context begins with the state that the one before left")

    @property
    def has_queries(self) -> bool:
        return False

    @property
    def carries(self) -> bool:
        return self.stateful

    def check(self, network: NetworkConfig, context: int) -> None:
        """Accept any context."""

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        """Return the state's channels, split over heads, as a cache keeps at most one state for each position."""
        return HeadWidths(0, -(-(self.width or network.width) // network.heads), in_kernels=False)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> Recurrent:
        return Recurrent(network, self)


class Recurrent(Mixer):
    """h_n = c ∘ h_(n-1) + (1 - c) ∘ tanh(U x_n + a ∘ h_(n-1)), projected back (Vecoven et al. 2020).

    a = 1 + tanh(U_a x_n + W_a h_(n-1) + b_a), c = sigmoid(U_c x_n + W_c h_(n-1) + b_c). W_a and W_c are matrices (nbrc)
    or diagonals (brc). Above 1, a makes a channel bistable: it then keeps one of two values.
    """

    part = "recurrence"

    def __init__(self, network: NetworkConfig, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.width or network.width
        self.network, self.width, self.stateful = network, width, config.stateful
        self.inputs = nn.Linear(network.width, 3 * width, bias=False)  # U_a, U_c, U
        self.stacked_rows = {"inputs": (width, width, width)}
        # W_a, W_c. Diagonals are one vector, which no optimiser takes for a matrix.
        self.gates = nn.Parameter(torch.empty((2, width, width) if config.cell == "nbrc" else 2 * width))
        self.gate_bias = nn.Parameter(torch.empty(2 * width)) if network.bias else None  # b_a, b_c
        self.projection = nn.Linear(width, network.width, bias=network.bias)

    @property
    def carried(self) -> tuple[Carried, ...]:  # type: ignore[override]
        """The state after the last row, in the precision of the recurrence."""
        return (Carried((self.width,), wide_of(self.gates)),) if self.stateful else ()

    def initialize(self) -> None:
        """Set the values of the authors' code: Glorot's for inputs, orthogonal matrices or ones for the state."""
        for matrix in self.inputs.weight.detach().chunk(3):
            nn.init.xavier_uniform_(matrix)
        if self.gates.dim() == 1:
            nn.init.ones_(self.gates)
        else:
            for matrix in self.gates.detach():
                nn.init.orthogonal_(matrix)
        if self.gate_bias is not None:
            nn.init.zeros_(self.gate_bias)
        draw_linear(self.projection, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        state: Any = context.state
        initial, begins = None, None
        if state is not None:
            initial = state.before(context.first)
        elif context.carried:
            (initial,) = context.carried
        if context.places is not None:
            begins = context.places == 0
            begins[:, 0] = False  # goes on from the initial state, or from zeros
        inputs = self.inputs(h.transpose(0, 1))  # the rows of a position side by side
        hidden, _ = _recurrence(inputs, self.gates, self.gate_bias, None if begins is None else begins.T, initial)
        hidden = hidden.transpose(0, 1)
        if state is not None:
            state.write(context.first, hidden)
        output = MixerOutput(self.projection(hidden.to(inputs.dtype)))
        if initial is None or not context.carried:
            return output
        return output._replace(carried=(_last_of(hidden.detach(), context.real, initial),))

    def new_state(
        self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int
    ) -> RecurrentStates:
        # A row may be computed again, and a session has computed one row more than it has tokens.
        shape = min(back, length) + 2, batch, self.width
        return RecurrentStates(torch.zeros(shape, device=device, dtype=wide_of(self.gates)))

    def work(self, positions: int, batch: int) -> Work:
        weights = self.inputs.weight.numel() + self.gates.numel() + self.projection.weight.numel()
        return Work(linear=2 * positions * weights)


def _last_of(hidden: Tensor, real: Tensor | None, initial: Tensor) -> Tensor:
    """Return the state (B, R) after the last row that is no padding, of states (B, N, R)."""
    if real is None:
        return hidden[:, -1].clone()  # a view would keep all states
    count = real.sum(1)
    last = hidden[torch.arange(len(hidden), device=hidden.device), count - 1]
    return torch.where((count > 0)[:, None], last, initial)


class RecurrentStates:
    """The last states of a recurrence in generation. State p is that after the first p rows, stored at p modulo S."""

    def __init__(self, states: Tensor) -> None:
        """Take memory for S states, (S, B, R)."""
        self.states = states
        self.initial = torch.zeros_like(states[0])
        self.length = 0  # rows so far

    def before(self, position: int) -> Tensor:
        """Return the state (B, R) that the row at a position reads."""
        return self.states[position % len(self.states)] if position else self.initial

    def write(self, first: int, hidden: Tensor) -> None:
        """Store the states (B, n, R) after rows from position ``first`` on, as far as there is room."""
        self.length = first + hidden.shape[1]
        kept = hidden[:, -len(self.states) :].transpose(0, 1)
        places = torch.arange(self.length + 1 - len(kept), self.length + 1, device=hidden.device)
        self.states[places % len(self.states)] = kept

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        self.initial[into] = source.initial[order]
        self.length = min(source.length, length)
        count = min(len(self.states), len(source.states))
        places = torch.arange(max(0, length + 1 - count), length + 1, device=self.states.device)
        self.states[places % len(self.states), into] = source.states[places % len(source.states)][:, order]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)
        if not length:
            self.initial = torch.zeros_like(self.initial)

    def carry(self) -> None:
        """Begin the next context with the state after the last row."""
        self.initial = self.before(self.length).clone()
        self.length = 0


@torch.library.custom_op("longstride::gated_recurrence", mutates_args=())
def _recurrence(
    inputs: Tensor, gates: Tensor, bias: Tensor | None, begins: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the states of a recurrence, see ``Recurrent``; one opaque operation for compilers and plans.

    Args:
        inputs: (N, B, 3R): U_a x, U_c x and U x.
        gates: (2, R, R), or diagonals (2R).
        bias: (2R); None: 0.
        begins: (N, B) bool, True where the state before the row is 0; None: nowhere.
        initial: (B, R), the state before the first row, which has no gradient; None: 0.

    Returns:
        States (N, B, R), and a, c and the tanh of each row, (N, B, 3R), which the backward pass reads.
    """
    hidden, values = _empty_states(inputs)
    width, weights = hidden.shape[2], gates.to(values.dtype).view(2 * hidden.shape[2], -1)
    values.copy_(inputs)
    both = values[..., : 2 * width]
    if bias is not None:
        both += bias
    h = torch.zeros_like(hidden[0]) if initial is None else initial.to(values.dtype)
    resets = _resets(begins)
    # Tensors are split once: indexing them in the loop takes longer than a row's arithmetic.
    rows = zip(both.unbind(), *(x.unbind() for x in values.split(width, -1)), hidden.unbind(), strict=True)
    with torch.autocast(values.device.type, enabled=False):  # autocast would round to 16 bits
        for position, (gate_rows, a, c, candidate, after) in enumerate(rows):
            if position in resets:
                h = h.masked_fill(resets[position], 0.0)
            if gates.dim() == 1:
                gate_rows.unflatten(-1, (2, width)).addcmul_(h[:, None], weights.view(2, width))
            else:
                gate_rows.addmm_(h, weights.T)
            a.tanh_().add_(1.0)
            c.sigmoid_()
            candidate.addcmul_(a, h).tanh_()
            h = torch.lerp(candidate, h, c, out=after)
    return hidden, values


def _empty_states(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate both results of ``_recurrence``."""
    length, batch, channels = inputs.shape
    hidden, values = (
        torch.empty(length, batch, width, dtype=wide_of(inputs), device=inputs.device)
        for width in (channels // 3, channels)
    )
    return hidden, values


def _resets(begins: Tensor | None) -> dict[int, Tensor]:
    """Map each position at which a document begins in some context to where it does, (B, 1) bool."""
    if begins is None:
        return {}
    return {position: begins[position, :, None] for position in begins.any(1).nonzero().flatten().tolist()}


@_recurrence.register_fake
def _recurrence_fake(
    inputs: Tensor, gates: Tensor, bias: Tensor | None, begins: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _empty_states(inputs)


@torch.library.custom_op("longstride::gated_recurrence_backward", mutates_args=())
def _recurrence_backward(
    grad_hidden: Tensor,
    hidden: Tensor,
    values: Tensor,
    gates: Tensor,
    begins: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of inputs (N, B, 3R), gates and bias (2R), in the precision of the recurrence."""
    width, weights = hidden.shape[2], gates.to(values.dtype).view(2 * hidden.shape[2], -1)
    resets = _resets(begins)
    before = torch.empty_like(hidden)  # the state that each row reads
    before[1:] = hidden[:-1]
    before[0] = 0.0 if initial is None else initial
    for position, is_reset in resets.items():
        before[position].masked_fill_(is_reset, 0.0)
    a, c, candidate = values.split(width, -1)
    grads = torch.empty_like(values)
    of_a, of_c, of_candidate = grads.split(width, -1)
    # First the factors by which the gradient of a row's state gives those of its three sums, then the gradients.
    tile = max(1, TILE // max(1, before[0].numel()))  # positions: new memory for all would take longer than the loop
    for read, row_a, row_c, row, *out in zip(
        *(x.split(tile) for x in (before, a, c, candidate, of_a, of_c, of_candidate)), strict=True
    ):
        torch.mul(read, 1 - (row_a - 1).square_(), out=out[0])
        torch.mul(read - row, row_c * (1 - row_c), out=out[1])
        torch.mul(1 - row_c, 1 - row.square(), out=out[2])
    both = grads[..., : 2 * width]
    grad = torch.zeros_like(before[0])
    views = (x.unbind() for x in (both, of_a, of_c, of_candidate, a, c, grad_hidden))
    with torch.autocast(values.device.type, enabled=False):
        for position, (gate_rows, grad_a, grad_c, grad_candidate, row_a, row_c, grad_row) in reversed(
            list(enumerate(zip(*views, strict=True)))
        ):
            grad += grad_row
            grad_candidate.mul_(grad)
            grad_a.mul_(grad_candidate)
            grad_c.mul_(grad)
            grad.mul_(row_c).addcmul_(grad_candidate, row_a)
            if gates.dim() == 1:
                grad += (gate_rows * weights.T).unflatten(-1, (2, width)).sum(-2)
            else:
                grad.addmm_(gate_rows, weights)
            if position in resets:
                grad.masked_fill_(resets[position], 0.0)
        if gates.dim() == 1:
            grad_gates = (both.unflatten(-1, (2, width)) * before[:, :, None]).sum((0, 1)).flatten()
        else:
            grad_gates = (both.flatten(0, 1).T @ before.flatten(0, 1)).view(gates.shape)
    return grads, grad_gates, both.sum((0, 1))


@_recurrence_backward.register_fake
def _recurrence_backward_fake(
    grad_hidden: Tensor,
    hidden: Tensor,
    values: Tensor,
    gates: Tensor,
    begins: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_gates = torch.empty_like(gates, dtype=values.dtype)
    return torch.empty_like(values), grad_gates, values.new_empty(2 * hidden.shape[2])


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    rows, gates, bias, begins, initial = inputs
    hidden, values = output
    ctx.dtypes = rows.dtype, gates.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(hidden, values, gates, begins, initial)
    ctx.mark_non_differentiable(values)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_hidden: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad_hidden is None:
        return None, None, None, None, None
    grads = _recurrence_backward(grad_hidden, *ctx.saved_tensors)
    cast = [None if dtype is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True)]
    return *cast, None, None


_recurrence.register_autograd(_differentiate, setup_context=_save)
