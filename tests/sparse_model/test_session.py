"""A session: the same bits each time, room for so many tokens, and what it refuses."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longstride.sparse_model.part import Mixer
from longstride.sparse_model.session import Session
from tests.harness.configs import ATTENTIONS, LATER, SYSTEMS
from tests.sparse_model.test_cache import some_tokens, step_by_step
from tests.sparse_model.test_transformer import awake


def test_stepping_twice_gives_the_same_bits() -> None:
    model = awake(attention={"type": "strided", "stride": 8})
    tokens = some_tokens(model)
    session = Session(model, 2)
    first = step_by_step(session, tokens)
    session.reset()
    assert torch.equal(step_by_step(session, tokens), first)
    assert torch.equal(step_by_step(Session(model, 2), tokens), first)
    assert not torch.equal(step_by_step(Session(model, 2), tokens.flip(1)), first)


def test_logits_do_not_depend_on_when_they_are_asked_for() -> None:
    """As an encoder knows the token before it asks, and a decoder asks before it knows."""
    model = awake()
    tokens = some_tokens(model)
    asked, found = Session(model, 2), step_by_step(Session(model, 2), tokens)
    for position, token in enumerate(tokens.T):
        if position % 3 == 0:
            assert torch.equal(asked.logits, found[:, position])
            assert asked.logits is asked.logits
        asked.append(token)


def test_a_session_keeps_its_own_copy_of_a_token() -> None:
    model = awake()
    token = torch.tensor([5])
    one, other = Session(model), Session(model)
    one.append(token)
    token += 1
    other.append(torch.tensor([5]))
    assert torch.equal(one.logits, other.logits)


def test_tokens_are_integers_of_any_type() -> None:
    model = awake()
    one, other = Session(model), Session(model)
    one.prefill(torch.tensor([[1, 2, 200]], dtype=torch.uint8))
    other.prefill(torch.tensor([[1, 2, 200]]))
    one.append(torch.tensor([255], dtype=torch.uint8))
    other.append(torch.tensor([255]))
    assert torch.equal(one.logits, other.logits)


def test_an_order_of_other_contexts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order \(3,\) must be \(2,\), one for each context"):
        Session(awake(), 2).rearrange(torch.tensor([0, 1, 1]))


def pickled(session: Session) -> Session:
    return pickle.loads(pickle.dumps(session))


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("attention", ["fixed merged", "strided merged"])
def test_copies_go_their_own_way(attention: str, backend: str, copied: Callable[[Session], Session]) -> None:
    model = awake(attention=ATTENTIONS[attention], backend=backend).double()
    tokens = some_tokens(model)
    session = Session(model, 2)
    for token in tokens[:, :20].T:
        session.append(token)
    other = copied(session)
    for token in tokens[:, 20:].T:
        session.append(255 - token)  # in its own memory
    other.rearrange(torch.tensor([1, 0]))
    wanted = model(tokens.flip(0))[:, 20:]
    torch.testing.assert_close(step_by_step(other, tokens.flip(0)), wanted, rtol=1e-12, atol=1e-12)


def test_a_session_computes_no_gradient() -> None:
    session = Session(awake())
    session.prefill(torch.tensor([[1, 2]]))
    assert not session.logits.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_logits_are_wide_and_the_cache_is_the_models(dtype: torch.dtype) -> None:
    session = Session(awake().to(dtype))
    assert session.logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(state.keys.dtype == state.values.dtype == dtype for state in session.states)


def test_a_session_goes_on_as_it_began() -> None:
    """What it keeps is rounded as autocast rounded it, or not: a mixture would be neither's."""
    model = awake()
    with torch.autocast("cpu", torch.bfloat16):
        within, state = Session(model), Session(model).states[0]
        assert state.keys.dtype == torch.bfloat16
        within.append(torch.tensor([1]))
    began = "the session began under autocast to torch.bfloat16, and continues without autocast"
    for go_on in (lambda: within.logits, lambda: within.selected(torch.tensor([0]))):
        with pytest.raises(ValueError, match=began):
            go_on()
    without = Session(model)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"began without .* to torch\.float16"):
        without.prefill(torch.tensor([[1]]))
    with torch.autocast("cpu", torch.bfloat16):
        assert Session(awake().double()).logits.dtype == torch.float64  # which autocast leaves as it is


@torch.no_grad()
def test_a_deep_copy_shares_the_model_and_a_pickled_one_has_its_own() -> None:
    session = Session(awake())
    session.append(torch.tensor([1]))
    assert copy.deepcopy({"kept": [session]})["kept"][0].model is session.model
    assert pickled(session).model is not session.model


def fill(session: Session) -> None:
    session.prefill(torch.zeros(1, 40, dtype=torch.int64))


def begin(session: Session) -> None:
    session.append(torch.zeros(1, dtype=torch.int64))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    "before, then, message",
    [
        (fill, lambda s: s.logits, "41 tokens: the session has room for 40"),
        (fill, lambda s: s.append(zeros(1)), "41 tokens: the session has room for 40"),
        (begin, lambda s: s.prefill(zeros(1, 2)), r"already has 1 tokens; reset\(\) empties it"),
        (None, lambda s: s.prefill(zeros(1, 41)), "41 tokens: the session has room for 40"),
        (None, lambda s: s.prefill(zeros(2, 3)), r"tokens \(2, 3\) must be \(1, n\), a row for each context"),
        (fill, lambda s: s.extend(zeros(1, 1)), "41 tokens: the session has room for 40"),
        (begin, lambda s: s.extend(zeros(1, 0)), r"tokens \(1, 0\) must be \(1, n\), a row for each context, n from 1"),
        (begin, lambda s: s.truncate(2), "length=2: must be 0 to 1, the current number of tokens"),
        (begin, lambda s: s.truncate(-1), "length=-1: must be 0 to 1"),
        (None, lambda s: s.append(zeros(1, 1)), r"tokens \(1, 1\) must be \(1,\), one for each context"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    before: Callable[[Session], None] | None, then: Callable[[Session], Any], message: str
) -> None:
    session = Session(awake())
    if before:
        before(session)
    position = session.position
    with pytest.raises(ValueError, match=message):
        then(session)
    assert session.position == position


def test_no_more_is_taken_back_than_it_was_made_for() -> None:
    session = Session(awake(convolution=3), back=2)
    session.prefill(zeros(1, 9))
    with pytest.raises(ValueError, match="length=6: must be 0, or at least 7: the session was created with back=2"):
        session.truncate(6)
    for length in (7, 0):
        session.truncate(length)
        assert session.position == length


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch": 0}, "batch=0: must be at least 1"),
        ({"length": 41}, "length=41: must be 0 to 40, the model's context"),
        ({"back": -1}, "back=-1: must be 0 or more"),
        ({"length": -1}, "length=-1: must be 0 to 40"),
    ],
)
def test_sessions_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Session(awake(), **settings)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\) first"):
        Session(awake().train())


@pytest.mark.parametrize("number, name", [*enumerate(["heads", "later", *SYSTEMS])])
def test_a_copy_has_the_bits_of_a_session_that_computed_the_prompt(number: int, name: str) -> None:
    """As the server begins contexts with one prompt: a copy computes nothing, and what follows has the same shapes."""
    changes = {"heads": {"attention": ATTENTIONS["heads"]}, "later": LATER} | SYSTEMS
    model = awake(**changes[name]).to((torch.float32, torch.bfloat16)[number % 2])
    if any(type(mixer).new_state is Mixer.new_state for mixer in model.mixers):
        pytest.skip("a mixer cannot generate")
    tokens = some_tokens(model)[:1]

    def rest(session: Session) -> Tensor:
        rows = []
        for token in tokens[:, 21:30].T:
            rows.append(session.logits)
            session.append(token)
        return torch.stack(rows, 1)

    sessions = [Session(model, back=0) for _ in range(2)]
    for session in sessions:
        session.prefill(tokens[:, :21])
    copies = [sessions[0].selected(torch.tensor([0])) for _ in range(2)]
    wanted = rest(sessions[1])
    for session in (*copies, sessions[0]):
        assert torch.equal(rest(session), wanted)
