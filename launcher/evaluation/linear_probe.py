"""`longstride probe RUN|MODEL`: how well a linear classifier of each layer's features predicts a document's class.

The features of layer l are the rows after the first norm of block l, averaged over the positions of a document; those
of layer L are the rows after the last norm (Chen et al. 2020, Image GPT). The model stays as it is. Only the rows of
the first context of a longer document count.

Letters: B documents at once, N positions, C width, L blocks, n documents of a split.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longstride.data_pipelines.durable import complete_folder
from longstride.data_pipelines.errors import DataError
from longstride.kernels import ConfigError
from longstride.launcher.data import TrainingData
from longstride.launcher.engine import prepare_accelerator
from longstride.launcher.evaluation.evaluate import model_of, open_subject
from longstride.launcher.evaluation.logistic import fit
from longstride.launcher.files import check_free
from longstride.launcher.output import counting
from longstride.launcher.ranks import Ranks
from longstride.sparse_model import SparseTransformer

_MOST_POSITIONS = 1 << 15  # computed at once, unless a single document has more
_MOST_FITS = 4  # layers at once: each holds its features in fp64 several times


def run(arguments: argparse.Namespace) -> int:
    """Run the verb: print a table of the layers, and write the folder of ``--output``.

    Raises:
        ConfigError: the model cannot be opened, its features are not finite, or the output exists.
        DataError: the data has no classes or too few, or is damaged.
    """
    output, ranks = arguments.output, Ranks()
    if output is not None:
        check_free(output)
    subject = open_subject(arguments, ranks)
    config, data = subject.config, subject.data
    train, scored = config.data.train_split, arguments.split or config.data.validation_split
    classes = classes_of(data, train, scored)
    prepare_accelerator(config)
    step, precision, weights = subject.load()
    precision = arguments.precision or precision
    model = model_of(config.model, weights, precision, ranks.device)
    content: dict[str, Any] = {"run": str(arguments.run), "step": step}
    content |= {"weights": subject.weights, "precision": precision}
    content |= {"other_data": subject.differences} if subject.differences else {}
    content |= probe(model, data, train, scored, classes)
    print("layer  accuracy  penalty")
    for row in content["layers"]:
        print(f"{row['layer']:>5}  {row['accuracy']:>8.4f}  {row['penalty']:>7g}")
    text = f"{content['documents']:,} documents of {len(classes)} classes"
    print(f"{scored}: {text}; the most frequent class alone {content['most_frequent']:.4f}")
    if output is not None:
        from longstride.launcher.pictures import picture_of  # imports matplotlib

        with complete_folder(output) as folder:
            (folder / "probe.json").write_text(json.dumps(content, indent=1) + "\n")
            (folder / "probe.png").write_bytes(picture_of(draw_layers(content, arguments.run.resolve().name)))
    return 0


def classes_of(data: TrainingData, train: str, scored: str) -> np.ndarray:
    """Return the classes of the train split, ascending.

    Raises:
        DataError: there are no classes or fewer than two, or the scored split has others.
    """
    classes = np.unique(data.labels(train))
    others = np.setdiff1d(data.labels(scored), classes)
    if len(classes) < 2:
        rule = f"all documents have class {classes[0]}; a probe needs at least two classes"
        raise DataError(f"split {train!r}: {rule}, take other data")
    if len(others):
        rule = f"has class {others[0]}, which split {train!r} lacks; take another --split, or split the data anew"
        raise DataError(f"split {scored!r}: {rule}")
    return classes


def probe(model: SparseTransformer, data: TrainingData, train: str, scored: str, classes: np.ndarray) -> dict[str, Any]:
    """Fit a classifier of each layer's features on a split, score it on another, and return the figures by name.

    ``layers`` has an object for each layer. ``most_frequent`` is the accuracy of the train split's most frequent class
    for all documents.

    Args:
        model: in evaluation mode.
        data: with classes in both splits.
        train: the split to fit.
        scored: the split to score.
        classes: of both splits, ascending.

    Raises:
        ConfigError: features are not finite.
    """
    fitted = split_features(model, data, train)
    features = fitted if scored == train else split_features(model, data, scored)
    numbers, targets = (torch.from_numpy(np.searchsorted(classes, data.labels(split))) for split in (train, scored))

    def score(layer: int) -> dict[str, Any]:
        if not (np.isfinite(fitted[layer]).all() and np.isfinite(features[layer]).all()):
            raise ConfigError(f"layer {layer}: its features are not finite; take --precision fp32")
        classifier = fit(torch.from_numpy(fitted[layer]), numbers, len(classes))
        hits = classifier.logits(torch.from_numpy(features[layer]).double()).argmax(1) == targets
        accuracy = float(hits.double().mean())
        error = math.sqrt(accuracy * (1 - accuracy) / len(targets))
        return {"layer": layer, "accuracy": accuracy, "standard_error": error, "penalty": classifier.penalty}

    layers, threads = [], torch.get_num_threads()
    try:  # one thread fits a layer, as its products are small
        with (
            closing(counting.WorkCounter("fitting", len(fitted), "layers")) as counter,
            ThreadPoolExecutor(min(threads, _MOST_FITS), initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            for row in pool.map(score, range(len(fitted))):
                layers.append(row)
                counter.add(1)
    finally:
        torch.set_num_threads(threads)
    most_frequent = float((targets == numbers.bincount().argmax()).double().mean())
    counts = {"train_documents": len(numbers), "documents": len(targets), "classes": len(classes)}
    return {"train_split": train, "split": scored, **counts, "most_frequent": most_frequent, "layers": layers}


def split_features(model: SparseTransformer, data: TrainingData, split: str) -> np.ndarray:
    """Compute the features of a split, (L + 1, n, C) float32, in a temporary file without a name.

    Raises ConfigError if documents have several lengths, and a part of the model does not support padding.
    """
    device, num_documents = next(model.parameters()).device, len(data.labels(split))
    shape = len(model.blocks) + 1, num_documents, model.config.width
    with tempfile.TemporaryFile() as file:
        features = np.memmap(file, dtype=np.float32, mode="w+", shape=shape)  # outlives the open file
    documents = (tokens for tokens, _ in data.labelled_documents(split))
    size, place = max(1, _MOST_POSITIONS // model.config.context), 0
    with closing(counting.WorkCounter(f"reading {split}", num_documents, "documents")) as counter:
        while batch := list(islice(documents, size)):
            lengths = torch.tensor([len(tokens) for tokens in batch])
            tokens = pad_sequence(batch, batch_first=True)
            real = torch.arange(tokens.shape[1]) < lengths[:, None]
            averages = layer_features(model, tokens.to(device), None if real.all() else real.to(device))
            features[:, place : place + len(batch)] = averages.cpu().numpy()
            place += len(batch)
            counter.add(len(batch))
    return features


@torch.no_grad()
def layer_features(model: SparseTransformer, tokens: Tensor, real: Tensor | None = None) -> Tensor:
    """Compute the features of documents, (L + 1, B, C) float32. Averages are taken in fp64.

    Row i of an autoregressive model reads the tokens before i, so a document's last token has no influence.

    Args:
        model: in evaluation mode.
        tokens: (B, N) integers.
        real: (B, N) bool, False for padding after a document; None: there is none.
    """
    averages: list[Tensor] = []

    def average(rows: Tensor) -> None:
        if real is None:
            averages.append(rows.double().mean(1))
        else:
            averages.append(rows.double().where(real[..., None], 0.0).sum(1) / real.sum(1, keepdim=True))

    with ExitStack() as hooks:
        for block in model.blocks:
            norm = block.feed_forward_norm if block.attention is None else block.attention_norm
            hooks.callback(norm.register_forward_hook(lambda _, __, rows: average(rows)).remove)
        contexts = model.block_contexts(tokens, real=real)
        output, _ = model.residual(lambda: model.embedding(tokens, real=real), contexts)
    average(model.norm(output.rows))
    return torch.stack(averages).float()


def draw_layers(content: dict[str, Any], name: str) -> Any:
    """Draw the accuracy by layer from the object of ``probe.json``, with two standard errors."""
    from longstride.launcher.pictures import FAINT, LINES, curves, styled

    layers = content["layers"]
    numbers, accuracies = ([row[key] for row in layers] for key in ("layer", "accuracy"))
    with styled():
        figure, axis = curves()
        errors = [2 * row["standard_error"] for row in layers]
        axis.errorbar(
            numbers, accuracies, errors, color=LINES[0], marker="o", markersize=4, label="± 2 standard errors"
        )
        axis.axhline(content["most_frequent"], color=FAINT, linewidth=1.0, linestyle="--", label="most frequent class")
        axis.set(xlabel=f"layer (the last norm: {numbers[-1]})", ylabel=f"accuracy on {content['split']}")
        axis.xaxis.get_major_locator().set_params(integer=True)
        title = f"{name}, step {content['step']}: linear probe of {content['classes']} classes"
        size = f"{content['documents']:,} documents of {content['split']}, fitted on {content['train_documents']:,}"
        axis.set_title(f"{title}\n{size}")
        figure.legend(loc="outside lower center", ncols=2)
    return figure
