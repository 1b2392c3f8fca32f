"""Transformer-XL's attention beside its definition, in fp64. Letters: B batch, H heads, N positions, M memory."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers.memories.transformer_xl import MemoryAttention
from longstride.sparse_model.part import BlockContext, places_of
from tests.harness.configs import small
from tests.sparse_model.test_transformer import awake

WIDTH, HEADS = 12, 2
LENGTHS = [1, 2, 4, 5, 6, 8, 9, 10, 19, 39, 40, 41, 83]  # at window, memory and a multiple of either
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def attention(**options: Any) -> MemoryAttention:
    """Return a layer in fp64 in which every weight matters."""
    config = small(
        width=WIDTH, heads=HEADS, query_key_ratio=2, attention={"type": "transformer_xl", "untied": True, **options}
    )
    torch.manual_seed(0)
    (mixer, *_) = SparseTransformer(config).double().mixers
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert isinstance(mixer, MemoryAttention)
    return mixer


def definition(mixer: MemoryAttention, h: Tensor, memory: Tensor, reads: Tensor) -> Tensor:
    """Compute equation 10 of the paper with each distance's own R; ``reads`` (B, N, M + N) says which keys exist."""
    biases, channels = mixer.biases, mixer.channels
    assert biases is not None
    rows = torch.cat([memory, h], 1)
    of_q, of_k, of_v = mixer.query_key_value.weight.split(mixer.widths)
    positions = torch.arange(rows.shape[1])
    distance = positions[memory.shape[1] :, None] - positions
    angles = distance[..., None] / 10_000 ** (torch.arange(0, channels, 2).double() / channels)
    r = torch.cat([angles.sin(), angles.cos()], -1) @ mixer.distances.T  # (N, M + N, H·D)
    q, k, v, r, u, w = (
        x.unflatten(-1, (HEADS, -1)).movedim(-2, 0)
        for x in (h @ of_q.T, rows @ of_k.T, rows @ of_v.T, r, biases.for_keys, biases.for_distances)
    )
    heads = []
    for head in range(HEADS):
        scores = (q[head] + u[head]) @ k[head].mT + torch.einsum("bid,ijd->bij", q[head] + w[head], r[head])
        scores = (scores / q.shape[-1] ** 0.5).masked_fill(~reads, -torch.inf)
        heads.append(scores.softmax(-1) @ v[head])
    return torch.cat(heads, -1) @ mixer.projection.weight.T


def reads_of(count: Tensor, memory: int, length: int, window: int | None = None) -> Tensor:
    """Return which keys each query reads, (B, N, M + N), by the number of rows in memory."""
    key, query = torch.arange(memory + length), torch.arange(memory, memory + length)[:, None]
    near = (key <= query) & (key > query - (window or memory + length))
    return near & (key >= memory - count[:, None, None])


def assert_equal_with_gradients(mixer: MemoryAttention, actual: Tensor, expected: Tensor, h: Tensor) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)
    slopes = torch.randn_like(actual)
    of_attention = (parameter for name, parameter in mixer.named_parameters() if "convolve" not in name)
    tensors = h, *of_attention
    gradients = [torch.autograd.grad((rows * slopes).sum(), tensors) for rows in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12 * max(1.0, float(theirs.abs().max())))


@pytest.mark.parametrize("options", [{"position_channels": 10}, {"window": 5}])
@pytest.mark.parametrize("memory", [0, 9, 40])
def test_attention_is_its_definition(memory: int, options: dict[str, Any]) -> None:
    """With no, some and all rows of memory; and gradients stop before the memory."""
    mixer = attention(memory=memory, **options)
    count = torch.tensor([0, memory // 3, memory], dtype=torch.int32)
    for length in LENGTHS:
        h = torch.randn(3, length, WIDTH, dtype=torch.float64, requires_grad=True)
        past = torch.randn(3, memory, WIDTH, dtype=torch.float64, requires_grad=True)
        output = mixer(h, BlockContext(carried=(past, count) if memory else ()))
        expected = definition(mixer, h, past.detach(), reads_of(count, memory, length, options.get("window")))
        assert_equal_with_gradients(mixer, output.rows, expected, h)
        if memory:
            rows, total = output.carried
            torch.testing.assert_close(rows, torch.cat([past, h], 1)[:, -memory:], rtol=0, atol=0)
            assert not rows.requires_grad
            assert total.tolist() == [min(memory, before + length) for before in count.tolist()]


def test_memory_that_was_never_written_is_not_read() -> None:
    """Whatever its places hold, rows have the bits of a context that stands alone, up to rounding of positions."""
    mixer = attention(memory=9)
    h, zero = torch.randn(2, 20, WIDTH, dtype=torch.float64), torch.zeros(2, dtype=torch.int32)
    alone = mixer(h).rows
    rows = [mixer(h, BlockContext(carried=(past, zero))).rows for past in (h[:, :9], torch.full_like(h[:, :9], 1e9))]
    assert torch.equal(*rows)
    torch.testing.assert_close(rows[0], alone, **CLOSE)


def test_documents_read_no_memory_but_the_first() -> None:
    mixer = attention(memory=9)
    begins = torch.zeros(2, 20, dtype=torch.bool)
    begins[0, [6, 13]] = begins[1, [0, 17]] = True
    count = torch.tensor([4, 9], dtype=torch.int32)
    h, past = torch.randn(2, 20, WIDTH, dtype=torch.float64), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    output = mixer(h, BlockContext(places=places_of(begins), carried=(past, count)))
    for batch, cuts in enumerate(([0, 6, 13, 20], [0, 17, 20])):
        for first, last in itertools.pairwise(cuts):
            carried = (past[batch : batch + 1], count[batch : batch + 1] * (first == 0))
            alone = mixer(h[batch : batch + 1, first:last], BlockContext(carried=carried))
            torch.testing.assert_close(output.rows[batch : batch + 1, first:last], alone.rows, **CLOSE)
    rows, total = output.carried
    assert total.tolist() == [7, 3]
    torch.testing.assert_close(rows, h[:, -9:], rtol=0, atol=0)


def test_padding_stays_out_of_the_memory() -> None:
    mixer = attention(memory=9)
    h, past = torch.randn(4, 20, WIDTH, dtype=torch.float64), torch.randn(4, 9, WIDTH, dtype=torch.float64)
    count, lengths = torch.tensor([4, 9, 0, 5], dtype=torch.int32), torch.tensor([5, 20, 12, 0])
    real = torch.arange(20) < lengths[:, None]
    begins = torch.zeros_like(real)
    begins[2, 10] = True
    output = mixer(h, BlockContext(places=places_of(begins), real=real, carried=(past, count)))
    assert output.carried[1].tolist() == [9, 9, 2, 5]
    for batch, length in enumerate(lengths.tolist()):
        rows = torch.cat([past[batch], h[batch, :length]])[-9:]
        torch.testing.assert_close(output.carried[0][batch], rows, rtol=0, atol=0)


def test_two_halves_of_a_context_read_what_the_whole_reads() -> None:
    """A model with memory for all rows gives the rows of a context of double length, and trains the second half."""
    changes: dict[str, Any] = {"embedding": {"type": "tokens"}, "ngrams": {"orders": [2, 5], "rows": 61}}
    model = awake(attention={"type": "transformer_xl", "memory": 40}, context=80, **changes).double()
    tokens = torch.randint(256, (2, 80))
    expected = model(tokens)
    carried = model.new_carried(2, tokens.device, torch.float64)
    first = model(tokens[:, :40], return_extras=True, carried=carried)
    second = model(tokens[:, 40:], return_extras=True, carried=first.carried)
    torch.testing.assert_close(torch.cat([first.rows, second.rows], 1), expected, rtol=1e-10, atol=1e-10)
    assert all(not tensor.requires_grad for tensor in second.carried)


COMPRESSIVE = {"type": "compressive", "memory": 13, "compressed": 7, "rate": 3}


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ({"type": "transformer_xl", "memory": 15}, {}),
        ({"type": "transformer_xl", "memory": 15, "untied": True}, {"norm_position": "after"}),
        ({"type": "transformer_xl", "memory": 15}, {"reversible": True}),
        (COMPRESSIVE, {}),
        (COMPRESSIVE, {"reversible": True}),
    ],
    ids=str,
)
def test_recomputation_reads_the_memories_that_were_read(attention: dict[str, Any], changes: dict[str, Any]) -> None:
    model = awake(attention=attention, layers=2, context=20, **changes).double().train()
    results = []
    for recompute in (None, lambda *inputs: checkpoint(*inputs, use_reentrant=False)):
        model.activation_checkpoint = recompute
        model.zero_grad()
        carried = model.new_carried(2, torch.device("cpu"), torch.float64)
        for tokens in torch.randint(256, (3, 2, 20), generator=torch.Generator().manual_seed(1)):
            output = model(tokens, return_nats=True, return_extras=True, carried=carried)
            (output.rows.sum() + (0 if output.auxiliary_loss is None else output.auxiliary_loss)).backward()
            carried = output.carried
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize(("memory", "window"), [(15, None), (40, 20), (70, None), (70, 20)])
def test_a_session_carries_what_training_hands_over(memory: int, window: int | None) -> None:
    """Contexts at once, in pieces and by steps; after each its memory is copied to the other context of the batch."""
    kind = {"type": "transformer_xl", "memory": memory, "window": window}
    assert_a_session_carries(memory, attention=kind, query_key_ratio=0.5)


def assert_a_session_carries(memory: int, **changes: Any) -> None:
    """Assert that a session gives the rows of training; its memories have so many rows together."""
    model = awake(layers=2, embedding={"type": "tokens"}, **changes).double()
    sizes: Any = (2, 40, torch.device("cpu"), torch.float64)
    states: list[Any] = model.new_states(*sizes)
    carried = model.new_carried(2, *sizes[2:])
    with torch.inference_mode():
        for tokens in torch.randint(256, (3, 2, 40)):
            rows = model.embedding(tokens)
            expected, _ = model.residual(lambda rows=rows: rows, model.block_contexts(tokens, carried=carried))
            for counts in ([40], [13, 1, 26], [1] * 40):
                trial, first, outputs = copy.deepcopy(states), 0, []
                for piece in rows.split(counts, 1):
                    outputs.append(model.forward_cached(piece, trial, first, tokens))
                    first += piece.shape[1]
                torch.testing.assert_close(torch.cat(outputs, 1), expected.rows, rtol=1e-10, atol=1e-10)
            carried = (carried[0], *(tensor.flip(0) for tensor in expected.carried))
            states = model.new_states(*sizes)
            for state, source in zip(states, trial, strict=True):
                state.take(source, torch.tensor([1, 0]), 40, slice(None))
                state.carry()
                assert state.keys.shape[2] == memory + 40


PUBLISHED = {
    "context": 512,
    "layers": 12,
    "heads": 8,
    "width": 512,
    "vocabulary": 205,
    "embedding": {"type": "tokens"},
    "norm_position": "after",
    "output": {"tied": True, "bias": True},
}


def test_the_published_model_has_its_parameters() -> None:
    """Transformer-XL's 12 layers on enwik8, and the vector that stands for the token before the first."""
    kind = {"type": "transformer_xl", "memory": 512, "position_channels": 512}
    config = small(attention=kind, **PUBLISHED)
    assert SparseTransformer.num_parameters(config) == 41_055_949 + 512
    untied = small(attention={**kind, "untied": True}, **PUBLISHED)
    assert SparseTransformer.num_parameters(untied) == 41_055_949 + 512 + 11 * 2 * 512


def test_half_precision_is_as_near_as_its_rounding() -> None:
    """In bf16 queries, keys and the memory have 8 bits, and outputs are off by some of their size."""
    mixer = attention(memory=40)
    h, past = torch.randn(2, 60, WIDTH, dtype=torch.float64), torch.randn(2, 40, WIDTH, dtype=torch.float64)
    count = torch.tensor([40, 11], dtype=torch.int32)
    expected = mixer(h, BlockContext(carried=(past, count))).rows
    output = copy.deepcopy(mixer).bfloat16()(h.bfloat16(), BlockContext(carried=(past.bfloat16(), count)))
    assert output.rows.dtype == output.carried[0].dtype == torch.bfloat16
    assert (output.rows - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "transformer_xl", "memory": 9},
        {"type": "compressive", "memory": 9, "compressed": 4, "rate": 3},
    ],
    ids=lambda kind: kind["type"],
)
def test_optimisers_see_matrices_and_vectors(kind: dict[str, Any]) -> None:
    model = SparseTransformer(small(layers=1, attention=kind))
    roles = {name.rpartition("attention.")[2]: role for name, role in model.parameter_roles().items()}
    assert roles["distances"] == ("matrices", ())
    assert roles["query_key_value.weight"] == ("matrices", (64, 64, 64))
    assert roles["shared.for_keys"].part == roles["shared.for_distances"].part == "vectors"
    if kind["type"] == "compressive":
        assert roles["convolve.weight"] == ("matrices", (64, 64, 64)) and roles["convolve.bias"].part == "vectors"
