"""A run's batches: the training stream and the evaluation of its configuration, taken by all ranks together.

Letters: G contexts a global batch, W ranks.
"""

from __future__ import annotations

import hashlib
import json
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

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
    Span,
    StreamSettings,
    StreamState,
    Substitution,
    evaluation_contexts,
    read_context,
    stream_fingerprint,
)
from longstride.data_pipelines.palette import CHANNELS, Palette
from longstride.data_pipelines.settings import RemoteSettings
from longstride.data_pipelines.shards import DataFolder, check_split
from longstride.kernels import ConfigError
from longstride.launcher.config import DATA_PATHS, RunConfig
from longstride.launcher.models import ModelData
from longstride.launcher.output import AgreedError
from longstride.launcher.ranks import Ranks
from longstride.launcher.stops import StopAskedError, StopFlag
from longstride.sparse_model import Division

_PLACES = {
    "context": "model.context",
    "global_batch": "train.global_batch",
    "batch_size": "train.micro_batch",
    "min_context": "--min-context",
    "context_number": "--context-number",
    **DATA_PATHS,
}
_BYTE_VALUES = 256
_FAILED, _HAS_BATCH, _AT_THE_END, _LOST = 0, 1, 2, 3  # what a rank tells the others of its next batch
SomeBatch = TypeVar("SomeBatch", Batch, EvaluationBatch)


@dataclass(frozen=True, slots=True)
class GlobalBatch(Generic[SomeBatch]):
    """What all ranks take at once, in a step or an evaluation; each rank holds its part."""

    part: SomeBatch  # of this rank
    num_tokens: int  # over all contexts, without padding: what the loss is normalised by
    content: int  # tokens of them that are the data's own, without separators; of an evaluation those to be scored
    sample_ids: tuple[int, ...]  # of all ranks, in rank order; once of those that share contexts
    sample_ids_crc32: int  # of the same as little-endian int64
    substitutions: tuple[Substitution, ...]  # of all ranks: what stands in for damaged contexts


def together(
    open_batches: Callable[[], Iterator[SomeBatch]],
    rows: int,
    ranks: Ranks,
    device: torch.device,
    stop: StopFlag | None = None,
) -> Generator[GlobalBatch[SomeBatch]]:
    """The ranks' batches, of so many rows each, once all ranks have theirs. All ranks must call.

    One small collective a step comes before anything is computed, so that no rank waits for one that has no batch: it
    is at its end, has failed, or was asked to stop.

    Raises:
        AgreedError: on every rank, where any rank cannot open its batches or take the next, or has fewer than others.
        StopAskedError: on every rank, where any rank has been asked to stop.
        LostWorkerError: on every rank, where a worker that reads for any rank was killed or stopped.
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
        except Exception as error:  # no mistake of the user: its traceback is printed here
            traceback.print_exception(error)
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            problem = f"rank {ranks.rank} cannot take its batch: {what}"
        substitutions = batch.substitutions if isinstance(batch, Batch) else ()
        asked = int(stop is not None and stop.reason is not None)
        if batch is not None:
            tokens, content = int(batch.lengths.sum()), int(batch.content.sum())
            row = torch.cat([torch.tensor([state, tokens, len(substitutions), asked, content]), batch.sample_ids])
        else:
            row = torch.zeros(5 + rows, dtype=torch.int64)
            row[0], row[3] = state, asked
        everyone = ranks.gather_int64(row, device)  # (W, 5 + rows)
        states = everyone[:, 0]
        if bool((states == _AT_THE_END).all()):
            return
        missing = set(states.tolist()) - {_HAS_BATCH}
        if missing - {_LOST}:
            # Where nobody has failed, only other data can make some ranks end before others.
            ended = ", ".join(str(rank) for rank, state in enumerate(states.tolist()) if state == _AT_THE_END)
            rule = f"rank {ended} of {len(states)} finds less data than the others; give all hosts the same"
            problems = [text for text in ranks.gather_objects(problem) if text] or [f"data.path: {rule}"]
            raise AgreedError("\n".join(dict.fromkeys(problems)))
        if bool(everyone[:, 3].any()):  # before what is lost: that may be a part of the stop
            reasons = [text for text in ranks.gather_objects(stop and stop.reason) if text]
            raise StopAskedError(", ".join(dict.fromkeys(reasons)))
        if batch is None or missing:
            raise LostWorkerError("; ".join(text for text in ranks.gather_objects(problem) if text))
        groups = everyone.unflatten(0, (-1, ranks.sequence_parallel))
        everyone = groups[:, 0]  # those that share contexts have the same
        if not bool((groups == everyone[:, None]).all()):
            raise AgreedError(
                "data.path: ranks that share a context find different contexts there; give all hosts the same"
            )
        if int(everyone[:, 2].sum()):
            parts = ranks.gather_objects(substitutions)[:: ranks.sequence_parallel]
            substitutions = tuple(each for part in parts for each in part)
        ids = everyone[:, 5:].contiguous().numpy().astype("<i8")
        num_tokens, content = int(everyone[:, 1].sum()), int(everyone[:, 4].sum())
        crc32 = zlib.crc32(ids.tobytes())
        yield GlobalBatch(batch, num_tokens, content, tuple(ids.reshape(-1).tolist()), crc32, substitutions)


def within_vocabulary(batches: Iterator[SomeBatch], vocabulary: int) -> Iterator[SomeBatch]:
    """The same batches; DataError at one with a byte that the model lacks. It may: ASCII has none above 127."""
    for batch in batches:
        _check_tokens(batch.tokens, vocabulary)
        yield batch


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise DataError for a byte that the model lacks: an index that ends a process, or all work of its GPU."""
    if vocabulary < _BYTE_VALUES and (most := int(tokens.max())) >= vocabulary:
        rule = f"a byte of the data is {most}; {_BYTE_VALUES} takes any"
        raise DataError(f"model.vocabulary={vocabulary}: {rule}")


@contextmanager
def placed() -> Iterator[None]:
    """Names the configuration's key where data does not fit a setting: the data room does not know its path."""
    try:
        yield
    except DataError as error:
        name, _, rest = str(error).partition("=")
        if name in _PLACES:
            raise DataError(f"{_PLACES[name]}={rest}") from None
        raise


class RunData:
    """The data of a run, opened once in a process, so that training and scoring belong to one manifest.

    Raises DataError where there is no data folder, and ConfigError where its palette is not the model's vocabulary.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, location: str | None = None) -> None:
        self._config, self._ranks = config, ranks
        if location is None:  # a run's configuration may be older
            config.data.check_order()
        data = config.data
        self._cut = Cut(packing=data.packed, separator=data.separator, hop=data.hop, apart=data.apart)
        self._span: Span | None = None  # of contexts that others share: what this rank's model looks at
        if ranks.sequence_parallel > 1:
            own = Division(ranks.sequence_rank, ranks.sequence_parallel).section(config.model.context)
            self._span = Span(own.start - config.model.reach, own.stop)
        with placed():
            remote = RemoteSettings(**config.data.remote.model_dump())
            self._folder = DataFolder(location or config.data.path, remote)
        colours, vocabulary = len(self.palette or ()), config.model.vocabulary
        if colours and colours != vocabulary:
            raise ConfigError.at("model.vocabulary", vocabulary, f"the data's palette has {colours} colours; {colours}")

    @property
    def modality(self) -> str:
        """The kind of data, by its name."""
        return self._folder.manifest.modality

    @property
    def packed(self) -> bool:
        """Whether documents are laid end to end; else contexts may be short, and are filled up."""
        return modality_named(self.modality).packing if self._cut.packing is None else self._cut.packing

    @property
    def fills_contexts(self) -> bool:
        """Whether every position of every context holds the data: no padding and no separators."""
        if self.packed:
            return self._cut.separator is None
        return modality_named(self.modality).document_bytes(self._folder.manifest.properties) is not None

    @property
    def oddity(self) -> str | None:
        """What the run does that is rarely meant, in a line; None: nothing."""
        embedding = self._config.model.embedding
        if embedding.type not in MODALITIES or embedding.type == self.modality:
            return None
        rule = f"has positions as {embedding.type} does, and the data is {self.modality}"
        return f"model.embedding.type={embedding.type}: {rule}; learned fits all"

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over what the data folder says of itself, its place left out."""
        return self._folder.manifest.fingerprint

    @cached_property
    def identity(self) -> ModelData:
        """What a run on this data is trained on; without a fingerprint where its documents do not fit the run."""
        data, manifest = self._config.data, self._folder.manifest
        lines = {name: "\n".join(shard.line() for shard in split.shards) for name, split in manifest.splits.items()}
        fingerprint = None
        with suppress(DataError):
            fingerprint = stream_fingerprint(
                self._folder, data.train_split, self._config.model.context, self._cut, data.shuffle_bytes
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

    def split_tokens(self, split: str) -> int:
        """How many tokens the documents of a split have together."""
        num_bytes = self._folder.manifest.splits[split].content_bytes
        return num_bytes if self.palette is None else num_bytes // CHANNELS

    @property
    def palette(self) -> Palette | None:
        """By which pictures are read; None where tokens are bytes. Raises DataError for a damaged one."""
        return self._folder.palette

    @property
    def unit(self) -> str:
        """What a token stands for."""
        return self.identity.unit

    def stream(self, state: StreamState | None = None) -> ByteStream:
        """This rank's training batches from a state on; None is the beginning.

        Raises:
            DataError: the split or state does not fit the run.
        """
        data = self._config.data
        with placed():
            settings = StreamSettings(
                context=self._config.model.context,
                global_batch=self._config.train.global_batch,
                seed=data.seed,
                rank=self._ranks.data_rank,
                world_size=self._ranks.data_world_size,
                cut=self._cut,
                span=self._span,
                shuffle_bytes=data.shuffle_bytes,
                on_damage=data.on_damage,
                workers=data.workers,
                prefetch=data.prefetch,
                worker_timeout_seconds=self._config.worker_timeout_seconds,
            )
            return ByteStream(self._folder, settings, data.train_split, state=state)

    def batches(
        self, stream: ByteStream | StreamState | None, device: torch.device, stop: StopFlag | None = None
    ) -> Generator[GlobalBatch[Batch]]:
        """Yield the global batches of a stream, or of one opened at a state; see ``together``. All ranks must call."""

        def open_batches() -> Iterator[Batch]:
            opened = stream if isinstance(stream, ByteStream) else self.stream(stream)
            return within_vocabulary(iter(opened), self._config.model.vocabulary)

        rows = self._config.train.global_batch // self._ranks.data_world_size
        return together(open_batches, rows, self._ranks, device, stop)

    def evaluation(
        self,
        *,
        split: str | None = None,
        batch_size: int | None = None,
        limit: int | None = None,
        min_context: int = 0,
    ) -> Iterator[EvaluationBatch]:
        """This rank's contexts of a split, by default the run's validation split in its micro-batches.

        Raises:
            DataError: the split does not fit the run.
        """
        with placed():
            batches = evaluation_contexts(
                self._folder,
                split or self._config.data.validation_split,
                context=self._config.model.context,
                batch_size=batch_size or self._config.train.micro_batch,
                rank=self._ranks.data_rank,
                world_size=self._ranks.data_world_size,
                cut=self._cut,
                span=self._span,
                limit=limit,
                min_context=min_context,
            )
        return within_vocabulary(batches, self._config.model.vocabulary)

    def context(self, number: int, split: str | None = None) -> Tensor:
        """Context ``number`` of a split (None: the validation split): (n,) integers, n from 1 to the model's context.

        Raises:
            DataError: the split does not fit the run, has no such context, is damaged there, or has a byte that the
                model lacks.
        """
        split, context = split or self._config.data.validation_split, self._config.model.context
        with placed():
            tokens = read_context(self._folder, split, number, context=context, cut=self._cut)
        _check_tokens(tokens, self._config.model.vocabulary)
        return tokens

    def check(self) -> None:
        """Whether a run can be trained and evaluated, as far as can be known before its bytes are read.

        Raises:
            ConfigError: the model's positions are as many as those of the data's pictures, and otherwise arranged; or
                contexts have padding, and a part of the model does not support it.
            DataError: a split or shard is missing, damaged or too small, or the first context has bytes that the model
                does not know.
        """
        stream, data = self.stream(), self._config.data
        if not self.packed:
            try:
                self._config.model.require("padding")
            except ConfigError as error:
                raise error.under("model") from None
        is_evaluated = self._config.train.evaluate_every is not None
        if is_evaluated and not self.has_split(data.validation_split):
            held = [*self._folder.manifest.splits]
            good = "".join([f"take {name}, or " for name in held if name != data.train_split][:1])
            rule = f"no split of {data.path}, which holds {', '.join(held)}; {good}train without evaluations by"
            rule = f"{rule} train.evaluate_every=null"
            raise ConfigError.at("data.validation_split", data.validation_split, rule)
        if is_evaluated:
            self.evaluation()
        names = ("height", "width", "channels")
        pictures = {name: stream.properties[name] for name in names if name in stream.properties}
        embedding = self._config.model.embedding
        if self.palette is not None:
            pictures["channels"] = 1  # of positions: a pixel has one
        if (
            len(pictures) == 3
            and embedding.type != "learned"
            and any(getattr(embedding, name, None) != size for name, size in pictures.items())
        ):
            shape = " x ".join(map(str, pictures.values()))
            good = json.dumps({"type": "image", **pictures})
            rule = f"the data holds pictures of {shape} (height, width, channels); {good}"
            raise ConfigError.at("model.embedding", embedding.model_dump(), rule)
        if is_evaluated:
            check_split(self._folder, data.validation_split)
        if data.on_damage == "abort":
            check_split(self._folder, data.train_split)
        if self._config.model.vocabulary < _BYTE_VALUES:
            self.context(0, data.validation_split if is_evaluated else data.train_split)
