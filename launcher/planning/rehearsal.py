"""Rehearse a step on fake tensors, to find the memory of activations and the traffic of a process.

Letters: B batch, n positions of a process, C width, U processes that share a context.

A step of a model with a few blocks of each kind runs on tensors that only have shapes. Every storage that the model
creates is counted until it would be freed. This gives the memory that a block stores and its peak, and the order of
the model's blocks gives what the other blocks store at that moment. So the figures always agree with the model, and
nothing is allocated. Under sequence parallelism the model's exchanges create what they would receive, send nothing,
and are counted.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from longstride.kernels.selections import section_reads
from longstride.launcher.config import RunConfig
from longstride.launcher.models import DTYPES
from longstride.sparse_model import BlockConfig, Division, Experts, SparseTransformer, Table

MOST_POSITIONS = 1 << 24  # of a context; a rehearsal of a million takes ten seconds
REHEARSED_BLOCKS = 2  # of each kind: the first also creates shared tensors, such as the table of rotary positions
ON_THEIR_WAY = 2  # block inputs being copied to the host, which DeepSpeed frees afterwards


@dataclass(frozen=True, slots=True)
class Activations:
    """The memory and traffic of a process in a forward and backward pass of one micro-batch."""

    kept: int  # bytes stored for the backward pass, without weights and gradients
    peak: int  # bytes at the worst moment
    on_host: int = 0  # bytes of block inputs in the host's memory
    calls: int = 0  # exchanges between the processes that share a context
    sent_bytes: int = 0  # in these exchanges
    received_bytes: int = 0


def activations(config: RunConfig, checkpointing: bool, device: str = "cuda") -> Activations:
    """Run a micro-batch on fake tensors in the run's precision, with or without activation checkpointing.

    Memory that an attention kernel allocates and frees within a call is not counted. Of the processes that share a
    context, the last is rehearsed, because it receives the most. ``device`` is cuda or cpu.
    """
    blocks = list(config.model.blocks())
    on_host = checkpointing and bool(config.deepspeed.get("activation_checkpointing", {}).get("cpu_checkpointing"))
    is_divided = (config.train.sequence_parallel or 1) > 1 and not config.model.reversible
    # Inputs that are being copied to the host are only there for the newest blocks.
    rounds = REHEARSED_BLOCKS + is_divided + (ON_THEIR_WAY if on_host else 0)
    cycle = list(dict.fromkeys(blocks))
    places = [cycle.index(block) for block in blocks]  # the place in the cycle of the representative of each block
    if config.model.reversible:  # only one block at a time needs memory
        rounds = 1
    else:
        if is_divided:  # the traffic of a block depends on its predecessor, and the last block's rows are not swapped
            lengths = (length for length in range(1, len(blocks) + 1) if len(blocks) % length == 0)
            cycle = next(blocks[:length] for length in lengths if blocks == blocks[:length] * (len(blocks) // length))
            places = [number % len(cycle) for number in range(len(blocks))]
        if len(blocks) <= rounds * len(cycle):
            rounds, cycle, places = 1, blocks, list(range(len(blocks)))
    rehearsal = _rehearse(config, rounds * cycle, checkpointing, on_host, device)
    stored, peak = rehearsal.stored, rehearsal.peak
    if rounds > 1:
        # Leave out the first blocks of each kind; the blocks of the last round stand for the model's last ones.
        *shares, end = rehearsal.shares[-(1 + is_divided) * len(cycle) - 1 :]
        earlier = (rounds - 1 - is_divided) * sum(share.kept for share in shares[: len(cycle)])
        live, peak = rehearsal.starts[-len(shares) - 1] - earlier, 0
        for number, place in enumerate(places):
            share = shares[place - (len(cycle) if number >= len(places) - len(cycle) else len(shares))]
            peak = max(peak, live + share.peak)
            live += share.kept
        stored, peak = live + end.kept, max(peak, live + end.peak)
    traffic = rehearsal.outside
    for number, place in enumerate(places):
        traffic += rehearsal.inside[place if number < len(cycle) else place - len(cycle)]
    return Activations(stored, peak, (len(blocks) - 1) * rehearsal.input_bytes if on_host else 0, **traffic)


@dataclass(slots=True)
class _Rehearsal:
    """The memory and traffic of a forward and backward pass of a few blocks."""

    outside: Counter[str]  # traffic outside of the blocks
    inside: list[Counter[str]]  # traffic of each block, with that to divide its rows
    starts: list[int] = field(default_factory=list)  # live bytes when each block, and then the final norm, begins
    shares: list[Activations] = field(default_factory=list)  # what each block, and then the end, adds to these
    stored: int = 0
    peak: int = 0
    input_bytes: int = 0  # of a block


def _rehearse(
    config: RunConfig, blocks: Sequence[BlockConfig], checkpointing: bool, on_host: bool, device: str
) -> _Rehearsal:
    """Count a forward and backward pass of a model with these blocks on fake tensors."""
    with ExitStack() as modes:
        # The lists of exchanged keys have content: see below.
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # All backends have the same shapes, and the CPU's runs on any machine.
        model = SparseTransformer(config.model.model_copy(update={"backend": "cpu"}), blocks, initialize=False)
        for parameter in model.parameters():  # only parameters, like DeepSpeed
            parameter.data = parameter.data.to(DTYPES[config.precision])
        for module in model.modules():
            if isinstance(module, Table):
                module.rows.requires_grad_(False)  # their gradients are sparse: see ``table_step``
            elif isinstance(module, Experts) and config.train.expert_parallel is not None:
                FakeHolders(config, module)
        outside, *inside = (FakeDivision(config) for _ in range(1 + len(blocks)))
        rehearsal = _Rehearsal(outside.exchanged, [division.exchanged for division in inside])
        if config.train.sequence_parallel is not None:
            model.divide(outside)
            for block, division in zip(model.blocks, inside, strict=True):
                block.divide(division)
            with unset_fake_temporarily():  # cache the lists of exchanged keys, which have content
                for mixer in model.mixers:
                    traffic = mixer.traffic(outside, config.model.context)
                    if traffic is not None and traffic.exchange == "keys":
                        place = config.model.context, outside.size, outside.rank, torch.device("cpu")
                        section_reads(mixer.patterns, mixer.key_value_heads, *place)
        tokens = torch.zeros(config.train.micro_batch, config.model.context, dtype=torch.uint8)
        if device != "cpu":
            modes.enter_context(_FusedDropout())
        carried = model.new_carried(len(tokens), tokens.device, model.embedding.tokens.weight.dtype)
        live = LiveBytes([*model.parameters(), *model.buffers(), tokens, *carried])
        moved: Counter[str] = Counter()
        peaks: list[int] = []  # between the starts, and then between the same points of the backward pass
        inputs_on_host = _InputsOnHost() if on_host else ExitStack()

        def begin(h: Tensor) -> None:
            peaks.append(live.take_peak())
            rehearsal.starts.append(live.now)
            h.register_hook(lambda _: peaks.append(live.take_peak()))

        def run(block: Callable[..., Any], h: Tensor, *inputs: Any) -> Any:
            # The block's rows were divided again. That is not recomputed, but happens for their gradients too.
            for _ in range(2):
                rehearsal.inside[len(rehearsal.starts)].update(outside.exchanged)
            moved.update(outside.exchanged)
            outside.exchanged.clear()
            begin(h)
            if not checkpointing:
                return block(h, *inputs)
            # Like DeepSpeed: stores a block's input, and runs the block again in the backward pass.
            rehearsal.input_bytes = h.nbytes
            with inputs_on_host:
                return checkpoint(block, h, *inputs, use_reentrant=True)

        if not config.model.reversible:
            model.activation_checkpoint = run
        model.norm.register_forward_pre_hook(lambda _, args: begin(*args))
        total = count(model, tokens, live, carried)
    outside.exchanged.subtract(moved)
    rehearsal.stored, rehearsal.peak = total.kept, total.peak
    # Both passes of a block begin and end with the memory of the blocks before it.
    both = zip(peaks[1:], peaks[::-1], rehearsal.starts, [*rehearsal.starts[1:], total.kept], strict=False)
    rehearsal.shares = [Activations(after - before, max(peak) - before) for *peak, before, after in both]
    return rehearsal


def count(
    model: SparseTransformer, tokens: Tensor, live: LiveBytes | None = None, carried: tuple[Tensor, ...] = ()
) -> Activations:
    """Count the memory of a forward and backward pass over tokens (B, N), without the model's tensors and gradients.

    Nor does it count ``live``'s tensors, and what contexts before these have ``carried`` here.

    Tensors may be fake or real. Each gradient is dropped once it is complete: ``states`` counts them.
    """

    def drop_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    hooks = [parameter.register_post_accumulate_grad_hook(drop_gradient) for parameter in trained]
    try:
        with live or LiveBytes([*model.parameters(), *model.buffers(), tokens, *carried]) as live:
            predicted = None if model.config.objective.in_order else torch.zeros_like(tokens, dtype=torch.int32)
            output = model(tokens, return_nats=True, return_extras=True, predicted=predicted, carried=carried)
            loss = output.rows.sum() if output.auxiliary_loss is None else output.rows.sum() + output.auxiliary_loss
            stored = live.now
            loss.backward()
        return Activations(stored, live.peak)
    finally:
        for hook in hooks:
            hook.remove()


class FakeDivision(Division):
    """The last place of a run's division, whose exchanges are counted and go nowhere."""

    def __init__(self, config: RunConfig) -> None:
        size = config.train.sequence_parallel or 1
        # Patterns do not know that nothing is read across documents that are kept apart.
        super().__init__(size - 1, size, exchange="heads" if config.data.apart else config.train.sequence_exchange)
        self.exchanged = Counter(calls=0, sent_bytes=0, received_bytes=0)

    def traffic(self, *attention: Any) -> Any:
        """Return the real traffic, which needs tensors with content."""
        with unset_fake_temporarily():
            return super().traffic(*attention)

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return a tensor of the shape that would be received."""
        counts = sent or [1] * self.size, received or [1] * self.size
        local_rows, row_bytes = counts[0][self.rank], math.prod(values.shape[1:]) * values.element_size()
        sent_bytes, received_bytes = ((sum(side) - local_rows) * row_bytes for side in counts)
        self.exchanged.update(calls=1, sent_bytes=sent_bytes, received_bytes=received_bytes)
        out = values.new_empty(sum(counts[1]), *values.shape[1:])
        values.contiguous()  # counts a temporary copy if it needs one
        return out


class FakeHolders(Division):
    """The first of P processes that divide a layer's experts, which each choose all experts alike."""

    def __init__(self, config: RunConfig, experts: Experts) -> None:
        super().__init__(0, config.train.expert_parallel or 1)
        positions = config.model.objective.num_rows(config.model.context) // (config.train.sequence_parallel or 1)
        self._chosen = config.train.micro_batch * positions * experts.config.top
        self._count = experts.count
        # Only shapes matter, so the first experts stand for any.
        parameters = (getattr(experts, name) for name in experts.by_expert)
        local = (None if x is None else nn.Parameter(x.detach()[: len(x) // self.size].clone()) for x in parameters)
        experts.hold(self, list(local))

    def swap_counts(self, counts: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """Return even counts, as no data decide."""
        ends = [self._chosen * number // self._count for number in range(self._count + 1)]
        each = [end - start for start, end in itertools.pairwise(ends)]
        width = self._count // self.size
        return [each[u * width : (u + 1) * width] for u in range(self.size)], self.size * [each[:width]]

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return a tensor of the shape that would be received."""
        values.contiguous()  # counts a temporary copy if it needs one
        return values.new_empty(sum(received or [1] * self.size), *values.shape[1:])


class _InputsOnHost(saved_tensors_hooks):
    """Moves the inputs of blocks to the host like DeepSpeed, which keeps the newest on the card for a while."""

    def __init__(self) -> None:
        newest: dict[int, Tensor] = {}
        numbers = itertools.count()

        def store(h: Tensor) -> tuple[int, torch.Size, torch.dtype]:
            number = next(numbers)
            newest[number] = h
            newest.pop(number - ON_THEIR_WAY, None)
            return number, h.shape, h.dtype

        def fetch(stored: tuple[int, torch.Size, torch.dtype]) -> Tensor:
            number, shape, dtype = stored
            return newest.pop(number) if number in newest else torch.empty(shape, dtype=dtype)

        super().__init__(store, fetch)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that operations create, as long as it lives, except for some tensors."""

    def __init__(self, without: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self._recent = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in without}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count its outputs."""
        out = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(out) if isinstance(tensor, Tensor)):
            if (key := storage._cdata) not in self._counted:
                self._counted.add(key)
                self.now += storage.nbytes()
                self.peak, self._recent = max(self.peak, self.now), max(self._recent, self.now)
                weakref.finalize(storage, self._free, key, storage.nbytes())
        return out

    def take_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self._recent = self._recent, self.now
        return peak

    def _free(self, key: int, num_bytes: int) -> None:
        self._counted.discard(key)
        self.now -= num_bytes


class _FusedDropout(TorchFunctionMode):
    """Replaces dropout by that of a GPU, which stores a mask of bytes; a CPU stores one of the activations' type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def dropout(h: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return torch.native_dropout(h, p, training)[0] if training and p else h

        return (dropout if func is F.dropout else func)(*args, **(kwargs or {}))
