"""The gated delta rule (Yang et al. 2025), Mamba-2's decay without the correction, and the delta rule without decay.

Letters: B batch, H heads, N positions, n new positions, C width, D width of a head's query and key, Dv of its value.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from longstride.kernels import ConfigError
from longstride.kernels.patterns import Pattern
from longstride.kernels.recurrences import delta_rule
from longstride.sparse_model.mixers.convolution import CausalConvolution, RecentRows
from longstride.sparse_model.network import MOST_CONVOLVED, MOST_HEADS, POSITIVE, WHOLE, NetworkConfig
from longstride.sparse_model.norm import RMSNorm
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
from longstride.sparse_model.rotary import PreparedHeads, Rotary
from longstride.sparse_model.strict import StrictModel
from longstride.sparse_model.tiles import wide_of

BLOCK = 64  # positions between the states that generation keeps; as many as a chunk of the rule
LARGEST_DECAY = 16.0  # of e^A at first, and the range of its time steps: the authors' code
SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


class DeltaConfig(MixerConfig, StrictModel):
    """A recurrence with a matrix as its state, which positions decay, correct and read."""

    supports: ClassVar = frozenset({"documents", "padding", "reversible"})
    left_out_at_default: ClassVar = ("stateful",)

    type: Literal["delta"] = Field(description="recurrence with a matrix a head as state: the gated delta rule")
    heads: Annotated[int, Field(gt=0, le=MOST_HEADS)] | None = Field(
        default=None, description="heads, each with a state; null: the network's"
    )
    key_ratio: Annotated[float, POSITIVE] = Field(
        default=0.75, description="channels of all queries (and all keys) / width"
    )
    value_ratio: Annotated[float, POSITIVE] = Field(default=1.5, description="channels of all values / width")
    decay: bool = Field(default=True, description="states decay by a factor that each position chooses")
    correction: bool = Field(
        default=True, description="a value replaces what the state has at its key; false: it is added, as in Mamba-2"
    )
    convolution: Annotated[int, Field(ge=2, le=MOST_CONVOLVED)] = Field(
        default=4, description="positions that a short convolution of queries, keys and values reads"
    )
    stateful: bool = Field(default=False, description="a context begins with the state that the one before ended with")

    @property
    def has_queries(self) -> bool:
        return False

    @property
    def carries(self) -> bool:
        return self.stateful

    def check(self, network: NetworkConfig, context: int) -> None:
        heads, width = self.heads or network.heads, network.width
        for name in ("key_ratio", "value_ratio"):
            ratio = getattr(self, name)
            channels = ratio * width
            if abs(channels - round(channels)) > WHOLE or round(channels) % heads or round(channels) < 1:
                good = max(1, round(channels / heads)) * heads / width
                rule = f"times width {width} must be channels that divide into heads={heads}; nearest {good}"
                raise ConfigError.at(name, ratio, rule)

    def head_patterns(self, network: NetworkConfig) -> tuple[Pattern, ...]:
        return ()

    def head_widths(self, network: NetworkConfig) -> HeadWidths:
        heads = self.heads or network.heads
        key, value = (round(ratio * network.width) // heads for ratio in (self.key_ratio, self.value_ratio))
        return HeadWidths(key, value, in_kernels=False, kept_heads=heads)

    def make(self, network: NetworkConfig, rotary: Rotary | None) -> DeltaMixer:
        return DeltaMixer(network, self)


class Rows(NamedTuple):
    """The inputs of the rule: what positions read from a state and write to it."""

    q: Tensor  # (B, H, n, D)
    k: Tensor
    v: Tensor  # (B, H, n, Dv)
    log_decay: Tensor | None  # (B, H, n) in fp32 (fp64 for fp64)
    beta: Tensor | None


class DeltaMixer(Mixer):
    """out = W_o (norm(Sᵀ q) ∘ silu(W_g x)), with S_t = e^g_t (I - β_t k_t k_tᵀ) S_t-1 + β_t k_t v_tᵀ for each head.

    Queries, keys and values are projections after a short causal convolution and SiLU. Queries and keys have length 1.
    The rate β is σ(W_β x), and the decay g is -e^A softplus(W_α x + b) (Yang et al. 2025, section 3.4).
    """

    part = "attention"

    def __init__(self, network: NetworkConfig, config: DeltaConfig) -> None:
        super().__init__()
        self.network, self.config, self.heads = network, config, config.heads or network.heads
        keys, values = (round(ratio * network.width) for ratio in (config.key_ratio, config.value_ratio))
        self.keys, self.values = keys, values
        self.widths = keys // self.heads, values // self.heads  # D and Dv
        self.query_key_value_gate = nn.Linear(network.width, 2 * (keys + values), bias=network.bias)
        self.stacked_rows = {"query_key_value_gate": (keys, keys, values, values)}
        self.convolution = CausalConvolution(config.convolution, 2 * keys + values)
        gates = config.decay + config.correction
        self.rates = nn.Linear(network.width, gates * self.heads, bias=False) if gates else None
        self.decay = nn.Parameter(torch.empty(self.heads)) if config.decay else None  # A
        self.step = nn.Parameter(torch.empty(self.heads)) if config.decay else None  # b
        self.norm = RMSNorm(values // self.heads)
        self.projection = nn.Linear(values, network.width, bias=network.bias)
        if config.stateful:
            earlier = Carried((config.convolution - 1, 2 * keys + values))
            self.carried = (Carried((self.heads, *self.widths), torch.float32), earlier)

    def initialize(self) -> None:
        draw_linear(self.query_key_value_gate, self.network)
        if self.rates is not None:
            draw_linear(self.rates, self.network)
        if self.decay is not None and self.step is not None:
            nn.init.uniform_(self.decay, 0.0, LARGEST_DECAY)
            nn.init.uniform_(self.step, math.log(SHORTEST_STEP), math.log(LONGEST_STEP))
            with torch.no_grad():
                self.decay.clamp_min_(SHORTEST_STEP).log_()
                self.step.exp_().expm1_().log_()  # softplus of it is the time step
        draw_linear(self.projection, self.network, into_stream=True)

    def forward(self, h: Tensor, context: BlockContext = PLAIN) -> MixerOutput:
        """Mix rows (B, N, C); with a state, positions from ``context.first`` on read it and change it."""
        state: Any = context.state
        projected, gate = self.query_key_value_gate(h).split((2 * self.keys + self.values, self.values), -1)
        memory, earlier = context.carried or (None, None)
        places = context.places
        recent = None if state is None else state.recent
        rows = self.rows_of(h, self.convolution(projected, recent, context.first, places, earlier), context.real)
        if state is not None:
            out = state.step(rows, context.first) if h.shape[1] == 1 else state.extend(rows, context.first)
        else:
            begins = None
            if places is not None:  # position 0 goes on from what is carried, which is 0 if nothing came before
                begins = (places == 0).index_fill(1, places.new_zeros(1), False)
            out, memory = delta_rule(*rows, initial=memory, begins=begins)
        mixed = self.norm(out.transpose(1, 2)).flatten(2) * F.silu(gate)
        output = MixerOutput(self.projection(mixed))
        if earlier is None:
            return output
        assert memory is not None
        return output._replace(carried=(memory.detach(), _last(earlier, projected.detach(), places, context.real)))

    def rows_of(self, h: Tensor, convolved: Tensor, real: Tensor | None) -> Rows:
        """Split convolved projections (B, n, ·) into heads, and compute the gates of rows h (B, n, C) in fp32.

        Padding (``real`` is False) leaves the state as it is.
        """
        width = self.widths[0]
        prepared = PreparedHeads.apply(F.silu(convolved), 2 * self.keys, width, True, None)
        parts = prepared.split((self.keys, self.keys, self.values), -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        q, k = q / width, k / math.sqrt(width)  # their root mean square was 1; scores have 1 / √D besides
        if real is not None:
            k = k * real[:, None, :, None]
        log_decay, beta = None, None
        if self.rates is not None:
            rates = self.rates(h)
            gates = list(rates.to(wide_of(rates)).transpose(1, 2).split(self.heads, 1))  # (B, H, n)
            if self.config.correction:
                beta = gates.pop().sigmoid()
            if self.decay is not None and self.step is not None:
                wide = gates[0].dtype
                speed, step = self.decay.to(wide).exp()[:, None], self.step.to(wide)[:, None]
                log_decay = -speed * F.softplus(gates[0] + step)
                if real is not None:
                    log_decay = log_decay * real[:, None]
        return Rows(q, k, v, log_decay, beta)

    def new_state(self, batch: int, length: int, device: torch.device, dtype: torch.dtype, back: int) -> DeltaState:
        recent = self.convolution.new_state(batch, length, device, back)
        channels = self.keys + self.values + (self.config.decay + self.config.correction) * self.heads
        memory = torch.zeros(2, batch, self.heads, *self.widths, device=device, dtype=wide_of(self.projection.weight))
        blocks = min(max(1, -(-length // BLOCK)), 2 - -back // BLOCK)
        rows = memory.new_zeros(blocks * BLOCK, batch, channels)
        return DeltaState(self.config, memory, rows, memory.new_zeros(blocks, *memory.shape[1:]), recent)

    def work(self, positions: int, batch: int) -> Work:
        """Count products, chunk by chunk; the backward pass computes all of a chunk but its output again."""
        linears = (self.query_key_value_gate, self.rates, self.projection)
        weights = sum(linear.weight.numel() for linear in linears if linear is not None)
        (width, value), size = self.widths, min(BLOCK, positions)
        state, again = 2 * width * value, 4 * size * width  # k k' and q k'
        if self.config.correction:  # the state read by keys, the triangular inverse, and its product
            again += state + size * (2 * size // 3 + 2 * value)
        products = self.heads * positions * (again + 2 * size * value + 2 * state)
        linear = Work(linear=2 * positions * weights + products, again=self.heads * positions * again)
        return linear + self.convolution.work(positions, batch)


class DeltaState:
    """The state of a recurrence in generation, and what it takes to return to one of the last ``back`` positions.

    Memory does not depend on the position. A step reads the state before its position and writes the one after it to
    another place, so that it can be repeated. States at multiples of ``BLOCK`` are kept, and the rows after them:
    removing tokens begins at one of these and steps again, with the same bits.
    """

    def __init__(self, config: DeltaConfig, memory: Tensor, rows: Tensor, edges: Tensor, recent: RecentRows) -> None:
        """Take zeros: states (2, B, H, D, Dv), rows (R * BLOCK, B, ·), and states before R blocks, (R, B, H, D, Dv)."""
        self.config, self.memory, self.rows, self.edges, self.recent = config, memory, rows, edges, recent
        self.positions = [0, -1]  # of the two states
        self.initial = memory[0].clone()
        self.written = self.initial.clone(), 0  # the last state that no step made, and its position

    def step(self, rows: Rows, position: int) -> Tensor:
        """Write one position, and return what it reads, (B, H, 1, Dv)."""
        before = self._before(position)
        packed = torch.cat([x.flatten(1) for x in rows[1:] if x is not None], 1)
        self.rows[position % len(self.rows)] = packed
        after = self._after(before, position)
        return (rows.q.mT * after).sum(2, keepdim=True).to(rows.q.dtype)  # no product that autocast would round

    def extend(self, rows: Rows, first: int) -> Tensor:
        """Write n positions from ``first`` on, and return what they read, (B, H, n, Dv)."""
        last, outputs = first + rows.q.shape[2], []
        state, position = self._before(first), first
        kept = last - len(self.rows)  # earlier rows, and the states before them, are not needed
        while position < last:
            reach = max(position + 1, kept + BLOCK)
            end = min(last, reach + -reach % BLOCK)
            if position % BLOCK == 0:
                self.edges[position // BLOCK % len(self.edges)] = state
            part = Rows._make(None if x is None else x[:, :, position - first : end - first] for x in rows)
            out, state = delta_rule(*part, initial=state)
            outputs.append(out)
            position = end
        stored = range(max(first, kept), last)
        packed = [x.movedim(2, 0).flatten(2)[stored.start - first :] for x in rows[1:] if x is not None]
        places = torch.arange(stored.start, last, device=state.device) % len(self.rows)
        self.rows[places] = torch.cat([x.to(self.rows.dtype) for x in packed], 2)
        self._store(state, first, last)
        self.written = state, last
        return torch.cat(outputs, 2)

    def take(self, source: Any, order: Tensor, length: int, into: slice) -> None:
        self.recent.take(source.recent, order, length, into)
        self.positions = list(source.positions)
        self.memory[:, into] = source.memory[:, order]
        self.initial[into] = source.initial[order]
        rows, edges = min(len(self.rows), len(source.rows)), min(len(self.edges), len(source.edges))
        self.rows[:rows, into] = source.rows[:rows, order]
        self.edges[:edges, into] = source.edges[:edges, order]
        self.written = self._current().clone(), max(self.positions)

    def truncate(self, length: int) -> None:
        """Forget all positions but the first ``length``; with 0, also what an earlier context handed over."""
        self.recent.truncate(length)
        if length == 0:
            self.initial.zero_()
            self._begin()
        elif length not in self.positions:
            state, position = self.written
            edge = length // BLOCK * BLOCK
            if not edge <= position <= length:
                state = self.edges[edge // BLOCK % len(self.edges)] if edge else self.initial
                position = edge
            self.memory[0], self.positions = state, [position, -1]
            for place in range(position, length):
                self._after(self._before(place), place)
        if self.written[1] > length:
            self.written = self.memory[self.positions.index(length)].clone(), length

    def carry(self) -> None:
        """Begin the next context, with the state of the last position and the last rows of the convolution."""
        self.recent.carry(max(self.positions))
        self.initial.copy_(self._current())
        self._begin()

    def _begin(self) -> None:
        self.memory[0], self.positions = self.initial, [0, -1]
        self.written = self.initial.clone(), 0

    def _current(self) -> Tensor:
        return self.memory[self.positions.index(max(self.positions))]

    def _before(self, position: int) -> Tensor:
        """Return the state before a position."""
        return self.initial if position == 0 else self.memory[self.positions.index(position)]

    def _store(self, state: Tensor, before: int, after: int) -> None:
        """Write the state after some positions to the place that does not have the one before them."""
        place = 1 - self.positions.index(before)
        self.memory[place], self.positions[place] = state, after

    def _after(self, state: Tensor, position: int) -> Tensor:
        """Apply the rule to a state with the stored row of a position, and store the result."""
        if position % BLOCK == 0:
            self.edges[position // BLOCK % len(self.edges)] = state
        _, heads, width, value = state.shape
        gates = (self.config.decay + self.config.correction) * heads
        k, v, rest = self.rows[position % len(self.rows)].split((heads * width, heads * value, gates), 1)
        k, v = k.view(-1, heads, width, 1), v.view(-1, heads, 1, value)
        decay = rest[:, :heads].exp()[..., None, None] if self.config.decay else 1.0
        after = state * decay
        if self.config.correction:
            v = (v - (k * after).sum(2, keepdim=True)) * rest[:, -heads:, None, None]
        after = torch.addcmul(after, k, v)
        self._store(after, position, position + 1)
        return after


def _last(earlier: Tensor, rows: Tensor, places: Tensor | None, real: Tensor | None) -> Tensor:
    """Return the last rows that are not padding, (B, k - 1, C), of earlier ones and these.

    With ``places`` (B, N), those before the last document are 0: nothing came before it.
    """
    count, positions = earlier.shape[1], rows.shape[1]
    rows = torch.cat([earlier.to(rows.dtype), rows], 1)
    ends = torch.full((len(rows), 1), positions, device=rows.device) if real is None else real.sum(1, keepdim=True)
    index = torch.arange(count, device=rows.device)
    rows = rows.gather(1, (ends + index)[..., None].expand(-1, -1, rows.shape[2]))
    if places is None:
        return rows
    begin = (ends - 1 - places.gather(1, ends.clamp_min(1) - 1)).clamp_min(0)  # of the last document
    return rows.masked_fill(((begin > 0) & (ends + index < begin + count))[..., None], 0.0)
