"""What every model has to hold, whatever its sub-layers are, and the orders in which they stand."""

from __future__ import annotations

import copy
import json
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from longstride.kernels import ConfigError
from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import ModelConfig, Session, SparseTransformer
from longstride.sparse_model.mixers import cache
from tests.harness.configs import ATTENTIONS, SYSTEMS, small

every_system = pytest.mark.parametrize("changes", SYSTEMS.values(), ids=SYSTEMS)


def awake(**changes: Any) -> SparseTransformer:
    """A model in fp64 whose every weight matters, in evaluation mode."""
    torch.manual_seed(0)
    model = SparseTransformer(small(**changes)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens_of(model: SparseTransformer, seed: int = 1) -> torch.Tensor:
    return torch.randint(256, (2, model.config.context), generator=torch.Generator().manual_seed(seed))


@every_system
def test_no_row_reads_its_future(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    tokens, half = tokens_of(model), model.config.context // 2
    other = torch.cat([tokens[:, :half], tokens_of(model, 2)[:, half:]], 1)
    rows = [model(each)[:, : half + 1] for each in (tokens, other)]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)
    assert not torch.equal(model(tokens), model(other))


@every_system
def test_generation_gives_the_rows_of_the_whole_context(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    tokens = tokens_of(model)
    with torch.inference_mode():
        wanted = model(tokens)
    for first in (0, 1, 17):
        session = Session(model, 2)
        session.prefill(tokens[:, :first])
        for position in range(first, model.config.context):
            torch.testing.assert_close(session.logits, wanted[:, position], rtol=1e-10, atol=1e-10)
            if position + 1 < model.config.context:
                session.append(tokens[:, position])


@every_system
def test_a_row_that_is_computed_again_changes_nothing(changes: dict[str, Any]) -> None:
    """As where the first time was cut off, at any place."""
    model = awake(**changes)
    tokens = tokens_of(model)
    once, twice = Session(model, 2), Session(model, 2)
    for position in range(24):
        first, twice._logits = twice.logits, None
        assert torch.equal(once.logits, twice.logits) and torch.equal(first, twice.logits)
        for session in (once, twice):
            session.append(tokens[:, position])


@every_system
def test_generation_goes_on_from_another_context(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    tokens, session = tokens_of(model), Session(model, 2)
    for position in range(9):
        session.append(tokens[:, position])
    session.rearrange(torch.tensor([1, 1]))
    session.append(tokens[:, 9])
    with torch.inference_mode():
        wanted = model(torch.cat([tokens[[1, 1], :9], tokens[:, 9:11]], 1))[:, 10]
    torch.testing.assert_close(session.logits, wanted, rtol=1e-10, atol=1e-10)


@every_system
def test_what_is_taken_back_never_was(changes: dict[str, Any]) -> None:
    """To the bit, where the same steps are taken: from a beginning at once and from steps, and to any length."""
    model = awake(**changes)
    tokens, other = tokens_of(model), tokens_of(model, 2)

    def stepped(session: Session, last: int) -> torch.Tensor:
        found = []
        for position in range(session.position, last):
            found.append(session.logits)
            session.append(tokens[:, position])
        return torch.stack(found)

    for begun, length, back in ((13, 30, 8), (13, 7, None), (0, 22, None), (0, 0, 0)):
        plain, cut = Session(model, 2, back=0), Session(model, 2, back=back)
        if begun:
            plain.prefill(tokens[:, : min(begun, length)])
            cut.prefill(tokens[:, :begun])
        if length > begun:
            stepped(plain, length)
            stepped(cut, length)
        for position in range(cut.position, cut.position + 8):
            cut.append(other[:, position])
        assert cut.logits is not None
        cut.truncate(length)
        found, wanted = stepped(cut, length + 10), stepped(plain, length + 10)
        if length < begun:  # what is begun by another number of rows is rounded otherwise
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        else:
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("fewest", [2, cache.FEWEST_AT_ONCE])
@every_system
def test_several_tokens_at_once_are_as_many_steps(
    changes: dict[str, Any], fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning, behind one, behind others whose logits are known or not, and to the end."""
    monkeypatch.setattr(cache, "FEWEST_AT_ONCE", fewest)
    model = awake(**changes)
    tokens = tokens_of(model)
    with torch.inference_mode():
        wanted = model(tokens)
    for begun, asked, counts, keep in ((0, False, (7, 1, 32), 0), (0, True, (5, 35), 3), (13, True, (9, 4, 14), 0)):
        session = Session(model, 2)
        session.prefill(tokens[:, :begun])
        for count in counts:
            if asked:
                assert session.logits is not None
            first, last = session.position + 1, session.position + count + 1
            found, rows = session.extend(tokens[:, first - 1 : last - 1], keep), wanted[:, first:last]
            kept = rows[:, -(keep - 1) if last > model.config.context else -keep :] if keep else rows
            torch.testing.assert_close(found[:, : kept.shape[1]], kept, rtol=1e-10, atol=1e-10)
            assert found.shape[1] == (keep or count)
        if last > model.config.context:
            assert found[:, -1].isnan().all()
        else:
            session.append(tokens[:, last - 1])
            torch.testing.assert_close(session.logits, wanted[:, last], rtol=1e-10, atol=1e-10)


@every_system
def test_selected_contexts_go_on_alone(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    tokens, session = tokens_of(model), Session(model, 2)
    session.prefill(tokens[:, :11])
    one, three = (session.selected(torch.tensor(order)) for order in ([1], [1, 0, 1]))
    for each, order in ((one, [1]), (three, [1, 0, 1]), (session, [0, 1])):
        for position in range(11, 14):
            each.append(tokens[order, position])
        with torch.inference_mode():
            wanted = model(tokens[order, :15])[:, 14]
        torch.testing.assert_close(each.logits, wanted, rtol=1e-10, atol=1e-10)


@every_system
def test_generation_under_autocast_is_as_near_as_the_whole_context(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    tokens = tokens_of(model)
    with torch.inference_mode():
        exact = model(tokens)[:, 13:]
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(tokens)[:, 13:].double()
            session, found = Session(model, 2), []
            session.prefill(tokens[:, :13])
            for token in tokens[:, 13:].T:
                found.append(session.logits.double())
                session.append(token)
    rounding = (wanted - exact).square().mean().sqrt()
    assert (torch.stack(found, 1) - wanted).square().mean().sqrt() <= 2 * rounding


@every_system
def test_recomputed_gradients_are_bitwise_equal(changes: dict[str, Any]) -> None:
    """Of an auxiliary loss too: what a block gives beside its rows must be part of what is computed again."""
    plain = awake(**changes, dropout=0.2).float().train()
    again = copy.deepcopy(plain)
    again.activation_checkpoint = partial(checkpoint, use_reentrant=True)
    losses = []
    for model in (plain, again):
        torch.manual_seed(3)
        nats, auxiliary, _ = model(tokens_of(model), return_nats=True, return_extras=True)
        loss = nats.sum() if auxiliary is None else nats.sum() + 10 * auxiliary
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    others = dict(again.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, others[name].grad), name


@every_system
def test_parts_add_up_and_are_counted(changes: dict[str, Any]) -> None:
    config = small(**changes)
    assert sum(parameter_parts(config).values()) == SparseTransformer.num_parameters(config)
    counted = work(config)
    assert len(counted.layers) == config.layers and counted.blocks.forward > 0


@every_system
def test_saved_json_is_read_back(changes: dict[str, Any]) -> None:
    config = small(**changes)
    saved = json.loads(json.dumps(config.model_dump(mode="json")))
    assert ModelConfig.model_validate(saved) == config


@pytest.mark.parametrize(
    ("order", "sublayers"),
    [
        ("s6 (sf)10 f6", "s" * 6 + "sf" * 10 + "f" * 6),
        ("sf", "sf"),
        ("(sf)2((s)2f)3", "sfsf" + "ssf" * 3),
        (" s\ts 2 ", "sss"),
    ],
)
def test_an_order_is_read(order: str, sublayers: str) -> None:
    assert small(layers=sublayers.count("s"), order=order).sublayers == sublayers


@pytest.mark.parametrize("order", ["", "sg", "s0", "3s", "(sf", "sf)", "()2 s", "s2 3", "s(2)", "s-1", "s²", "(sf)1.5"])
def test_an_order_that_cannot_be_read_is_named(order: str) -> None:
    with pytest.raises(ConfigError, match=r"^order=.*: must be letters s and f, and groups of them"):
        small(order=order)


def test_an_order_of_other_layers_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r'^order="s2 f": has 2 mixers \(s\) and must have layers=3; such as \(sf\)3$'
    ):
        small(order="s2 f")
    for huge in ("s20001", "((s999)999)999", "s" + "9" * 5000):
        with pytest.raises(ConfigError, match=r": has more than 20,000 sub-layers$"):
            small(order=huge)


def test_the_usual_order_is_the_same_model() -> None:
    """The same names, and the same first values."""
    models = []
    for order in (None, "(sf)3"):
        torch.manual_seed(5)
        models.append(SparseTransformer(small(order=order)))
    first, second = (dict(model.named_parameters()) for model in models)
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_any_order_has_the_same_parameters() -> None:
    counts = {SparseTransformer.num_parameters(small(layers=4, order=order)) for order in (None, "s4f4", "s2(sf)2f2")}
    assert len(counts) == 1


def test_first_values_scale_with_the_sublayers_that_write_into_the_stream() -> None:
    torch.manual_seed(0)
    model: Any = SparseTransformer(small(layers=8, order="s8", width=256))
    stds = [block.attention.projection.weight.std().item() for block in model.blocks]
    assert stds == pytest.approx([(0.125 / 256) ** 0.5 / 8**0.5] * 8, rel=0.03)


def test_heads_say_what_multihead_says() -> None:
    """``combine: multihead`` is one case of groups of heads."""
    strided = small(attention=ATTENTIONS["strided multihead"])
    groups = [{"count": 2, "type": "local", "window": 8}, {"count": 2, "type": "column", "stride": 8}]
    assert small(attention={"heads": groups}).layer_patterns() == strided.layer_patterns()
    fixed = {"count": 4, **ATTENTIONS["fixed multihead"]}
    assert (
        small(attention={"heads": [fixed]}).layer_patterns()
        == small(attention=ATTENTIONS["fixed multihead"]).layer_patterns()
    )


@pytest.mark.parametrize(
    ("attention", "line"),
    [
        ({"heads": []}, "attention.heads: must be a list of patterns with counts"),
        ({"heads": [{"type": "dense"}]}, "attention.heads[0].count: missing: how many heads have this pattern"),
        ({"heads": [{"count": 0, "type": "dense"}]}, "attention.heads[0].count=0: must be an integer of at least 1"),
        ({"heads": [{"count": 3, "type": "dense"}]}, "attention.heads=[3]: counts add up to 3; must be heads=4"),
        ({"heads": [{"count": 4, "type": "dens"}]}, 'attention.heads[0].type="dens": must be a pattern'),
        ({"heads": [{"count": 4, "type": "column", "stride": 7}]}, "attention.heads[0].stride=7: must divide"),
        ({"heads": [{"cout": 4, "type": "dense"}]}, "attention.heads[0].count: missing"),
        (
            {"heads": [{"count": 4, "type": "strided", "stride": 8, "combine": "interleaved"}]},
            'attention.heads[0].combine="interleaved": takes turns by layer',
        ),
        (
            {"heads": [{"count": 3, "type": "strided", "stride": 8, "combine": "multihead"}]},
            'attention.heads[0].combine="multihead": strided splits over 2 factors',
        ),
        ({"heads": [{"count": 4, "type": "dense"}], "type": "dense"}, "attention.type: stands beside heads"),
        ({"head": [{"count": 4, "type": "dense"}]}, "attention.head: unknown key; nearest heads"),
        ([{"type": "dense"}, {"heads": [{"count": 5, "type": "dense"}]}], "attention[1].heads=[5]: counts add up to 5"),
    ],
)  # fmt: skip
def test_wrong_groups_of_heads_are_named(attention: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(attention=attention)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("feed_forward", "line"),
    [
        ([], "feed_forward: the list needs at least one object"),
        ("dense", 'feed_forward="dense": must be an object, or a list of them'),
        ({"type": "expert"}, 'feed_forward.type="expert": not known; '),
        ([{}, {"activation": "relu"}], 'feed_forward[1].activation="relu": must be '),
        ({"actvation": "relu"}, "feed_forward.actvation: unknown key; nearest activation"),
    ],
)
def test_wrong_feed_forwards_are_named(feed_forward: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(feed_forward=feed_forward)
    assert str(caught.value).startswith(line)


class AskedWidths(TorchDispatchMode):
    """Collects D and Dv of what the attention kernels are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.longstride.attention.default, torch.ops.longstride.selected_attention.default):
            self.found.add((args[0].shape[-1], args[2].shape[-1]))
        return func(*args, **(kwargs or {}))


@every_system
def test_mixers_say_which_widths_they_ask_the_kernels_for(changes: dict[str, Any]) -> None:
    model = awake(**changes)
    with torch.no_grad(), AskedWidths() as asked:
        model(torch.zeros(1, 40, dtype=torch.uint8))
    mixers = [block.mixer for block in model.config.blocks() if block.mixer is not None]
    widths = [mixer.head_widths(model.config) for mixer in mixers]
    assert asked.found == {(each.query_key, each.value) for each in widths if each.in_kernels}


def test_a_backend_is_checked_for_the_widths_that_the_mixers_ask_for() -> None:
    def check(attention: Any) -> None:
        config = small(backend="triton", attention=attention)
        config.check_backend(torch.device("cpu"), torch.float32, training=True)

    wide = {"type": "synthesizer", "kind": ["dense", "attention"], "hidden": 241}
    with pytest.raises(ConfigError, match=r'^backend="triton": cannot run here: a head width of 257 exceeds 256$'):
        check([{"type": "local", "window": 4}, wide])
    check({"type": "synthesizer", "kind": ["random", "attention"]})  # computes its scores itself
