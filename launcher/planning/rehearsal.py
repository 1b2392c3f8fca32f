"""A step rehearsed: what a process keeps, brings to the host and sends, found on tensors that have no content.

Letters: B batch, n positions of a process, C width, U processes that share a context.

A step of a model with a few blocks of each kind runs on tensors that have shapes alone; every storage that the model's
own code creates is counted until it would be freed. That tells what a block keeps and what it takes at work; the
model's own order tells what other blocks keep at that moment. Nothing here can drift from the model, and nothing is
allocated. Where contexts are divided the exchanges are the model's own too: they make what they would receive, send
nothing, and are counted.
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
from torch import Tensor
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
from longstride.sparse_model import BlockConfig, BlockContext, Division, SparseTransformer

MOST_POSITIONS = 1 << 24  # of a context: a rehearsal goes through it piece by piece, and a million take ten seconds
REHEARSED_BLOCKS = 2  # of each kind: the first also makes what blocks share, such as the table of rotary positions
ON_THEIR_WAY = 2  # inputs of the newest blocks: DeepSpeed frees them once the host has them


@dataclass(frozen=True, slots=True)
class Activations:
    """What a process takes beside weights and gradients, in a forward and backward pass over one micro-batch."""

    kept: int  # bytes, when the loss is known, for the backward pass
    peak: int  # bytes, at the worst moment
    on_host: int = 0  # bytes of block inputs, in the host's memory
    calls: int = 0  # of exchanges between the processes that share a context
    sent_bytes: int = 0  # in them, to the others
    received_bytes: int = 0


def activations(config: RunConfig, checkpointing: bool, device: str = "cuda") -> Activations:
    """Rehearse a micro-batch, in the run's precision, on a GPU (``device`` cuda) or a CPU (cpu).

    What an attention kernel allocates and frees within a call is not counted. Of the processes that share a context it
    is the last, which receives the most.
    """
    blocks = list(config.model.blocks())
    on_host = checkpointing and bool(config.deepspeed.get("activation_checkpointing", {}).get("cpu_checkpointing"))
    # Inputs that are on their way to the host are not what each block keeps.
    divided = (config.train.sequence_parallel or 1) > 1 and not config.model.reversible
    rounds = REHEARSED_BLOCKS + divided + (ON_THEIR_WAY if on_host else 0)
    cycle = list(dict.fromkeys(blocks))
    places = [cycle.index(block) for block in blocks]  # in it, of the one that stands for each block
    if config.model.reversible:  # one block at a time is at work, and none keeps anything
        rounds = 1
    else:
        if divided:  # a block may find its rows divided otherwise than it wants them, and the last hands on none
            cycle = _repeated(blocks)
            places = [number % len(cycle) for number in range(len(blocks))]
        if len(blocks) <= rounds * len(cycle):
            rounds, cycle, places = 1, blocks, list(range(len(blocks)))
    rehearsed = _rehearse(config, rounds * cycle, checkpointing, on_host, device)
    kept, peak = rehearsed.kept, rehearsed.peak
    if rounds > 1:
        # As if the first ones of each kind were not there; of the others, those of the last round come last.
        *shares, behind = rehearsed.shares[-(1 + divided) * len(cycle) - 1 :]
        earlier = (rounds - 1 - divided) * sum(share.kept for share in shares[: len(cycle)])
        live, peak = rehearsed.begun[-len(shares) - 1] - earlier, 0
        for number, place in enumerate(places):
            share = shares[place - (len(cycle) if number >= len(places) - len(cycle) else len(shares))]
            peak = max(peak, live + share.peak)
            live += share.kept
        kept, peak = live + behind.kept, max(peak, live + behind.peak)
    exchanged = rehearsed.around
    for number, place in enumerate(places):
        exchanged += rehearsed.within[place if number < len(cycle) else place - len(cycle)]
    return Activations(kept, peak, (len(blocks) - 1) * rehearsed.input_bytes if on_host else 0, **exchanged)


def _repeated(blocks: list[BlockConfig]) -> list[BlockConfig]:
    """Return the shortest run of blocks that, repeated, is all of them."""
    lengths = (length for length in range(1, len(blocks) + 1) if len(blocks) % length == 0)
    return next(blocks[:length] for length in lengths if blocks == blocks[:length] * (len(blocks) // length))


@dataclass(slots=True)
class _Rehearsed:
    """A forward and backward pass of a few blocks."""

    around: Counter[str]  # what is exchanged outside of the blocks
    within: list[Counter[str]]  # by each of them, and to divide its rows as it wants them
    begun: list[int] = field(default_factory=list)  # bytes that live when a block begins, and what is behind all
    shares: list[Activations] = field(default_factory=list)  # what each of these adds to those
    kept: int = 0
    peak: int = 0
    input_bytes: int = 0  # of a block


def _rehearse(
    config: RunConfig, blocks: Sequence[BlockConfig], checkpointing: bool, on_host: bool, device: str
) -> _Rehearsed:
    """Count a forward and backward pass of a model with these blocks on tensors without content."""
    with ExitStack() as modes:
        # Lists of keys that travel have content: see ``_list_keys``.
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # Every backend's operation has the same shapes, and the CPU's runs on any machine.
        model = SparseTransformer(config.model.model_copy(update={"backend": "cpu"}), blocks)
        for parameter in model.parameters():  # parameters alone, as DeepSpeed casts them
            parameter.data = parameter.data.to(DTYPES[config.precision])
        if model.embedding.ngrams is not None:  # whose gradients are no tensor of their size: see ``table_step``
            model.embedding.ngrams.rows.requires_grad_(False)
        around, *within = (Pretended(config) for _ in range(1 + len(blocks)))
        rehearsed = _Rehearsed(around.exchanged, [each.exchanged for each in within])
        if config.train.sequence_parallel is not None:
            model.divide(around)
            for block, own in zip(model.blocks, within, strict=True):
                block.divide(own)
            with unset_fake_temporarily():
                _list_keys(model, around)
        tokens = torch.zeros(config.train.micro_batch, config.model.context, dtype=torch.uint8)
        if device != "cpu":
            modes.enter_context(_FusedDropout())
        live = LiveBytes([*model.parameters(), *model.buffers(), tokens])
        moved: Counter[str] = Counter()
        peaks: list[int] = []  # between those moments, and then between the same ones of the backward pass
        kept_inputs = _ToHost() if on_host else ExitStack()

        def begin(h: Tensor) -> None:
            peaks.append(live.take_peak())
            rehearsed.begun.append(live.now)
            h.register_hook(lambda _: peaks.append(live.take_peak()))

        def run(block: Callable[..., Any], h: Tensor, context: BlockContext) -> Any:
            # Its rows were divided anew, which nothing recomputes, and their gradients will be.
            for _ in range(2):
                rehearsed.within[len(rehearsed.begun)].update(around.exchanged)
            moved.update(around.exchanged)
            around.exchanged.clear()
            begin(h)
            if not checkpointing:
                return block(h, context)
            # As DeepSpeed's: keeps a block's input, and runs the block again in the backward pass.
            rehearsed.input_bytes = h.nbytes
            with kept_inputs:
                return checkpoint(block, h, context, use_reentrant=True)

        if not config.model.reversible:
            model.activation_checkpoint = run
        model.norm.register_forward_pre_hook(lambda _, args: begin(*args))
        total = count(model, tokens, live)
    around.exchanged.subtract(moved)
    rehearsed.kept, rehearsed.peak = total.kept, total.peak
    # Both passes of a block begin and end with what those before it keep.
    both = zip(peaks[1:], peaks[::-1], rehearsed.begun, [*rehearsed.begun[1:], total.kept], strict=False)
    rehearsed.shares = [Activations(after - before, max(peak) - before) for *peak, before, after in both]
    return rehearsed


def _list_keys(model: SparseTransformer, division: Division) -> None:
    """Have the lists of keys that mixers exchange made and kept, so that the rehearsal finds them."""
    context, place = model.config.context, (division.size, division.rank)
    for mixer in model.mixers:
        traffic = mixer.traffic(division, context)
        if traffic is not None and traffic.exchange == "keys":
            section_reads(mixer.patterns, mixer.key_value_heads, context, *place, torch.device("cpu"))


def count(model: SparseTransformer, tokens: Tensor, live: LiveBytes | None = None) -> Activations:
    """Count what a forward and backward pass over tokens (B, N) creates beside the model's tensors and their gradients.

    Tensors may have content or not. Each gradient is dropped once it is complete: ``states`` counts them.
    """

    def drop_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    hooks = [parameter.register_post_accumulate_grad_hook(drop_gradient) for parameter in trained]
    try:
        with live or LiveBytes([*model.parameters(), *model.buffers(), tokens]) as live:
            output = model(tokens, return_nats=True, return_extras=True)
            loss = output.rows.sum() if output.auxiliary_loss is None else output.rows.sum() + output.auxiliary_loss
            kept = live.now
            loss.backward()
        return Activations(kept, live.peak)
    finally:
        for hook in hooks:
            hook.remove()


class Pretended(Division):
    """The last place of a run's division, whose exchanges go nowhere and are counted."""

    def __init__(self, config: RunConfig) -> None:
        size = config.train.sequence_parallel or 1
        # Between documents that are kept apart nothing is read, which no pattern tells.
        super().__init__(size - 1, size, exchange="heads" if config.data.apart else config.train.sequence_exchange)
        self.exchanged = Counter(calls=0, sent_bytes=0, received_bytes=0)

    def traffic(self, *attention: Any) -> Any:
        """Return the real traffic: it follows from numbers of rows, which have content."""
        with unset_fake_temporarily():
            return super().traffic(*attention)

    def swap(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return what would be received, without content."""
        counts = sent or [1] * self.size, received or [1] * self.size
        own, row_bytes = counts[0][self.rank], math.prod(values.shape[1:]) * values.element_size()
        sent_bytes, received_bytes = ((sum(side) - own) * row_bytes for side in counts)
        self.exchanged.update(calls=1, sent_bytes=sent_bytes, received_bytes=received_bytes)
        out = values.new_empty(sum(counts[1]), *values.shape[1:])
        values.contiguous()  # for a moment a copy, where it is not
        return out


class _ToHost(saved_tensors_hooks):
    """The inputs of blocks brought to the host as DeepSpeed does, which holds the newest on the card for a while."""

    def __init__(self) -> None:
        newest: dict[int, Tensor] = {}
        numbers = itertools.count()

        def bring(h: Tensor) -> tuple[int, torch.Size, torch.dtype]:
            number = next(numbers)
            newest[number] = h
            newest.pop(number - ON_THEIR_WAY, None)
            return number, h.shape, h.dtype

        def fetch(brought: tuple[int, torch.Size, torch.dtype]) -> Tensor:
            number, shape, dtype = brought
            return newest.pop(number) if number in newest else torch.empty(shape, dtype=dtype)

        super().__init__(bring, fetch)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation makes, as long as it lives, but for those of some tensors."""

    def __init__(self, without: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = self._recent = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in without}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and count what it returns."""
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
    """Dropout as on a GPU, which keeps a mask of bytes; a CPU keeps one of the activations' type."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def dropout(h: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            return torch.native_dropout(h, p, training)[0] if training and p else h

        return (dropout if func is F.dropout else func)(*args, **(kwargs or {}))
