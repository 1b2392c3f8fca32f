"""The Compressive Transformer's attention beside its definition, in fp64, context by context.

Letters: B batch, H heads, N positions.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.memories.compressive import CompressiveAttention
from longstride.sparse_model.part import BlockContext, places_of
from tests.harness.configs import small
from tests.sparse_model.memories.test_transformer_xl import (
    CLOSE,
    HEADS,
    WIDTH,
    assert_a_session_carries,
    assert_equal_with_gradients,
    definition,
    reads_of,
)

KINDS = ("mean", "max", "convolution")
MEMORY, COMPRESSED, RATE = 13, 7, 3
SIZES = {"memory": MEMORY, "compressed": COMPRESSED, "rate": RATE}


def attention(**options: Any) -> CompressiveAttention:
    """Return a layer in fp64 in which every weight matters."""
    kind = {"type": "compressive", "untied": True, **SIZES, **options}
    config = small(width=WIDTH, heads=HEADS, query_key_ratio=2, attention=kind)
    torch.manual_seed(0)
    (mixer, *_) = SparseTransformer(config).double().mixers
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert isinstance(mixer, CompressiveAttention)
    return mixer


class Memories:
    """Both memories of one context, as lists of rows."""

    def __init__(self) -> None:
        self.recent: list[Tensor] = []
        self.compressed: list[Tensor] = []
        self.left: list[Tensor] = []  # with the last context
        self.made: list[Tensor] = []  # of these

    def add(self, mixer: CompressiveAttention, rows: Tensor) -> None:
        """Take the rows of a context, (N, C)."""
        self.recent += rows.detach().unbind()
        self.left, self.made = [], []
        while len(self.recent) > MEMORY:
            group, self.recent = self.recent[:RATE], self.recent[RATE:]
            self.left += group
            self.made.append(compress(mixer, torch.stack(group)))
        self.compressed = [*self.compressed, *(row.detach() for row in self.made)][-COMPRESSED:]

    @property
    def rows(self) -> Tensor:
        """All rows, (·, C)."""
        rows = self.compressed + self.recent
        return torch.stack(rows) if rows else torch.empty(0, WIDTH, dtype=torch.float64)


def compress(mixer: CompressiveAttention, group: Tensor) -> Tensor:
    """Compress rows (r, C) to one, (C,)."""
    if mixer.convolve is None:
        return group.mean(0) if mixer.config.compression == "mean" else group.amax(0)
    kernel = mixer.convolve.weight.unflatten(0, (RATE, WIDTH)).permute(1, 2, 0)  # (out, in, place)
    return torch.nn.functional.conv1d(group.T[None], kernel, mixer.convolve.bias, stride=RATE)[0, :, 0]


def reconstruction(mixer: CompressiveAttention, h: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return the squares of the differences of attention, a mean over channels: (N,)."""
    of_q, of_k, of_v = (weight.detach() for weight in mixer.query_key_value.weight.split(mixer.widths))
    results = []
    for rows in (old, new):
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (h @ of_q.T, rows @ of_k.T, rows @ of_v.T))
        results.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)
    return (results[0] - results[1]).square().mean((0, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3, 7, 13, 20, 45])
def test_attention_is_its_definition(kind: str, length: int) -> None:
    """Of lanes that begin at different contexts: outputs, gradients, memories and the auxiliary loss."""
    mixer = attention(compression=kind, position_channels=10).train()
    memories = [Memories() for _ in range(3)]
    carried = tuple(torch.zeros((3, *each.shape), dtype=each.dtype or torch.float64) for each in mixer.carried)
    for step in range({1: 44, 3: 16}.get(length, 6)):
        if step == 2:  # the trainer resets a lane
            carried = tuple(tensor.index_fill(0, torch.tensor(1), 0) for tensor in carried)
            memories[1] = Memories()
        h = torch.randn(3, length, WIDTH, dtype=torch.float64, requires_grad=True)
        output = mixer(h, BlockContext(carried=carried))
        expected, losses = [], []
        for lane, memory in enumerate(memories):
            rows = memory.rows[None]
            count = torch.tensor([rows.shape[1]])
            expected.append(definition(mixer, h[lane : lane + 1], rows, reads_of(count, rows.shape[1], length))[0])
            memory.add(mixer, h[lane])
            if memory.left:
                losses.append(
                    reconstruction(mixer, h[lane].detach(), torch.stack(memory.left), torch.stack(memory.made))
                )
        if kind == "convolution":
            assert mixer.convolve is not None and output.auxiliary_loss is not None
            loss = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
            torch.testing.assert_close(output.auxiliary_loss, loss, **CLOSE)
            learned, tensors = {*mixer.convolve.parameters()}, [h, *mixer.parameters()]
            gradients = torch.autograd.grad(output.auxiliary_loss, tensors, allow_unused=True, retain_graph=True)
            for tensor, gradient in zip(tensors, gradients, strict=True):
                assert (gradient is not None) == (tensor in learned)
                if tensor in learned and losses:
                    (wanted,) = torch.autograd.grad(loss, tensor, retain_graph=True)
                    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
        else:
            assert output.auxiliary_loss is None
        assert_equal_with_gradients(mixer, output.rows, torch.stack(expected), h)
        carried = output.carried
        for lane, memory in enumerate(memories):
            recent, count, compressed, summaries = (tensor[lane] for tensor in carried)
            assert (count, summaries) == (len(memory.recent), len(memory.compressed))
            for ours, theirs in ((recent, memory.recent), (compressed, memory.compressed)):
                if theirs:
                    torch.testing.assert_close(ours[-len(theirs) :], torch.stack(theirs), **CLOSE)


def test_documents_and_padding_are_left_out_of_the_memories() -> None:
    """After a document's beginning, memories are those of a lane that began with it, without padding."""
    mixer = attention().train()
    carried = tuple(torch.zeros((3, *each.shape), dtype=each.dtype or torch.float64) for each in mixer.carried)
    first, second = torch.randn(2, 3, 40, WIDTH, dtype=torch.float64)
    begins = torch.zeros(3, 40, dtype=torch.bool)
    begins[1, [9, 30]] = begins[2, 5] = True
    real = torch.arange(40) < torch.tensor([[40], [40], [33]])
    before = mixer(first, BlockContext(carried=carried)).carried
    output = mixer(second, BlockContext(carried=before, places=places_of(begins), real=real))
    losses = []
    for lane, rows in enumerate((second[0], second[1, 30:], second[2, 5:33])):
        start = tuple(tensor[lane : lane + 1] for tensor in (carried if lane else before))
        alone = mixer(rows[None], BlockContext(carried=start))
        losses.append(alone.auxiliary_loss)
        for place in (0, 2):  # rows, and then their number
            count = int(alone.carried[place + 1])
            assert output.carried[place + 1][lane] == count
            first_row = output.carried[place].shape[1] - count
            ours, theirs = output.carried[place][lane, first_row:], alone.carried[place][0, first_row:]
            torch.testing.assert_close(ours, theirs, **CLOSE)
        last = rows.shape[0]
        found = output.rows[lane, 40 - last :] if lane < 2 else output.rows[lane, 5:33]
        torch.testing.assert_close(found, alone.rows[0], **CLOSE)
    assert losses[1] == 0  # no row left
    torch.testing.assert_close(output.auxiliary_loss, (40 * losses[0] + 28 * losses[2]) / 68, **CLOSE)


@pytest.mark.parametrize(("memory", "kind"), [(13, "mean"), (50, "max"), (13, "convolution"), (50, "convolution")])
def test_a_session_carries_what_training_hands_over(memory: int, kind: str) -> None:
    options = {**SIZES, "memory": memory, "window": 30, "compression": kind}
    assert_a_session_carries(memory + COMPRESSED, attention={"type": "compressive", **options})


def test_each_layer_has_the_kernel_and_its_bias_more_than_transformer_xl() -> None:
    sizes = {"layers": 2, "width": 128, "heads": 4}
    counts = [
        SparseTransformer.num_parameters(small(attention=kind, **sizes))
        for kind in ({"type": "transformer_xl", "memory": 13}, {"type": "compressive", **SIZES})
    ]
    assert counts[1] - counts[0] == 2 * (RATE * 128**2 + 128)
