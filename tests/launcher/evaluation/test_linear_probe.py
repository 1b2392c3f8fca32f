"""Linear probes: features against a loop over documents, the regression against Newton's method, the verb on data."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longstride.data_pipelines.building import build
from longstride.data_pipelines.palette import make_palette
from longstride.data_pipelines.shards import index_tars
from longstride.launcher import cli
from longstride.launcher.config import RunConfig
from longstride.launcher.data import TrainingData
from longstride.launcher.evaluation import linear_probe
from longstride.launcher.evaluation.linear_probe import layer_features, split_features
from longstride.launcher.evaluation.logistic import PENALTIES, fit, minimise
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer
from longstride.sparse_model.block import on_grid
from tests.harness.configs import small
from tests.harness.data.builds import folder_bytes, picture, write_files
from tests.harness.data.tars import write_tar
from tests.harness.tiny_models import random_export, tiny_export
from tests.launcher.conftest import Refusal

ALPHABETS = (b"abcd", b"mnop", b"wxyz")  # bytes of the documents of each class
LABELS = (3, 8, 900)


def labelled(folder: Path, texts: list[tuple[bytes, int]]) -> Path:
    """Build a data folder of texts with classes."""
    files = {f"{number}.txt": text for number, (text, _) in enumerate(texts)}
    files |= {f"{number}.cls": b"%d" % label for number, (_, label) in enumerate(texts)}
    build([write_files(folder / "source", files)], folder / "data", labels=True, validation_fraction=0.4)
    return folder / "data"


def words(count: int, shuffled: bool = False) -> list[tuple[bytes, int]]:
    """Draw texts of 5 to 99 bytes of the alphabet of their class, or of another one if they are shuffled."""
    draw = random.Random(0)
    texts = []
    for _ in range(count):
        number = draw.randrange(len(ALPHABETS))
        text = bytes(draw.choices(ALPHABETS[number], k=draw.randint(5, 99)))
        texts.append((text, LABELS[draw.randrange(3) if shuffled else number]))
    return texts


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return labelled(tmp_path_factory.mktemp("data"), words(200))


def training_data(model: SparseTransformer, location: Path) -> TrainingData:
    """Open a data folder for a model."""
    train = {"output": "unused", "steps": 1, "learning_rate": 1.0, "global_batch": 1, "micro_batch": 1}
    content = {"model": model.config.model_dump(mode="json"), "data": {"path": str(location)}, "train": train}
    return TrainingData(RunConfig.model_validate(content | {"deepspeed": {}}), Ranks())


# The regression.


def examples(separable: bool) -> tuple[Tensor, Tensor]:
    """Draw (80, 5) features and classes below 3, which depend on the features or not."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(80, 3, generator=generator, dtype=torch.float64)
    return features, (noise + 3 * separable * features[:, :3]).argmax(1)


def newton(features: np.ndarray, classes: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    """Minimise the penalised cross-entropy by Newton's method; return (K, C + 1) and the last gradient's norm.

    The gradient and the Hessian are written out. Biases are defined up to a common constant: here their mean is 0.
    """
    count, inputs = len(features), np.concatenate([features, np.ones((len(features), 1))], axis=1)
    size, classes_of = inputs.shape[1], np.eye(3)[classes]
    penalties = np.tile(np.append(np.full(size - 1, penalty), 0.0), 3)
    parameters = np.zeros((3, size))
    for _ in range(30):
        logits = inputs @ parameters.T
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        gradient = ((shares - classes_of).T @ inputs / count).ravel() + penalties * parameters.ravel()
        hessian = np.diag(penalties)
        for row, share in zip(inputs, shares, strict=True):
            hessian += np.kron(np.diag(share) - np.outer(share, share), np.outer(row, row)) / count
        parameters -= (np.linalg.pinv(hessian) @ gradient).reshape(3, size)
    parameters[:, -1] -= parameters[:, -1].mean()
    return parameters, float(np.linalg.norm(gradient))


@pytest.mark.parametrize("penalty", [PENALTIES[0], 1e-3, PENALTIES[-1]])
@pytest.mark.parametrize("separable", [True, False])
def test_regression_is_the_optimum(penalty: float, separable: bool) -> None:
    features, classes = examples(separable)
    start = torch.zeros(3, 6, dtype=torch.float64)

    def gradient_norm(parameters: torch.Tensor) -> float:
        parameters = parameters.clone().requires_grad_()
        shares = torch.cat([features, torch.ones(80, 1)], 1).double() @ parameters.T
        loss = (shares.logsumexp(1) - shares[torch.arange(80), classes]).mean()
        loss = loss + penalty / 2 * sum(weight**2 for weight in parameters[:, :-1].flatten())
        return float(torch.autograd.grad(loss, parameters)[0].norm())

    assert gradient_norm(minimise(start, features, classes, penalty)) < 1e-6
    expected, norm = newton(features.numpy(), classes.numpy(), penalty)
    assert norm < 1e-10
    solution = minimise(start, features, classes, penalty, tolerance=1e-10)
    reached, exact = gradient_norm(solution), solution.numpy()
    exact[:, -1] -= exact[:, -1].mean()
    # Convex, and of weights strongly: penalty · |error of weights|² <= |difference of gradients| · |error|.
    error = exact - expected
    assert penalty * np.linalg.norm(error[:, :-1]) ** 2 <= 1.01 * (reached + norm) * np.linalg.norm(error)
    assert np.abs(exact - expected).max() <= 1e-6 * np.abs(expected).max()


def test_penalty_follows_the_held_out_tenth() -> None:
    """Noise gets the largest penalty, and separable classes the least; equal calls give equal bits."""
    features, classes = examples(separable=False)
    assert fit(features, classes, 3).penalty == PENALTIES[0]
    separable = (features[:, 0] > 0).long()
    classifier = fit(features, separable, 2)
    assert classifier.penalty <= PENALTIES[-2]
    assert (classifier.logits(features).argmax(1) == separable).all()
    for first, second in zip(classifier, fit(features.clone(), separable.clone(), 2), strict=True):
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def test_scale_of_features_changes_nothing_and_a_constant_one_is_allowed() -> None:
    features, classes = examples(separable=True)
    scales = torch.tensor([1e-6, 1.0, 1e6, 3.0, 0.0], dtype=torch.float64)
    scaled = features * scales + 5
    plain, other = fit(features[:, :4], classes, 3), fit(scaled, classes, 3)
    assert torch.allclose(plain.logits(features[:, :4]), other.logits(scaled), rtol=0, atol=1e-5)


# The features.


def by_hand(model: SparseTransformer, tokens: Tensor) -> Tensor:
    """Average what each block's first norm returns for a single document (n,), block after block: (L + 1, C)."""
    rows, contexts, features = model.embedding(tokens[None]), model.block_contexts(tokens[None]), []
    before = written = on_grid(rows)
    for block, context in zip(model.blocks, contexts, strict=True):
        norm = block.feed_forward_norm if block.attention is None else block.attention_norm
        read = written.to(rows.dtype) if model.config.reversible else rows
        features.append(torch.stack(list(norm(read)[0])).mean(0))
        rows = block(rows, context).rows if not model.config.reversible else rows
        for sublayer in (block.mix, block.feed) if model.config.reversible else ():
            before, written = written, before + on_grid(sublayer(written.to(rows.dtype), context).rows)
    rows = ((before + written) / 2).to(rows.dtype) if model.config.reversible else rows
    return torch.stack([*features, model.norm(rows)[0].mean(0)])


MODELS: dict[str, dict[str, Any]] = {
    "strided": {"attention": {"type": "strided", "stride": 8}},
    "feed-forwards first": {"order": "f2 (sf)2", "norm": "rms"},
    "reversible": {"reversible": True},
    "routing": {"attention": {"type": "routing", "clusters": 4, "window": 8}},
}


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_each_document_alone(name: str, letters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, with padding, and of the first context of longer documents."""
    torch.manual_seed(0)
    changes = {"layers": 2, "heads": 2, "width": 16, "context": 48} | MODELS[name]
    model = SparseTransformer(small(backend="reference", **changes)).double().eval()
    monkeypatch.setattr(linear_probe, "_MOST_POSITIONS", 7 * 48)  # batches of 7, and a rest
    opened = training_data(model, letters)
    features = split_features(model, opened, "validation")
    documents = [tokens for tokens, _ in opened.labelled_documents("validation")]
    assert {len(tokens) for tokens in documents} > {5, 48} and max(map(len, documents)) == 48
    assert features.shape == (len(model.blocks) + 1, len(documents), 16) and len(documents) % 7
    with torch.no_grad():
        expected = torch.stack([by_hand(model, tokens) for tokens in documents], 1).numpy()
    # One rounding to fp32; reversible streams are rounded to 2^-36, at every sub-layer.
    assert np.abs(features - expected).max() <= 2**-22 * np.abs(expected).max()


def test_features_leave_no_trace_in_the_model() -> None:
    torch.manual_seed(0)
    model = SparseTransformer(small(backend="reference", layers=2, heads=2, width=16)).eval()
    tokens = torch.arange(20)[None]
    assert torch.equal(layer_features(model, tokens), layer_features(model, tokens))
    assert not any(module._forward_hooks for module in model.modules())


# The verb.


def probed(*options: object) -> int:
    return cli.main(["probe", *map(str, options)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_export(tmp_path_factory.mktemp("model") / "model", layers=2)


def test_class_that_bytes_show_is_found(
    model: Path, letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table is printed, and the folder's bits are the same twice."""
    assert probed(model, "--data", letters, "--output", tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert probed(model, "--data", letters, "--output", tmp_path / "b") == 0
    assert capsys.readouterr().out == printed
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")
    assert folder_bytes(tmp_path / "a").keys() == {"probe.json", "probe.png"}
    content = json.loads((tmp_path / "a" / "probe.json").read_text())
    assert [row["layer"] for row in content["layers"]] == [0, 1, 2]
    assert content["layers"][0] | {"penalty": 0} == {"layer": 0, "accuracy": 1.0, "standard_error": 0.0, "penalty": 0}
    assert content["classes"] == 3 and content["train_documents"] + content["documents"] == 200
    assert printed.splitlines()[:2] == [
        "layer  accuracy  penalty",
        f"    0    1.0000  {content['layers'][0]['penalty']:>7g}",
    ]
    head = f"validation: {content['documents']} documents of 3 classes; the most frequent class alone 0."
    assert printed.splitlines()[-1].startswith(head)


def test_shuffled_classes_stay_at_chance(model: Path, tmp_path: Path) -> None:
    """Within four standard errors of a third."""
    data = labelled(tmp_path, words(300, shuffled=True))
    assert probed(model, "--data", data, "--output", tmp_path / "probe") == 0
    content = json.loads((tmp_path / "probe" / "probe.json").read_text())
    bound = 4 * (2 / 9 / content["documents"]) ** 0.5
    assert all(abs(row["accuracy"] - 1 / 3) <= bound for row in content["layers"])


def test_run_is_probed_on_other_data(
    trained: Callable[..., Path], letters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probed(trained("alone", 1), "--data", letters, "--split", "train", "--step", "4") == 0
    out, log = capsys.readouterr()
    assert out.splitlines()[1].startswith("    0    1.0000") and f"notice: --data={letters}: " in log


def test_pictures_with_a_palette_are_probed_by_colour(tmp_path: Path) -> None:
    """The tokens are colours, a third as many as the bytes."""
    draw = np.random.default_rng(0)
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [255, 255, 255]], dtype=np.uint8)
    numbers = draw.integers(0, 2, (60, 8, 8)) + 2 * (np.arange(60) % 2)[:, None, None]
    files = {f"{n:02}.png": picture(colours[number]) for n, number in enumerate(numbers)}
    files |= {f"{n:02}.cls": b"%d" % (n % 2) for n in range(60)}
    palette = make_palette(colours, 4)
    source = write_files(tmp_path / "source", files)
    build([source], tmp_path / "data", modality="image", labels=True, palette=palette, validation_fraction=0.3)
    embedding = {"type": "image", "height": 8, "width": 8, "channels": 1}
    changes = {"context": 64, "vocabulary": 4, "embedding": embedding, "attention": {"type": "dense"}}
    model = tiny_export(tmp_path / "model", "image", model=changes, palette=palette.to_text())
    assert probed(model, "--data", tmp_path / "data", "--output", tmp_path / "probe") == 0
    assert json.loads((tmp_path / "probe" / "probe.json").read_text())["layers"][0]["accuracy"] == 1.0


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        ((None, None), [], "manifest.json: has no classes of documents; make a data folder with --labels"),
        ((4, 4), [], "split 'train': all documents have class 4; a probe needs at least two classes, take other data"),
        ((3, 5), [], "split 'validation': has class 77, which split 'train' lacks; take another --split, or split th"),
        ((3, 77), ["--split", "test"], "manifest.json: has no split 'test'; it has train, validation"),
        ((3, 77), ["--output", "."], "--output=.: already exists and is not overwritten"),
        ((3, 77), ["--step", "3"], "--step=3: "),
    ],
    ids=["no classes", "one class", "class of no train document", "split", "output", "step"],
)
def test_mistake_gets_one_line(
    classes: tuple[int | None, ...], options: list[str], message: str, model: Path, tmp_path: Path, refusal: Refusal
) -> None:
    """The train split has a document of each of two classes, and the validation split has class 77, or the first."""
    of_split = {"train": classes, "validation": (classes[0] if classes[0] in (None, 4) else 77,)}
    for split, labels in of_split.items():
        members = [(f"{number}.txt", b"text") for number in range(len(labels))]
        members += [(f"{number}.cls", b"%d" % label) for number, label in enumerate(labels) if label is not None]
        write_tar(tmp_path / "tars" / f"{split}.tar", members)
    index_tars([str(tmp_path / "tars")], tmp_path / "data", labels=classes[0] is not None)
    assert message in refusal("probe", model, "--data", tmp_path / "data", *options)
