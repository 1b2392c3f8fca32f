"""Bistable recurrent cells against their formulas, and the state that contexts and sessions hand on."""

import pytest
import torch
from torch import Tensor

from longstride.sparse_model import Session, SparseTransformer
from longstride.sparse_model.mixers.recurrences.gated import Recurrent
from longstride.sparse_model.part import BlockContext, places_of
from tests.harness.configs import small
from tests.sparse_model.test_transformer import awake

CELLS = pytest.mark.parametrize("cell", ["nbrc", "brc"])
WIDTH, STATE = 8, 5


def recurrent(cell: str, stateful: bool = False, bias: bool = True) -> Recurrent:
    """Return a mixer in fp64 in which every parameter has an effect."""
    attention = {"type": "recurrent", "cell": cell, "width": STATE, "stateful": stateful}
    torch.manual_seed(0)
    config = small(context=512, layers=1, heads=2, width=WIDTH, bias=bias, attention=attention)
    (mixer,) = SparseTransformer(config).double().mixers
    assert isinstance(mixer, Recurrent)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return mixer


def defined(mixer: Recurrent, inputs: Tensor, begins: Tensor | None = None, h: Tensor | None = None) -> Tensor:
    """Compute states (B, N, R) row by row from the formulas of Vecoven et al. 2020.

    ``inputs`` are U_a x, U_c x and U x, (B, N, 3R).
    """
    h = inputs.new_zeros(len(inputs), STATE) if h is None else h
    if mixer.gates.dim() == 1:
        gate_a, gate_c = (diagonal.diag() for diagonal in mixer.gates.chunk(2))
    else:
        gate_a, gate_c = mixer.gates
    bias_a, bias_c = (0.0, 0.0) if mixer.gate_bias is None else mixer.gate_bias.chunk(2)
    states = []
    for n, row in enumerate(inputs.unbind(1)):
        if begins is not None:
            h = torch.where(begins[:, n, None], 0.0, h)
        of_a, of_c, of_candidate = row.chunk(3, -1)
        a = 1 + torch.tanh(of_a + h @ gate_a.T + bias_a)
        c = torch.sigmoid(of_c + h @ gate_c.T + bias_c)
        h = c * h + (1 - c) * torch.tanh(of_candidate + a * h)
        states.append(h)
    return torch.stack(states, 1)


def assert_equal_results(actual: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """Compare two ways to compute rows, and all their gradients."""
    slopes = torch.randn_like(expected)
    results = [[rows, *torch.autograd.grad((rows * slopes).sum(), tensors)] for rows in (actual, expected)]
    for result, reference in zip(*results, strict=True):
        largest = float(reference.detach().abs().max())
        assert largest > 0 or expected.shape[1] == 1  # a single row reads no state
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-12 * largest)


@CELLS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 100, 257])
def test_rows_and_gradients_are_those_of_the_formulas(cell: str, bias: bool, length: int) -> None:
    mixer = recurrent(cell, bias=bias)
    x = torch.randn(3, length, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_equal_results(mixer(x).rows, mixer.projection(defined(mixer, mixer.inputs(x))), [x, *mixer.parameters()])


@CELLS
def test_documents_begin_with_zeros_and_the_first_goes_on(cell: str) -> None:
    mixer = recurrent(cell, stateful=True)
    x = torch.randn(3, 40, WIDTH, dtype=torch.float64, requires_grad=True)
    initial = torch.randn(3, STATE, dtype=torch.float64)
    begins = torch.rand(3, 40) < 0.2
    begins[:, 0] = True
    context = BlockContext(places=places_of(begins), carried=(initial,))
    later = begins.clone()
    later[:, 0] = False
    states = defined(mixer, mixer.inputs(x), later, initial)
    output = mixer(x, context)
    assert_equal_results(output.rows, mixer.projection(states), [x, *mixer.parameters()])
    torch.testing.assert_close(output.carried[0], states[:, -1], rtol=1e-12, atol=1e-12)
    alone = mixer(x, BlockContext(places=places_of(begins)))
    assert not alone.carried
    assert_equal_results(
        alone.rows, mixer.projection(defined(mixer, mixer.inputs(x), begins)), [x, *mixer.parameters()]
    )


@CELLS
@pytest.mark.parametrize("reversible", [False, True])
def test_halves_that_carry_equal_one_context(cell: str, reversible: bool) -> None:
    attention = {"type": "recurrent", "cell": cell, "width": 24, "stateful": True}
    embedding = {"type": "tokens"}
    model = awake(attention=attention, embedding=embedding, reversible=reversible).double()
    tokens = torch.randint(256, (2, 40))
    whole = model(tokens)
    carried = model.new_carried(2, tokens.device, torch.float64)
    rows = []
    for half in (tokens[:, :16], tokens[:, 16:]):
        output = model(half, return_extras=True, carried=carried)
        carried = output.carried
        assert not any(tensor.requires_grad for tensor in carried)
        assert [tuple(tensor.shape) for tensor in carried] == [(2, 1), *[(2, 24)] * 3]
        rows.append(output.rows)
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-9, atol=1e-9)
    rows[1].sum().backward()  # does not reach into the first half


def test_what_is_carried_is_the_state_after_the_last_row_that_is_real() -> None:
    mixer = recurrent("nbrc", stateful=True)
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    initial = torch.randn(3, STATE, dtype=torch.float64)
    counts = [9, 4, 0]
    real = torch.arange(9) < torch.tensor(counts)[:, None]
    (carried,) = mixer(x, BlockContext(real=real, carried=(initial,))).carried
    states = torch.cat([initial[:, None], defined(mixer, mixer.inputs(x), h=initial)], 1)
    torch.testing.assert_close(carried, states[torch.arange(3), counts], rtol=1e-12, atol=1e-12)


def test_a_session_goes_on_with_what_training_carries() -> None:
    attention = {"type": "recurrent", "width": 24, "stateful": True}
    model = awake(attention=attention, embedding={"type": "tokens"}, layers=1).double()
    tokens = torch.randint(256, (2, 40))
    handed = model(tokens, return_extras=True, carried=model.new_carried(2, tokens.device, torch.float64)).carried
    for back in (None, 0):
        session = Session(model, 2, back=back)
        session.prefill(tokens[:, :30])
        for token in tokens[:, 30:].T:
            session.append(token)
        (state,) = session.states
        assert state is not None
        state.carry()
        torch.testing.assert_close(state.before(0), handed[1], rtol=1e-12, atol=1e-12)


def test_the_recurrence_is_fp32_where_rows_are_bf16() -> None:
    """States equal those of fp32 weights of the same values, but for the rounded inputs."""
    mixer = recurrent("nbrc", stateful=True).bfloat16()
    x = torch.randn(2, 200, WIDTH).bfloat16()
    output = mixer(x, BlockContext(carried=(torch.zeros(2, STATE),)))
    assert output.rows.dtype == torch.bfloat16 and output.carried[0].dtype == torch.float32
    inputs = mixer.inputs(x).double()
    expected = defined(mixer.double(), inputs)[:, -1]
    torch.testing.assert_close(output.carried[0].double(), expected, rtol=0, atol=1e-4)


@CELLS
def test_memory_is_linear_in_the_positions(cell: str) -> None:
    """Saved for the backward pass: the states and three numbers per channel of each position, in fp32."""
    mixer = recurrent(cell).float()
    sizes = []
    for length in (64, 128):
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(torch.randn(1, length, WIDTH, requires_grad=True))
        sizes.append(saved)
    per_position = (sizes[1] - sizes[0]) / 64
    assert per_position == 4 * STATE + STATE + WIDTH  # and the inputs of both projections


@CELLS
def test_parameters_and_first_values_are_the_papers(cell: str) -> None:
    attention = {"type": "recurrent", "cell": cell, "width": 24}
    torch.manual_seed(0)
    mixer, *_ = SparseTransformer(small(attention=attention, width=64)).mixers
    assert isinstance(mixer, Recurrent)
    state = 2 * 24**2 if cell == "nbrc" else 2 * 24
    counted = sum(parameter.numel() for parameter in mixer.parameters())
    assert counted == 3 * 64 * 24 + state + 2 * 24 + 24 * 64 + 64  # and the projection back
    bound = (6 / (64 + 24)) ** 0.5
    assert 0.95 * bound < mixer.inputs.weight.abs().max() <= bound
    if cell == "brc":
        assert (mixer.gates == 1).all()
    else:
        for matrix in mixer.gates:
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(24), rtol=0, atol=1e-5)
    assert mixer.gate_bias is not None and not mixer.gate_bias.any()


def test_stateful_is_left_out_at_default() -> None:
    saved = small(attention={"type": "recurrent"}).mixers[0].model_dump(mode="json")
    assert "stateful" not in saved and saved["cell"] == "nbrc"


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_block_has_the_same_bits() -> None:
    """The loop is one operation: a compiler would unroll it."""
    attention = [{"type": "recurrent", "width": 24, "stateful": True}, {"type": "recurrent", "cell": "brc"}]
    model = awake(attention=attention, layers=2, embedding={"type": "tokens"})
    tokens = torch.randint(256, (2, 40))
    carried = model.new_carried(2, tokens.device, torch.float32)
    results = []
    for is_compiled in (False, True):
        for block in model.blocks if is_compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        output = model(tokens, return_nats=True, return_extras=True, carried=carried)
        output.rows.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([output.rows.detach(), output.carried[1], *gradients])
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)
