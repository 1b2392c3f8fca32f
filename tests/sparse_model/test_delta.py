"""The gated delta rule as a mixer: its definition, what it carries to the next context, and generation."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.sparse_model import MixerOutput, Session, SparseTransformer
from longstride.sparse_model.mixers.recurrences.delta import DeltaMixer, DeltaState
from longstride.sparse_model.part import BlockContext, places_of
from tests.harness.configs import small

KINDS: list[dict[str, Any]] = [
    {},
    {"correction": False},
    {"decay": False, "heads": 2, "convolution": 3},
    {"decay": False, "correction": False, "key_ratio": 1.0, "value_ratio": 0.5},
]
CONTEXT = 150  # two whole blocks of generation's states, and a part


def model_of(options: dict[str, Any], **changes: Any) -> SparseTransformer:
    """Return a model in fp64 in which every weight has an effect."""
    attention = {"type": "delta", "stateful": True, **options}
    sizes = {"context": CONTEXT, "layers": 2, "width": 32, "attention": attention}
    model = SparseTransformer(small(**{**sizes, **changes})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def mixer_of(options: dict[str, Any]) -> DeltaMixer:
    mixer = model_of(options).mixers[0]
    assert isinstance(mixer, DeltaMixer)
    return mixer


def tokens_of(positions: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (2, positions), generator=torch.Generator().manual_seed(seed))


def by_definition(mixer: DeltaMixer, x: Tensor) -> Tensor:
    """Compute rows (B, N, C) from the formulas, position by position."""
    config, heads = mixer.config, mixer.heads
    keys, values = mixer.keys, mixer.values
    projected, gate = mixer.query_key_value_gate(x).split((2 * keys + values, values), -1)
    convolved = [
        projected[:, n] + sum(w * projected[:, n - j] for j, w in enumerate(mixer.convolution.weight) if j <= n)
        for n in range(x.shape[1])
    ]
    parts = F.silu(torch.stack(convolved, 1)).split((keys, keys, values), -1)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in parts)
    epsilon = 1e-6 * q.shape[-1]
    q, k = (part / (part.square().sum(-1, keepdim=True) + epsilon).sqrt() for part in (q, k))
    rates = [] if mixer.rates is None else list(mixer.rates(x).split(heads, -1))
    beta = rates.pop().sigmoid() if config.correction else None
    state, outputs = x.new_zeros(len(x), heads, q.shape[-1], v.shape[-1]), []
    for n in range(x.shape[1]):
        if mixer.decay is not None and mixer.step is not None:
            state = state * (-mixer.decay.exp() * F.softplus(rates[0][:, n] + mixer.step)).exp()[..., None, None]
        written = v[:, n]
        if beta is not None:
            written = beta[:, n, :, None] * (written - torch.einsum("bhd,bhdv->bhv", k[:, n], state))
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, n], written)
        outputs.append(torch.einsum("bhd,bhdv->bhv", q[:, n], state) / q.shape[-1] ** 0.5)
    out = torch.stack(outputs, 1)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    result: Tensor = mixer.projection(out.flatten(2) * F.silu(gate))
    return result


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("positions", [1, 3, 64, 100])
def test_mixer_is_its_definition(options: dict[str, Any], positions: int) -> None:
    mixer = mixer_of(options)
    x = torch.randn(2, positions, 32, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(2, positions, 32, dtype=torch.float64)
    rows = [mixer(x).rows, by_definition(mixer, x)]
    tensors = [x, *mixer.parameters()]
    computed, expected = ([out, *torch.autograd.grad(out, tensors, direction)] for out in rows)
    for result, reference in zip(computed, expected, strict=True):
        assert (result - reference).abs().max() <= 1e-11 * max(1.0, float(reference.detach().abs().max()))


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("documents", [False, True])
def test_two_contexts_that_carry_are_one_of_twice_the_length(options: dict[str, Any], documents: bool) -> None:
    """A document may begin behind the first position of the second half; the first one goes on there."""
    half = 70
    begins = torch.zeros(2, 2 * half, dtype=torch.bool)
    if documents:
        begins[0, [11, 90]] = begins[1, [3, 69, 72]] = True
    mixer = mixer_of(options)
    x = torch.randn(2, 2 * half, 32, dtype=torch.float64)
    zeros = tuple(torch.zeros(2, *c.shape, dtype=torch.float64) for c in mixer.carried)
    places = places_of(begins)
    whole = mixer(x, BlockContext(carried=zeros, places=places if documents else None))
    first = mixer(x[:, :half], BlockContext(carried=zeros, places=places[:, :half] if documents else None))
    second_places = places_of(begins[:, half:]) if documents else None
    second = mixer(x[:, half:], BlockContext(carried=first.carried, places=second_places))
    torch.testing.assert_close(torch.cat([first.rows, second.rows], 1), whole.rows)
    for result, reference in zip(second.carried, whole.carried, strict=True):
        torch.testing.assert_close(result, reference)
    torch.testing.assert_close(mixer(x, BlockContext(places=places if documents else None)).rows, whole.rows)


def test_nothing_is_returned_that_was_not_asked_for() -> None:
    mixer = mixer_of({})
    assert not mixer(torch.randn(1, 9, 32, dtype=torch.float64)).carried
    assert not mixer_of({"stateful": False}).carried


@pytest.mark.parametrize("changes", [{}, {"reversible": True}])
def test_recomputation_reads_what_the_forward_pass_read(changes: dict[str, Any]) -> None:
    """Gradients are those of activations that were kept, and of the last pass alone."""
    model = model_of({}, **changes)
    begun = model(tokens_of(80), carried=model.new_carried(2, torch.device("cpu"), torch.float64), return_extras=True)
    results = []
    for recompute in (lambda block, *inputs: block(*inputs), partial(checkpoint, use_reentrant=False), None):
        model.activation_checkpoint = recompute
        model.zero_grad()
        output = model(tokens_of(80, seed=3), carried=begun.carried, return_extras=True, return_nats=True)
        output.rows.sum().backward()
        results.append([output.rows.detach(), *output.carried, *(p.grad for p in model.parameters())])
    for result in results[1:]:
        for tensor, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(tensor, expected)
    alone = model(tokens_of(80, seed=3), return_nats=True)
    assert not torch.allclose(alone, results[0][0])


def test_padding_changes_nothing_that_is_carried() -> None:
    mixer = mixer_of({})
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    zeros = tuple(torch.zeros(2, *c.shape, dtype=torch.float64) for c in mixer.carried)
    real = torch.arange(30) < torch.tensor([[30], [17]])
    padded = mixer(x, BlockContext(carried=zeros, real=real))
    short = mixer(x[1:, :17], BlockContext(carried=tuple(tensor[1:] for tensor in zeros)))
    torch.testing.assert_close(padded.rows[1:, :17], short.rows)
    for result, reference in zip(padded.carried, short.carried, strict=True):
        torch.testing.assert_close(result[1:], reference)


@pytest.mark.parametrize("options", KINDS)
def test_rows_read_no_later_position(options: dict[str, Any]) -> None:
    mixer = mixer_of(options)
    x = torch.randn(1, 100, 32, dtype=torch.float64, requires_grad=True)
    rows = mixer(x).rows
    for position in (0, 30, 63, 64, 98):
        (gradient,) = torch.autograd.grad(rows[0, position].sum(), x, retain_graph=True)
        assert not gradient[0, position + 1 :].any()
        assert gradient[0, : position + 1].any(1).all()


@torch.inference_mode()
@pytest.mark.parametrize("back", [0, 5, None])
@pytest.mark.parametrize("prefix", [0, 3, 64, 130])
def test_sessions_give_the_rows_of_training_from_context_to_context(back: int | None, prefix: int) -> None:
    """Prefilled, step by step, some taken back, and over the end of a context."""
    model = model_of({})
    tokens = torch.cat([tokens_of(CONTEXT, seed) for seed in (0, 1)], 1)
    carried = model.new_carried(2, torch.device("cpu"), torch.float64)
    session = Session(model, 2, back=back)
    for part in tokens.split(CONTEXT, 1):
        output = model(part, carried=carried, return_extras=True)
        assert isinstance(output, MixerOutput)
        h = model.embedding(part, last=carried[0])
        contexts = [BlockContext(state=state) for state in session.states]
        computed: list[Tensor] = []
        pieces = [prefix, 66 - prefix, 70] if prefix < 66 else [prefix]
        first = 0
        for count in [*(n for n in pieces if n), *[1] * CONTEXT]:
            if first >= CONTEXT:
                break
            rows = h[:, first : first + count]
            for block, context in zip(model.blocks, contexts, strict=True):
                rows = block(rows, context._replace(first=first)).rows
            computed.append(rows)
            first += rows.shape[1]
            if count > 1 and back:  # take some back, and compute them again
                first = max(1, first - back)
                for state in session.states:
                    assert state is not None
                    state.truncate(first)
                computed = [torch.cat(computed, 1)[:, :first]]
        torch.testing.assert_close(model.logits(model.norm(torch.cat(computed, 1))), output.rows)
        for state, mixer, number in zip(session.states, model.mixers, (1, 3), strict=True):
            assert isinstance(state, DeltaState) and mixer.carried
            state.carry()
            torch.testing.assert_close(state.initial, output.carried[number])
            assert state.recent.earlier is not None
            torch.testing.assert_close(state.recent.earlier, output.carried[number + 1])
        carried = output.carried


@pytest.mark.parametrize("length", [0, 1, 50, 64, 90, 128, 140])
def test_tokens_are_taken_back_to_any_length(length: int) -> None:
    """A session that has only seen the first tokens gives the same bits."""
    model, tokens = model_of({}), tokens_of(CONTEXT)
    plain, cut = Session(model, 2), Session(model, 2)
    for token in tokens[:, :length].T:
        plain.append(token)
    for token in torch.cat([tokens[:, :length], tokens_of(148 - length, seed=2)], 1).T:
        cut.append(token)
    cut.truncate(length)
    for token in tokens[:, length : length + 8].T:
        assert torch.equal(plain.logits, cut.logits)
        plain.append(token)
        cut.append(token)


def test_generation_takes_constant_memory() -> None:
    """With few tokens to take back, a state has as many numbers for a context of a million positions."""
    mixer = mixer_of({})

    def numbers(length: int) -> int:
        state = mixer.new_state(1, length, torch.device("cpu"), torch.float64, back=8)
        assert isinstance(state, DeltaState)
        return sum(x.numel() for x in (state.memory, state.rows, state.edges, state.initial, state.recent.rows))

    assert numbers(1_000) == numbers(1_000_000)


def test_work_is_linear() -> None:
    mixer = mixer_of({})
    assert mixer.work(4_096, 1).forward == 2 * mixer.work(2_048, 1).forward
    assert mixer.work(4_096, 1).pairs == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_ratio": 0.3}, r"attention.key_ratio=0.3: times width 32 must be channels .* heads=4; nearest 0.25"),
        ({"value_ratio": 1.5, "heads": 5}, r"attention.key_ratio=0.75: times width 32 must be channels .* heads=5"),
        ({"convolution": 1}, r"attention.convolution=1: must be greater than or equal to 2"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_of(options)
