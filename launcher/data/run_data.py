"""A run's batches for training and evaluation, taken by all ranks together.

Letters: G contexts in a global batch, W ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, modality_named
from longstride.data_pipelines.order import (
    Batch,
    ByteStream,
    Cut,
    EvaluationBatch,
    LostWorkerError,
    StreamSettings,
    StreamState,
    Substitution,
    evaluation_contexts,
    join_batches,
    read_context,
    stream_fingerprint,
)
from longstride.data_pipelines.palette import CHANNELS, Palette
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, check_split
from longstride.kernels import ConfigError
from longstride.launcher.config import DATA_PATHS, RunConfig, Stage
from longstride.launcher.folders import rename_settings
from longstride.launcher.models import ModelData
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import Ranks
from longstride.launcher.stops import StopFlag, StopRequestedError
from longstride.sparse_model import ModelConfig

_CONFIG_PATHS = {
    "context": "model.context",
    "global_batch": "train.global_batch",
    "batch_size": "train.micro_batch",
    "min_context": "--min-context",
    "context_number": "--context-number",
    **DATA_PATHS,
}
_BYTE_VALUES = 256
_EVALUATION_SEED = 0  # of what is predicted: the same for every run, so that their losses compare
_FAILED, _HAS_BATCH, _AT_THE_END, _LOST = 0, 1, 2, 3  # states of a rank's next batch
SomeBatch = TypeVar("SomeBatch", Batch, EvaluationBatch)


@dataclass(frozen=True, slots=True)
class GlobalBatch(Generic[SomeBatch]):
    """A batch over all ranks, for a step or an evaluation."""

    part: SomeBatch  # of this rank
    num_tokens: int  # predicted ones, or labels, over all contexts, without padding: the loss is normalised by it
    content: int  # tokens of the data, without separators; in an evaluation only the scored ones
    sample_ids: tuple[int, ...]  # of all ranks, in rank order; ranks that share contexts count once
    sample_ids_crc32: int  # of the same as little-endian int64
    substitutions: tuple[Substitution, ...]  # of all ranks: replacements for damaged contexts

    def joined(self: GlobalBatch[Batch], following: GlobalBatch[Batch]) -> GlobalBatch[Batch]:
        """Join the next batch to this one, for a step that reads both."""
        ids = following.sample_ids
        return GlobalBatch(
            join_batches([self.part, following.part]),
            self.num_tokens + following.num_tokens,
            self.content + following.content,
            self.sample_ids + ids,
            zlib.crc32(np.array(ids, dtype="<i8").tobytes(), self.sample_ids_crc32),
            self.substitutions + following.substitutions,
        )


def global_batches(
    open_batches: Callable[[], Iterator[SomeBatch]],
    rows: int,
    ranks: Ranks,
    device: torch.device,
    stop: StopFlag | None = None,
) -> Generator[GlobalBatch[SomeBatch]]:
    """Yield global batches, of ``rows`` rows per rank, once all ranks have theirs. All ranks must call.

    A small collective precedes each step. So no rank begins a step in which another has no batch, because its data
    ended, it failed, or it has to stop.

    Raises:
        AgreedError: on every rank, if any rank cannot open its batches or take the next, or has fewer than others.
        StopRequestedError: on every rank, if any rank has to stop.
        LostWorkerError: on every rank, if a worker that reads for any rank was killed or stopped.
    """
    batches: Iterator[SomeBatch] | None = None
    while True:
        batch, problem, state = None, None, _FAILED
        try:
            if batches is None:
                batches = open_batches()
            batch = next(batches)
            state = _HAS_BATCH
        except StopIteration:
            state = _AT_THE_END
        except DataError as error:
            problem = str(error)
        except LostWorkerError as error:
            state, problem = _LOST, f"rank {ranks.rank}: {error}"
        except Exception as error:  # not a mistake of the user: this rank prints the traceback
            traceback.print_exception(error)
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            problem = f"rank {ranks.rank} cannot take its batch: {what}"
        substitutions = batch.substitutions if isinstance(batch, Batch) else ()
        must_stop = int(stop is not None and stop.reason is not None)
        if batch is not None:
            tokens, content = count_targets(batch), int(batch.content.sum())
            row = torch.cat([torch.tensor([state, tokens, len(substitutions), must_stop, content]), batch.sample_ids])
        else:
            row = torch.zeros(5 + rows, dtype=torch.int64)
            row[0], row[3] = state, must_stop
        everyone = ranks.gather_int64(row, device)  # (W, 5 + rows)
        states = everyone[:, 0]
        if bool((states == _AT_THE_END).all()):
            return
        missing = set(states.tolist()) - {_HAS_BATCH}
        if missing - {_LOST}:
            # If no rank has failed, only different data can end some ranks before others.
            ended = ", ".join(str(rank) for rank, state in enumerate(states.tolist()) if state == _AT_THE_END)
            rule = f"rank {ended} of {len(states)} finds less data than the others; give all hosts the same data"
            problems = [text for text in ranks.gather_objects(problem) if text] or [f"data.path: {rule}"]
            raise AgreedError("\n".join(dict.fromkeys(problems)))
        if bool(everyone[:, 3].any()):  # before lost workers, which the stop may have killed
            reasons = [text for text in ranks.gather_objects(stop and stop.reason) if text]
            raise StopRequestedError(", ".join(dict.fromkeys(reasons)))
        if batch is None or missing:
            raise LostWorkerError("; ".join(text for text in ranks.gather_objects(problem) if text))
        groups = everyone.unflatten(0, (-1, ranks.sequence_parallel))
        everyone = groups[:, 0]  # ranks that share contexts have equal rows
        if not bool((groups == everyone[:, None]).all()):
            raise AgreedError(
                "data.path: ranks that share a context read different contexts; give all hosts the same data"
            )
        if int(everyone[:, 2].sum()):
            parts = ranks.gather_objects(substitutions)[:: ranks.sequence_parallel]
            substitutions = tuple(substitution for part in parts for substitution in part)
        ids = everyone[:, 5:].contiguous().numpy().astype("<i8")
        num_tokens, content = int(everyone[:, 1].sum()), int(everyone[:, 4].sum())
        crc32 = zlib.crc32(ids.tobytes())
        yield GlobalBatch(batch, num_tokens, content, tuple(ids.reshape(-1).tolist()), crc32, substitutions)


def count_targets(batch: SomeBatch) -> int:
    """Count what a model predicts in a batch: tokens, or labels."""
    if batch.labels is not None:
        return int((batch.labels >= 0).sum())
    return int((batch.lengths if batch.predicted is None else batch.predicted > 0).sum())


def for_model(batches: Iterator[SomeBatch], model: ModelConfig, seed: int) -> Iterator[SomeBatch]:
    """Yield the batches as the model's objective reads them, drawn by ``seed``.

    Raises DataError at a byte outside the vocabulary, which may be smaller, such as ASCII.
    """
    for batch in batches:
        _check_tokens(batch.tokens, model.vocabulary)
        corrupted = model.objective.corrupt(batch.tokens, batch.lengths, batch.sample_ids, seed, model.vocabulary)
        yield batch if corrupted is None else replace(batch, inputs=corrupted.inputs, predicted=corrupted.predicted)


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise DataError for a byte outside the vocabulary: its index would abort the process or all work of its GPU."""
    if vocabulary < _BYTE_VALUES and (most := int(tokens.max())) >= vocabulary:
        rule = f"the data contains byte {most}; {_BYTE_VALUES} allows any byte"
        raise DataError(f"model.vocabulary={vocabulary}: {rule}")


class TrainingData:
    """The data of a run. It is opened once in a process, so that training and scoring use the same manifest.

    Raises:
        DataError: there is no data folder.
        ConfigError: the size of its palette is not the model's vocabulary.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, location: str | None = None) -> None:
        self._config, self._ranks = config, ranks
        if location is None:  # the configuration may belong to an older run
            config.data.check_order()
        data, self._classes = config.data, config.model.objective.num_classes
        cut = Cut(packing=data.packed, separator=data.separator, hop=data.hop, apart=data.apart)
        self._cut = replace(cut, packing=False, labelled=True) if self._classes else cut
        with rename_settings(_CONFIG_PATHS):
            remote = RemoteSettings(**config.data.remote.model_dump())
            self._folder = DataFolder(location or config.data.path, remote)
        colours, vocabulary = len(self.palette or ()), config.model.vocabulary
        if colours and colours != vocabulary:
            raise ConfigError.at("model.vocabulary", vocabulary, f"the data's palette has {colours} colours; {colours}")

    @property
    def modality(self) -> str:
        """The name of the kind of data."""
        return self._folder.manifest.modality

    @property
    def packed(self) -> bool:
        """Whether documents are laid end to end; otherwise short contexts are padded."""
        return modality_named(self.modality).packing if self._cut.packing is None else self._cut.packing

    @property
    def fills_contexts(self) -> bool:
        """Whether every position of every context holds data: no padding and no separators."""
        if self.packed:
            return self._cut.separator is None
        return modality_named(self.modality).document_bytes(self._folder.manifest.properties) is not None

    @property
    def unusual_setting(self) -> str | None:
        """A line about an unusual setting that is rarely intended; None if there is none."""
        embedding = self._config.model.embedding
        if embedding.type not in MODALITIES or embedding.type == self.modality:
            return None
        rule = f"has positions as {embedding.type} does, and the data is {self.modality}"
        return f"model.embedding.type={embedding.type}: {rule}; learned fits all"

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over the manifest of the data folder, without its location."""
        return self._folder.manifest.fingerprint

    @cached_property
    def identity(self) -> ModelData:
        """The description of the data that a run saves; without a fingerprint if its documents do not fit the run."""
        data, manifest = self._config.data, self._folder.manifest
        lines = {name: "\n".join(shard.line() for shard in split.shards) for name, split in manifest.splits.items()}
        fingerprint = None
        with suppress(DataError):
            fingerprint = stream_fingerprint(
                self._folder,
                data.train_split,
                self._config.model.context,
                self._cut,
                data.shuffle_bytes,
                data.shuffle_shards,
            )
        return replace(
            ModelData.of_folder(self._folder),
            separator=data.separator,
            splits={name: hashlib.sha256(text.encode()).hexdigest() for name, text in lines.items()},
            fingerprint=fingerprint,
        )

    def has_split(self, name: str) -> bool:
        """Whether the data has a split of this name."""
        return name in self._folder.manifest.splits

    def labels(self, split: str) -> np.ndarray:
        """Return the class of each document of a split, (documents,) int32. DataError if there is none."""
        return self._folder.split(split).labels

    def labelled_documents(self, split: str) -> Iterator[tuple[Tensor, int]]:
        """Yield the first ``context`` tokens of each document of a split, (n,), and its class. DataError for damage."""
        palette, model = self.palette, self._config.model
        most_bytes = model.context * (1 if palette is None else CHANNELS)
        for content, label in self._folder.split(split).labelled_documents(most_bytes):
            tokens = torch.from_numpy(content if palette is None else palette.tokens(content).astype(np.int64))
            _check_tokens(tokens, model.vocabulary)
            yield tokens, label

    def split_tokens(self, split: str) -> int:
        """Count the tokens of all documents of a split."""
        num_bytes = self._folder.manifest.splits[split].content_bytes
        return num_bytes if self.palette is None else num_bytes // CHANNELS

    @property
    def palette(self) -> Palette | None:
        """The palette of the pictures; None if tokens are bytes. A damaged one raises DataError."""
        return self._folder.palette

    @property
    def unit(self) -> str:
        """The name of what a loss counts: of what a token stands for, or of what the objective predicts."""
        return self._config.model.objective.unit(self.identity.unit)

    def stream(self, state: StreamState | None = None) -> ByteStream:
        """Open this rank's training batches at a state; None is the beginning.

        Raises:
            DataError: the split or state does not fit the run.
        """
        data = self._config.data
        with rename_settings(_CONFIG_PATHS):
            settings = StreamSettings(
                context=self._config.model.context,
                global_batch=self._config.train.global_batch,
                seed=data.seed,
                rank=self._ranks.data_rank,
                world_size=self._ranks.data_world_size,
                cut=self._cut,
                shuffle_bytes=data.shuffle_bytes,
                shuffle_shards=data.shuffle_shards,
                on_damage=data.on_damage,
                workers=data.workers,
                prefetch=data.prefetch,
                worker_timeout_seconds=self._config.worker_timeout_seconds,
            )
            opened = ByteStream(self._folder, settings, data.train_split, state=state)
        self._check_labels(data.train_split)
        return opened

    def batches(
        self, stream: ByteStream | StreamState | None, step: int, device: torch.device, stop: StopFlag | None = None
    ) -> Generator[GlobalBatch[Batch]]:
        """Yield the batches of the steps after ``step``, from a stream or one that is opened at a state.

        All ranks must call. Raises like ``global_batches``.
        """

        def open_batches() -> Iterator[Batch]:
            opened = stream if isinstance(stream, ByteStream) else self.stream(stream)
            return for_model(iter(opened), self._config.model, self._config.data.seed)

        rows = self._config.train.global_batch // self._ranks.data_world_size
        stages = self._config.stages()
        with closing(global_batches(open_batches, rows, self._ranks, device, stop)) as batches:
            for number in itertools.count(step):
                count = Stage.after(number, stages).batches
                taken = list(itertools.islice(batches, count))
                if len(taken) < count:
                    return
                yield functools.reduce(GlobalBatch.joined, taken)

    def evaluation(
        self,
        *,
        split: str | None = None,
        batch_size: int | None = None,
        limit: int | None = None,
        min_context: int = 0,
    ) -> Iterator[EvaluationBatch]:
        """Open this rank's contexts of a split, by default the run's validation split in its micro-batches.

        Raises:
            ConfigError: the objective predicts no next token, and ``min_context`` is not 0; or a label is too large.
            DataError: the split does not fit the run.
        """
        objective, split = self._config.model.objective, split or self._config.data.validation_split
        if min_context and not objective.next_token:
            rule = f"counts bytes before a predicted one, and objective {objective.type} reads others; leave it out"
            raise ConfigError(f"--min-context={min_context}: {rule}")
        carries = self._config.model.carries
        if min_context and carries:
            rule = "repeats bytes, but the model carries what came before; leave it out"
            raise ConfigError(f"--min-context={min_context}: {rule}")
        with rename_settings(_CONFIG_PATHS):
            batches = evaluation_contexts(
                self._folder,
                split,
                context=self._config.model.context,
                batch_size=batch_size or self._config.train.micro_batch,
                rank=self._ranks.data_rank,
                world_size=self._ranks.data_world_size,
                cut=self._cut,
                limit=limit,
                min_context=min_context,
                lanes=self._config.train.global_batch if carries else None,
            )
        self._check_labels(split)
        return for_model(batches, self._config.model, _EVALUATION_SEED)

    def _check_labels(self, split: str) -> None:
        """Raise DataError if a model of classes has no labels in a split, or ConfigError for one beyond its classes."""
        if self._classes and (most := int(self.labels(split).max())) >= self._classes:
            rule = f"split {split!r} of the data has class {most}; at least {most + 1}"
            raise ConfigError.at("model.objective.classes", self._classes, rule)

    def context(self, number: int, split: str | None = None) -> Tensor:
        """Read context ``number`` of a split (None: the validation split).

        Returns:
            (n,) integers, n at most the model's context.

        Raises:
            DataError: the split does not fit the run, has no such context, is damaged there, or has a byte outside the
                vocabulary.
        """
        split, context = split or self._config.data.validation_split, self._config.model.context
        with rename_settings(_CONFIG_PATHS):
            tokens = read_context(self._folder, split, number, context=context, cut=self._cut)
        _check_tokens(tokens, self._config.model.vocabulary)
        return tokens

    def check(self) -> None:
        """Check that the data can be used for training and evaluation, as far as possible without reading all of it.

        Raises:
            ConfigError: the position embedding has another shape than the data's pictures, contexts have padding and a
                part of the model does not support it, or a label is too large.
            DataError: a split or shard is missing, damaged or too small, or the first context has bytes outside the
                vocabulary.
        """
        stream, data = self.stream(), self._config.data
        if not self.packed:
            try:
                self._config.model.require("padding")
            except ConfigError as error:
                raise error.under("model") from None
        is_evaluated = self._config.train.evaluate_every is not None
        if is_evaluated and not self.has_split(data.validation_split):
            splits = [*self._folder.manifest.splits]
            suggestion = "".join([f"take {name}, or " for name in splits if name != data.train_split][:1])
            rule = f"no split of {data.path}, which holds {', '.join(splits)}; {suggestion}train without evaluations by"
            rule = f"{rule} train.evaluate_every=null"
            raise ConfigError.at("data.validation_split", data.validation_split, rule)
        if is_evaluated:
            self.evaluation()
        names = ("height", "width", "channels")
        pictures = {name: stream.properties[name] for name in names if name in stream.properties}
        embedding = self._config.model.embedding
        if self.palette is not None:
            pictures["channels"] = 1  # a pixel of a palette is one position
        if (
            len(pictures) == 3
            and embedding.type not in ("learned", "tokens")
            and any(getattr(embedding, name, None) != size for name, size in pictures.items())
        ):
            shape = " x ".join(map(str, pictures.values()))
            suggestion = json.dumps({"type": "image", **pictures})
            rule = f"the data holds pictures of {shape} (height, width, channels); {suggestion}"
            raise ConfigError.at("model.embedding", embedding.model_dump(), rule)
        if is_evaluated:
            check_split(self._folder, data.validation_split)
        if data.on_damage == "abort":
            check_split(self._folder, data.train_split)
        if self._config.model.vocabulary < _BYTE_VALUES:
            self.context(0, data.validation_split if is_evaluated else data.train_split)
