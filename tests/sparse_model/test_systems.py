"""What every model has to hold, whatever its sub-layers are, and the orders in which they stand."""

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.kernels import ConfigError
from longstride.launcher.planning.costs import parameter_parts, work
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.mixers import cache
from longstride.sparse_model.mixers.synthesizer import Synthesizer
from longstride.sparse_model.part import Mixer
from longstride.testing.cache import several
from longstride.testing.comparisons import UndeclaredError
from tests.harness.backends import DEVICES, ON_A_CARD, WITH_TRITON
from tests.harness.configs import ATTENTIONS, SYSTEMS, small
from tests.sparse_model.test_transformer import awake

every_system = pytest.mark.parametrize("changes", SYSTEMS.values(), ids=SYSTEMS)
ON_DEVICE = {name: {"attention": attention} for name, attention in ATTENTIONS.items()} | SYSTEMS
if not ON_A_CARD:  # a small one that rehearses them in Triton's interpreter
    ON_DEVICE = {"local": {"attention": ATTENTIONS["local"], "layers": 1, "context": 16}}


@every_system
def test_several_tokens_attend_at_once_as_in_as_many_steps(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conformance suite has few tokens, which mixers take one after the other."""
    monkeypatch.setattr(cache, "FEWEST_AT_ONCE", 2)
    with contextlib.suppress(UndeclaredError):
        several(small(**changes))


@every_system
def test_parts_add_up_and_are_counted(changes: dict[str, Any]) -> None:
    config = small(**changes)
    assert sum(parameter_parts(config).values()) == SparseTransformer.num_parameters(config)
    counted = work(config)
    assert len(counted.layers) == config.layers and counted.blocks.forward > 0


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
    with pytest.raises(ConfigError, match=r'^order="s2 f": has 2 mixers \(s\); must have layers=3; such as \(sf\)3$'):
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


def test_first_values_do_not_shrink_with_depth_where_norms_follow_the_additions() -> None:
    torch.manual_seed(0)
    output = {"tied": True, "transform": True, "bias": True}
    model: Any = SparseTransformer(small(layers=8, order="s8", width=256, norm_position="after", output=output))
    weights = [block.attention.projection.weight for block in model.blocks]
    weights += [model.logits.transform.dense.weight, model.embedding.tokens.weight]
    assert [weight.std().item() for weight in weights] == pytest.approx([(0.125 / 256) ** 0.5] * 10, rel=0.03)
    assert not model.logits.bias.any() and not model.logits.transform.dense.bias.any()


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


@every_system
def test_shown_weights_make_the_rows(changes: dict[str, Any]) -> None:
    """What `show attention` draws: the sum of the values by a head's weights is what the head gives."""
    model, tokens = awake(**changes).double(), torch.randint(256, (2, 40)) % changes.get("vocabulary", 256)
    h = torch.randn(2, 40, 64, dtype=torch.float64)
    contexts = model.block_contexts(tokens)
    for mixer, context in ((block.attention, each) for block, each in zip(model.blocks, contexts, strict=True)):
        if mixer is None or type(mixer).weights is Mixer.weights:
            continue
        rows, joined = [], []
        is_synthesizer = isinstance(mixer, Synthesizer)
        first = mixer.rows if is_synthesizer else mixer.query_key_value
        first.register_forward_hook(lambda *given, rows=rows: rows.append(given[-1]))
        mixer.projection.register_forward_pre_hook(lambda module, given, joined=joined: joined.append(given[0]))
        mixer(h, context)
        gates = torch.ones(1, 4, 40, 16, dtype=torch.float64)
        if model.config.output_gate:
            gates = mixer.output_gate(h[:1] if mixer.convolution is None else mixer.convolution(h[:1])).sigmoid()
            gates = gates.unflatten(-1, (4, -1)).transpose(1, 2)
        values = mixer.heads_of(rows[0])[0 if is_synthesizer else -1]
        values = values.repeat_interleave(4 // values.shape[1], 1)
        for head, expected in enumerate(joined[0].unflatten(-1, (4, -1)).unbind(2)):
            weighed = mixer.weights(h[:1], context)(torch.arange(40), head) @ values[0, head]
            torch.testing.assert_close(gates[0, head] * weighed, expected[0], rtol=1e-10, atol=1e-10)


class AskedWidths(TorchDispatchMode):
    """Collects D and Dv of what the attention kernels are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = torch.ops.longstride
        if func in (ops.attention.default, ops.selected_attention.default, ops.indexed_attention.default):
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


@WITH_TRITON
@pytest.mark.parametrize("changes", ON_DEVICE.values(), ids=ON_DEVICE)
def test_a_card_computes_what_a_processor_does(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nats, auxiliary loss and every gradient, in fp32; and the same bits again, in bf16 too."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    device, backend = DEVICES["triton"], "auto" if ON_A_CARD else "triton"
    wanted = results_of_a_step(awake(**changes, backend="cpu"))
    for dtype in (torch.float32, torch.bfloat16) if ON_A_CARD else (torch.float32,):
        first, second = (results_of_a_step(awake(**changes, backend=backend).to(device, dtype)) for _ in range(2))
        assert all(torch.equal(each, second[name]) for name, each in first.items())
        assert first.keys() == wanted.keys()
        if dtype == torch.float32:
            for name, each in wanted.items():
                assert (first[name] - each).norm() <= 1e-3 * each.norm(), name


def results_of_a_step(model: SparseTransformer) -> dict[str, torch.Tensor]:
    """Return nats, auxiliary loss and gradients of a training step."""
    tokens = torch.arange(3 * model.config.context).view(3, -1) ** 2 % 7 % model.config.vocabulary
    device = next(model.parameters()).device
    output = model.train()(tokens.to(device), return_nats=True, return_extras=True)
    losses = {"auxiliary loss": output.auxiliary_loss} if output.auxiliary_loss is not None else {}
    (output.rows.mean() + sum(losses.values())).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.detach().cpu() for name, each in ({"nats": output.rows} | losses | found).items()}
