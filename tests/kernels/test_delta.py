"""The delta rule in chunks against the recurrence itself, position by position in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels import ConfigError
from longstride.kernels.recurrences import delta, delta_rule

B, H, D, DV = 2, 3, 8, 5
KINDS = [(decay, corrected) for decay in (True, False) for corrected in (True, False)]
Inputs = dict[str, Tensor | None]


def inputs_of(
    positions: int,
    decays: bool = True,
    corrected: bool = True,
    dtype: torch.dtype = torch.float64,
    steepness: float = 0.1,
    **options: bool,
) -> Inputs:
    """Draw arguments of the rule; heads of a position are neighbours in memory, as in a model."""
    generator = torch.Generator().manual_seed(positions)

    def rows(width: int) -> Tensor:
        return torch.randn(B, positions, H, width, generator=generator, dtype=torch.float64).transpose(1, 2)

    q, k, v = rows(D), F.normalize(rows(D), dim=-1), rows(DV)
    log_decay, beta = rows(1).squeeze(3).exp() * -steepness, rows(1).squeeze(3).sigmoid()
    initial = torch.randn(B, H, D, DV, generator=generator, dtype=torch.float64)
    begins = torch.rand(B, positions, generator=generator) < 0.1
    inputs: Inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    inputs |= {"log_decay": log_decay if decays else None, "beta": beta if corrected else None}
    inputs |= {"initial": initial if options.get("initial") else None}
    return inputs | {"begins": begins if options.get("begins") else None}


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None = None,
    begins: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence of the docstring, position by position."""
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if initial is None else initial
    rows = []
    for n in range(q.shape[2]):
        key, value = k[:, :, n, :, None], v[:, :, n, None]
        if begins is not None:
            state = torch.where(begins[:, n, None, None, None], 0.0, state)
        decay = 1.0 if log_decay is None else log_decay[:, :, n, None, None].exp()
        if beta is None:
            state = decay * state + key * value
        else:
            rate = beta[:, :, n, None, None]
            state = decay * (state - rate * key * (key.mT @ state)) + rate * key * value
        rows.append((q[:, :, n, None] @ state).squeeze(2))
    return torch.stack(rows, 2), state


def with_gradients(function: object, inputs: Inputs) -> dict[str, Tensor]:
    """Return both results, and the gradients of what has some along fixed directions."""
    copies = {name: None if x is None else x.detach().clone() for name, x in inputs.items()}
    leaves = {name: x.requires_grad_() for name, x in copies.items() if x is not None and x.is_floating_point()}
    results = function(**copies)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in results]  # exact in all
    grads = torch.autograd.grad(results, list(leaves.values()), directions, allow_unused=True, materialize_grads=True)
    outputs = {"out": results[0].detach(), "final": results[1].detach()}
    return outputs | dict(zip(leaves, grads, strict=True))


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        error = (actual[name] - x).abs().max()
        assert error <= bound * max(1.0, float(x.abs().max())), f"{name} is off by {error:.3g}"


@pytest.mark.parametrize(("decays", "corrected"), KINDS)
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("positions", [1, 2, 15, 31, 64, 65, 130])
def test_rule_is_its_definition(decays: bool, corrected: bool, begins: bool, positions: int) -> None:
    """Outputs, the final state, and all gradients, also through that state: in a chunk, two and three."""
    inputs = inputs_of(positions, decays, corrected, begins=begins, initial=positions % 2 == 1)
    assert_equal(with_gradients(delta_rule, inputs), with_gradients(by_definition, inputs))


@pytest.mark.campaign
@pytest.mark.parametrize("positions", range(1, 66))
def test_rule_is_its_definition_at_every_length(positions: int) -> None:
    inputs = inputs_of(positions, begins=True, initial=True)
    assert_equal(with_gradients(delta_rule, inputs), with_gradients(by_definition, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decays", "corrected"), KINDS)
def test_error_is_that_of_rounding(dtype: torch.dtype, decays: bool, corrected: bool) -> None:
    """Each number is a sum over at most N positions in fp32, which is rounded once to the dtype."""
    positions = 150
    inputs = inputs_of(positions, decays, corrected, dtype, initial=True)
    narrow = {name: x if x is None or name in "qkv" else x.float() for name, x in inputs.items()}
    exact = with_gradients(by_definition, {name: None if x is None else x.double() for name, x in narrow.items()})
    for name, x in with_gradients(delta_rule, narrow).items():
        unit = positions * torch.finfo(torch.float32).eps + torch.finfo(x.dtype).eps
        assert (x - exact[name]).abs().max() <= unit * exact[name].abs().max(), name


def test_steep_decays_neither_overflow_nor_lose_digits() -> None:
    """Sums of thousands stand beside differences of hundredths: those are what the decay is."""
    inputs = inputs_of(257)
    assert inputs["log_decay"] is not None
    inputs["log_decay"] = torch.where(torch.arange(257) % 11 == 0, -500.0, inputs["log_decay"])
    exact = with_gradients(by_definition, inputs)
    assert_equal(with_gradients(delta_rule, inputs), exact)
    narrow = with_gradients(delta_rule, {name: None if x is None else x.float() for name, x in inputs.items()})
    assert_equal({name: x.double() for name, x in narrow.items()}, exact, bound=1e-5)


def test_halves_are_the_whole() -> None:
    inputs = inputs_of(200, initial=True, begins=True)
    out, final = delta_rule(**inputs)  # type: ignore[arg-type]
    rows, state = [], inputs["initial"]
    for half in (slice(0, 90), slice(90, None)):
        parts = {
            name: None if x is None else x[:, half] if name == "begins" else x[:, :, half] for name, x in inputs.items()
        }
        part, state = delta_rule(**parts | {"initial": state})  # type: ignore[arg-type]
        rows.append(part)
    assert state is not None
    assert_equal({"out": torch.cat(rows, 2), "final": state}, {"out": out, "final": final})


@pytest.mark.parametrize("position", [0, 17, 63, 64, 99])
def test_rows_read_no_later_position(position: int) -> None:
    """Not a bit changes, and no gradient flows back from an earlier row."""
    inputs = inputs_of(100, initial=True)
    out, _ = delta_rule(**inputs)  # type: ignore[arg-type]
    for name in ("q", "k", "v", "log_decay", "beta"):
        x = inputs[name]
        assert x is not None
        changed = x.clone()
        changed[:, :, position] = 0.5 if name == "beta" else -7.0
        again, _ = delta_rule(**inputs | {name: changed})  # type: ignore[arg-type]
        assert torch.equal(again[:, :, :position], out[:, :, :position])
        assert not torch.equal(again[:, :, position], out[:, :, position])


@pytest.mark.parametrize("positions", [1024, 2048])
def test_memory_is_linear(positions: int) -> None:
    """What the backward pass keeps: the inputs, and a state for each chunk."""
    inputs = inputs_of(positions, dtype=torch.float32)
    kept: list[int] = []
    tensors = {name: None if x is None else x.float().requires_grad_() for name, x in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        delta_rule(**tensors)  # type: ignore[arg-type]
    states = (positions // delta.CHUNK + 1) * D * DV
    assert sum(kept) == B * H * (positions * (2 * D + DV + 2) + states)


def test_operations_are_well_formed() -> None:
    """Schemas, shapes without data, and autograd: what torch.compile relies on."""
    inputs = inputs_of(70, begins=True, initial=True)
    values = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs.values()]
    torch.library.opcheck(delta._delta_rule, (*values, True, "torch"))


@pytest.mark.parametrize(("decays", "corrected"), KINDS)
def test_backends_agree(decays: bool, corrected: bool) -> None:
    inputs = inputs_of(33, decays, corrected, torch.float32, initial=True, begins=True)
    results = []
    for backend in ("torch", "triton"):
        tensors = {
            name: x.detach().clone().requires_grad_() if x is not None and x.is_floating_point() else x
            for name, x in inputs.items()
        }
        out, final = delta_rule(**tensors, backend=backend)  # type: ignore[arg-type]
        (out.sin().sum() + final.sin().sum()).backward()
        grads = [x.grad for x in tensors.values() if x is not None and x.requires_grad]
        results.append([out, final, *grads])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_mistakes_are_named() -> None:
    inputs = inputs_of(5)
    with pytest.raises(ConfigError, match='backend="dense": must be one of auto, torch'):
        delta_rule(**inputs | {"backend": "dense"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta \(2, 3\) must be \(2, 3, 5\)"):
        delta_rule(**inputs | {"beta": torch.ones(2, 3)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no positions"):
        delta_rule(**{name: None if x is None else x[:, :, :0] for name, x in inputs.items()})  # type: ignore[arg-type]
