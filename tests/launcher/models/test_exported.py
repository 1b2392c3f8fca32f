"""Exported folders, read: whole in one file or several, mapped, and refused where they do not fit together."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

from longstride.kernels import ConfigError
from longstride.launcher.models.exported import Exported, load_model, stream_model
from longstride.launcher.models.tensors import Shapes, write_tensors
from longstride.sparse_model import ModelConfig, SparseTransformer
from tests.harness.tiny_models import plain_config
from tests.launcher.conftest import Refusal

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(exported: Path) -> Path:
    """The same model in two files."""
    weights = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + (number > 4)}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name, place in places.items() if place == file}, exported / file)
    (exported / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return exported


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_loaded_model_has_the_exported_weights(exported: Path) -> None:
    model, weights = load_model(exported), load_file(exported / "model.safetensors")
    assert not model.training
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    by_text = load_model(str(exported)).state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in by_text.items())
    assert Exported(str(exported)).folder == exported


def test_sharded_model_is_the_same(exported: Path, request: pytest.FixtureRequest) -> None:
    weights, name = load_file(exported / "model.safetensors"), Exported(exported).fingerprint()
    sharded = request.getfixturevalue("sharded")
    state = load_model(sharded).state_dict()
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)
    assert Exported(sharded).fingerprint() == name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_type_is_the_stored_one_unless_asked(exported: Path, dtype: torch.dtype | None) -> None:
    path = exported / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(weights, path)
    state = load_model(exported, dtype=dtype).state_dict()
    for name, tensor in state.items():
        assert tensor.dtype == (dtype or torch.bfloat16)
        assert torch.equal(tensor, weights[name].to(tensor.dtype))


def test_weights_lie_as_torchs_own_do(exported: Path) -> None:
    """Matrix products may round otherwise at other addresses."""
    assert all(tensor.data_ptr() % 64 == 0 for tensor in load_model(exported).state_dict().values())


def test_weights_stay_on_the_disk(exported: Path) -> None:
    """A file of our own: its tensors lie as torch's do, so that none has to be copied."""
    path = exported / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}  # the file is about to go
    write_tensors(path, {name: tensor.shape for name, tensor in weights.items()}, weights.values())
    model = load_model(exported)
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    mapped = [tuple(int(end, 16) for end in line.split("-")) for line in lines]
    for name, tensor in model.state_dict().items():
        assert any(begin <= tensor.data_ptr() < end for begin, end in mapped), name
        assert torch.equal(tensor, weights[name])


def test_empty_model_has_the_models_shapes_and_no_memory(exported: Path) -> None:
    config = ModelConfig.model_validate(json.loads((exported / "config.json").read_text())["model"])
    empty, whole = SparseTransformer.empty(config).state_dict(), SparseTransformer(config).state_dict()
    assert [(name, tensor.shape) for name, tensor in empty.items()] == [(n, t.shape) for n, t in whole.items()]
    assert all(tensor.is_meta for tensor in empty.values())


def test_backend_that_cannot_run_there_gives_way(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longstride.kernels.backends.triton.WIDEST", 1)
    change_json(exported / "config.json", lambda content: content["model"].update(backend="triton"))
    assert load_model(exported).config.backend == "auto"
    change_json(exported / "config.json", lambda content: content["model"].update(backend="reference"))
    config = load_model(exported).config
    assert config.backend == "reference"
    weights = load_file(exported / "model.safetensors")
    for backend, expected in {"triton": "auto", "reference": "reference"}.items():
        config = config.model_copy(update={"backend": backend})
        model = stream_model(config, weights.__getitem__, torch.float32, torch.device("cpu"))
        assert model.config.backend == expected


def test_fingerprint_is_what_is_documented(exported: Path) -> None:
    model = json.loads((exported / "config.json").read_text())["model"]
    lines = [json.dumps(model, sort_keys=True, separators=(",", ":"))]
    for name, tensor in sorted(load_file(exported / "model.safetensors").items()):
        shape = "×".join(map(str, tensor.shape))
        lines.append(f"{name} F32 {shape} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}")
    expected = hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    assert Exported(exported).fingerprint() == expected


def test_fingerprint_tells_models_apart(exported: Path) -> None:
    path, found = exported / "model.safetensors", {Exported(exported).fingerprint()}
    weights = load(path.read_bytes())  # not mapped: the file is written over
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, path)
    found.add(Exported(exported).fingerprint())
    weights["embedding.start"][3] += 2**-10
    save_file(weights, path)
    found.add(Exported(exported).fingerprint())
    change_json(exported / "config.json", lambda content: content["model"]["attention"].update(window=9))
    found.add(Exported(exported).fingerprint())
    assert len(found) == 4


def resave(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load((folder / "model.safetensors").read_bytes())
    change(weights)
    save_file(weights, folder / "model.safetensors")


def narrow(weights: dict[str, torch.Tensor]) -> None:
    weights["embedding.start"] = torch.zeros(5)


def count(weights: dict[str, torch.Tensor]) -> None:
    weights["embedding.start"] = torch.zeros(32, dtype=torch.int64)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"), "cannot be read as an export: "),
        (lambda folder: (folder / "config.json").write_text("{"), "/config.json:1:2: not JSON: "),
        (lambda folder: (folder / "config.json").unlink(), ": has no config.json; name a folder written by"),
        (lambda folder: (folder / "config.json").write_text("{}"), "/config.json: has no model; name a folder"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            ": has neither model.safetensors nor model.safetensors.index.json; name a folder written by `longstride",
        ),
        (
            lambda folder: change_json(folder / "config.json", lambda content: content["model"].update(width=64)),
            ": model.safetensors is not the model of config.json: it has ",
        ),
        (
            lambda folder: change_json(folder / "config.json", lambda content: content["model"].update(widht=64)),
            "/config.json: model.widht: unknown key; nearest width",
        ),
        (
            lambda folder: change_json(folder / "config.json", lambda content: content.update(format=2)),
            "/config.json: format=2: this Longstride reads 1 to 1",
        ),
        (lambda folder: resave(folder, lambda weights: weights.pop("norm.bias")), "config.json: it lacks norm.bias"),
        (lambda folder: resave(folder, lambda weights: weights.update(more=torch.ones(2))), "it has unknown more"),
        (lambda folder: resave(folder, narrow), "it has embedding.start of [5] instead of [32]"),
        (lambda folder: resave(folder, count), "tensors of F32, I64; all must have one type of F32, F16, BF16"),
    ],
)
def test_what_is_no_export_is_refused(
    exported: Path, damage: Callable[[Path], object], message: str, refusal: Refusal
) -> None:
    damage(exported)
    line = refusal("sample", exported)
    assert line.startswith(str(exported)) and message in line


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            "has no model-00002-of-00002.safetensors, which model.safetensors.index.json names",
        ),
        (lambda folder: (folder / INDEX).write_text("[]"), "must hold a JSON object"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), "has no weight_map, which names the file"),
        (
            lambda folder: change_json(folder / INDEX, lambda content: content["weight_map"].pop("norm.bias")),
            "model-00002-of-00002.safetensors and model.safetensors.index.json differ about norm.bias",
        ),
        (
            lambda folder: change_json(
                folder / INDEX, lambda content: content["weight_map"].update(more="model-00001-of-00002.safetensors")
            ),
            "model-00001-of-00002.safetensors and model.safetensors.index.json differ about more",
        ),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    sharded: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(sharded)
    with pytest.raises(ConfigError) as caught:
        load_model(sharded)
    (line,) = str(caught.value).splitlines()
    assert message in line and line.startswith(str(sharded))


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", 3])
def test_index_leads_nowhere_else(sharded: Path, file: object) -> None:
    (sharded.parent / "other.safetensors").write_bytes((sharded / "model-00001-of-00002.safetensors").read_bytes())
    change_json(sharded / INDEX, lambda content: content["weight_map"].update({"norm.bias": file}))
    with pytest.raises(ConfigError, match=r"weight_map\.norm\.bias=.*: must name a file in the same folder"):
        load_model(sharded)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ngrams": {"rows": 50}},
        {"reversible": True, "norm": "rms"},
        {"layers": 3, "attention": [{"type": "lsh", "buckets": 4, "chunk": 2}, {"type": "dense"}]},
        {"layers": 2, "order": "s2 f2", "embedding": {"type": "tokens"}},
    ],
)
def test_shapes_are_those_of_the_whole_model(changes: dict) -> None:
    config = plain_config(**changes)
    shapes, model = Shapes.of_model(config), SparseTransformer.empty(config)
    assert list(shapes.of.items()) == [(name, tensor.shape) for name, tensor in model.state_dict().items()]
    assert shapes.buffers == dict(model.named_buffers()).keys()
    assert shapes.parameters == sum(each.numel() for each in model.parameters())


def test_no_layer_is_made_that_the_weights_have_not(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_json(exported / "config.json", lambda content: content["model"].update(layers=10_000))
    made, empty = [], SparseTransformer.empty
    monkeypatch.setattr(SparseTransformer, "empty", lambda *given: empty(*given) if given[1:] else made.append(given))
    with pytest.raises(ConfigError, match=r"it lacks blocks\.1\..* more$"):
        load_model(exported)
    assert not made


def test_header_longer_than_the_models_is_not_read(exported: Path) -> None:
    (exported / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + bytes(100))
    with pytest.raises(ConfigError, match=r"its header has 9,223,372,036,854,775,808 bytes, and the model"):
        load_model(exported)
