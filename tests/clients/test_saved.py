"""What ``save_pretrained`` of transformers writes, and what stands where weights were not loaded."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.models import Exported, load_model
from longstride.sparse_model import SparseTransformer
from tests.clients.conftest import run_python
from tests.harness.clients import client
from tests.harness.configs import SYSTEMS, model_json, small
from tests.harness.runs import ROOT
from tests.harness.tiny_models import add_hub_files, random_export

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # its own warnings are its own affair


def told_of_a_run(folder: Path) -> str:
    """Gives an export a fingerprint and an origin; returns the first."""
    path, fingerprint = folder / "config.json", Exported(folder).fingerprint()
    fields = {"fingerprint": fingerprint, "origin": {"run": "mine", "step": 3}, "data": {"modality": "text"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return fingerprint


@pytest.fixture(params=["by its stub", "registered"])
def hub(request: pytest.FixtureRequest, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from longstride.launcher.hub import LongstrideForCausalLM

    told_of_a_run(folder)
    if request.param == "registered":
        return LongstrideForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@client(
    "transformers",
    "`save_pretrained` after training",
    "an export with its own fingerprint; `max_shard_size` too",
)
@pytest.mark.parametrize("split", ["50GB", "20KB"])
def test_what_is_saved_is_an_export(hub: Any, folder: Path, tmp_path: Path, split: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded = dict(vars(hub.config))
    hub.save_pretrained(tmp_path / "same")
    same = json.loads((tmp_path / "same/config.json").read_text())
    assert [same[name] for name in ("fingerprint", "origin")] == [loaded[name] for name in ("fingerprint", "origin")]
    with torch.no_grad():
        hub.embedding.start.add_(1)
    hub.save_pretrained(tmp_path / "again", max_shard_size=split)
    exported = Exported(tmp_path / "again")
    assert exported.content["fingerprint"] == exported.fingerprint() != loaded["fingerprint"]
    assert "origin" not in exported.content and exported.content["data"] == {"modality": "text"}
    assert (tmp_path / "again" / "modeling_longstride.py").read_text() == (
        folder / "modeling_longstride.py"
    ).read_text()
    assert not [path.name for path in (tmp_path / "again").glob("*.py") if path.name != "modeling_longstride.py"]
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True),
        load_model(tmp_path / "again"),
    ):
        weights = model.state_dict()
        assert weights.keys() == hub.state_dict().keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in hub.state_dict().items())


def test_other_weights_in_the_same_folder_take_the_place_of_the_first(hub: Any, tmp_path: Path) -> None:
    """Save in one file and in several, one after the other."""
    from longstride.launcher.hub import LongstrideForCausalLM

    for number, split in enumerate(["50GB", "20KB", "50GB", "10KB", "20KB"]):
        with torch.no_grad():
            hub.embedding.start.fill_(number)
        hub.save_pretrained(tmp_path / "again", max_shard_size=split)
        assert Exported(tmp_path / "again").content["fingerprint"] == Exported(tmp_path / "again").fingerprint()
        for model in (load_model(tmp_path / "again"), LongstrideForCausalLM.from_pretrained(tmp_path / "again")):
            assert bool((model.embedding.start == number).all())


@client("transformers", "what it saved, without Longstride installed", "refused: this model needs Longstride")
def test_a_missing_longstride_is_told_as_by_an_export(hub: Any, tmp_path: Path) -> None:
    hub.save_pretrained(tmp_path / "again")
    script = (
        "import sys\nsys.modules['longstride'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(tmp_path / 'again')!r}, trust_remote_code=True)\n"
    )
    ended = run_python("-c", script)
    assert ended.returncode and "ImportError: this model needs Longstride" in ended.stderr
    assert "pip install" not in ended.stderr


def configured(**changes: Any) -> Any:
    from longstride.launcher.hub import LongstrideConfig

    return LongstrideConfig(model=small(**changes).model_dump(mode="json"))


CHANGES: dict[str, dict[str, Any]] = {
    "attention": {},
    "buffers": {"attention": {"type": "routing", "clusters": 4, "window": 5}},
    "experts": next(changes for changes in SYSTEMS.values() if "experts" in str(changes)),
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_new_weights_are_those_of_a_new_network(changes: dict[str, Any], tmp_path: Path) -> None:
    """Check all weights if none is loaded, and those that a file leaves out."""
    from longstride.launcher.hub import LongstrideForCausalLM

    config = configured(**changes)
    torch.manual_seed(1)
    expected = SparseTransformer(small(**changes)).state_dict()
    torch.manual_seed(1)
    model = LongstrideForCausalLM(config)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert not model._first_values
    left_out = [name for name in expected if "blocks.0" in name]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn_like(tensor))
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    torch.manual_seed(1)
    weights = LongstrideForCausalLM.from_pretrained(None, config=config, state_dict=stored).state_dict()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name] if name in left_out else stored[name]), name


def test_buffers_stay_in_fp32_in_a_model_of_16_bits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_export(tmp_path / "model", **model_json(**CHANGES["buffers"]))
    add_hub_files(folder)
    buffers = dict(load_model(folder).named_buffers())
    assert buffers
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).bfloat16()
    for model in (loaded, cast):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert all(torch.equal(model.get_buffer(name), tensor) for name, tensor in buffers.items())
    cast.save_pretrained(tmp_path / "again")
    assert load_model(tmp_path / "again").embedding.start.dtype == torch.bfloat16
    inputs = torch.arange(20)[None]
    expected = load_model(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(loaded(inputs[:, :-1]).logits, expected(inputs)[:, 1:].float())


@client("transformers", "`resize_token_embeddings(len(tokenizer))`", "no change")
def test_embeddings_are_wide_enough_for_the_tokenizer(hub: Any) -> None:
    for number in (None, 256, 259):
        assert hub.resize_token_embeddings(number) is hub.get_input_embeddings()
    for number, rounded in ((300, None), (255, None), (256, 100)):
        with pytest.raises(
            ValueError, match=r"^new_num_tokens=\d+: this model has 256 tokens, and no weights for the 3"
        ):
            hub.resize_token_embeddings(number, pad_to_multiple_of=rounded)
    embedding = torch.nn.Embedding.from_pretrained(hub.get_input_embeddings().weight.flip(0))
    output = torch.nn.Linear(32, 256, bias=False)
    inputs = torch.arange(30)[None]
    with torch.no_grad():
        hub.set_input_embeddings(embedding)
        mirrored = hub(255 - inputs).logits
        hub.set_output_embeddings(output)
        assert torch.equal(
            hub(255 - inputs, output_hidden_states=True).hidden_states[-1] @ output.weight.T, hub(255 - inputs).logits
        )
        from longstride.launcher.hub import LongstrideForCausalLM

        assert torch.equal(mirrored, LongstrideForCausalLM.from_pretrained(hub.name_or_path)(inputs).logits)


@client("accelerate", "`device_map` with blocks on the disk; `copy.deepcopy`", "equal logits and samples, bit for bit")
def test_offloaded_blocks_and_copies_compute_the_same(tmp_path: Path) -> None:
    from longstride.launcher.hub import LongstrideForCausalLM

    folder = random_export(tmp_path / "model", **model_json())
    add_hub_files(folder)
    model, inputs = LongstrideForCausalLM.from_pretrained(folder), torch.randint(256, (2, 20))
    places = {
        "embedding": "cpu",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "blocks.2": "disk",
        "norm": "cpu",
        "logits": "cpu",
    }
    offloaded = LongstrideForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "disk")
    assert offloaded.blocks[1].attention.query_key_value.weight.is_meta
    with torch.no_grad():
        copied, expected = copy.deepcopy(model), model(inputs).logits
        copied.logits.weight.zero_()
        assert not copied(inputs).logits.any()
        assert torch.equal(model(inputs).logits, expected)
        assert torch.equal(offloaded(inputs).logits, expected)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(offloaded.generate(inputs, **options), model.generate(inputs, **options))


def test_a_tied_output_is_saved_and_offloaded_as_one_tensor(tmp_path: Path) -> None:
    from longstride.launcher.hub import LongstrideForCausalLM

    changes = SYSTEMS["norms after, as BERT"]
    folder = random_export(tmp_path / "model", **model_json(**changes))
    add_hub_files(folder)
    fingerprint = told_of_a_run(folder)
    hub, inputs = LongstrideForCausalLM.from_pretrained(folder), torch.randint(256, (2, 20))
    assert hub.logits.weight is hub.embedding.tokens.weight
    with torch.no_grad():
        expected = hub(inputs).logits
        torch.testing.assert_close(expected[:, :-1], load_model(folder)(inputs)[:, 1:])
        places = {"embedding": "disk", "blocks": "cpu", "norm": "cpu", "logits": "disk"}
        offloaded = LongstrideForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "disk")
        assert offloaded.embedding.tokens.weight.is_meta and torch.equal(offloaded(inputs).logits, expected)
    hub.save_pretrained(tmp_path / "saved")
    saved = Exported(tmp_path / "saved")
    assert sorted(saved.names) == sorted(Exported(folder).names) and "logits.weight" not in saved.names
    assert saved.content["fingerprint"] == saved.fingerprint() == fingerprint
    assert torch.equal(LongstrideForCausalLM.from_pretrained(tmp_path / "saved")(inputs).logits, expected)
    hub(inputs, labels=inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in hub.parameters())


@client("transformers", "an export with parts of another package", "loads with trust_code=True alone")
def test_code_of_other_packages_is_trusted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longstride.launcher.hub import LongstrideConfig, LongstrideForCausalLM

    monkeypatch.syspath_prepend(ROOT / "docs/examples/own_parts")
    model = model_json() | {"attention": {"type": "own_parts.recurrence:GatedRecurrence"}}
    config = LongstrideConfig(model=model, trust_code=True)  # which a file could say, too
    with pytest.raises(
        ConfigError, match=r"own_parts\.recurrence:GatedRecurrence.* is from another package; install it"
    ):
        LongstrideForCausalLM(config)
    config.trust_code = True
    hub = LongstrideForCausalLM(config)
    hub.save_pretrained(tmp_path)
    assert "trust_code" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match="trust_code=True"):
        LongstrideForCausalLM.from_pretrained(tmp_path)
    loaded = LongstrideForCausalLM.from_pretrained(tmp_path, trust_code=True).eval()
    rows = torch.randint(256, (2, 9))
    torch.testing.assert_close(loaded(rows).logits, hub.eval()(rows).logits)
    cached = loaded.generate(rows, max_new_tokens=5, do_sample=False)
    assert cached.equal(loaded.generate(rows, max_new_tokens=5, do_sample=False, use_cache=False))
