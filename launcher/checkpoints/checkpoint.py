"""Checkpoint folders: which ones a run has, whether one is whole and may be trusted, and whether a run fits it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from deepspeed import DeepSpeedEngine

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.order import StreamState
from longstride.data_pipelines.plain_files import MOST_JSON_BYTES, read_plain
from longstride.kernels import ConfigError
from longstride.launcher.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    find_damage,
    find_foreign,
    read_checkpoint_config,
    read_manifest,
)
from longstride.launcher.checkpoints.pickles import (
    checkpoint_files,
    foreign_content_refused,
    read_pickle,
    refusal_line,
    unsafe_content,
)
from longstride.launcher.checkpoints.probe import PROBE, Probe
from longstride.launcher.checkpoints.saved_tables import SavedTables
from longstride.launcher.checkpoints.scores import known_scores, ranked
from longstride.launcher.config import RunConfig
from longstride.launcher.engine import set_random_states, states
from longstride.launcher.models import is_export
from longstride.launcher.output import AgreedError, file_names
from longstride.launcher.ranks import Ranks, wait_until_visible

DEEPSPEED_TAG = "deepspeed"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose manifest and configuration are whole; its other files are not verified yet."""

    folder: Path
    manifest: CheckpointManifest
    trusted: bool = False  # whether its pickles may run the code that they ask for

    @cached_property
    def config(self) -> RunConfig:
        """The resolved configuration of the run that saved it, with its data as it is found from here.

        ConfigError where it is not one of this version's.
        """
        return read_checkpoint_config(self.folder).with_data_of(self.folder.parents[1])

    @property
    def probe(self) -> Probe | None:
        """The probe, if it was saved with one."""
        record = self.manifest.probe
        return None if record is None else Probe(self.folder / PROBE, **record.model_dump())

    @property
    def stream(self) -> StreamState:
        """The next batch; ConfigError where the manifest names none."""
        try:
            return StreamState.from_json(self.manifest.stream)
        except DataError as error:
            raise ConfigError(f"{self.folder / MANIFEST}: stream: {error}") from None

    @property
    def layout(self) -> str:
        """What saved it, in words."""
        manifest = self.manifest
        who = _processes(manifest.world_size, manifest.sequence_parallel)
        what = f"{who} in ZeRO {manifest.zero_stage}, {manifest.precision}"
        return f"step {manifest.step} was saved by {what}"

    def manifest_digest(self) -> str:
        """SHA-256 of its manifest, which has those of all its files."""
        return hashlib.sha256(read_plain(self.folder / MANIFEST, MOST_JSON_BYTES, follow_links=False)).hexdigest()

    def newer_refusals(self) -> list[str]:
        """One line for each newer folder of its run that is named like a checkpoint and is none."""
        _, refused = list_checkpoints(self.folder.parent.parent)
        return [refusal.line for refusal in refused if refusal.step > self.manifest.step]

    def agreed(self, ranks: Ranks) -> Checkpoint:
        """The first rank's choice, on every rank; see ``agreed_checkpoints``. All ranks must call."""
        (chosen,) = agreed_checkpoints(self.folder.parent.parent, [self], ranks)
        return chosen

    def verify(self) -> None:
        """Raise ConfigError where a file is damaged, or one lies there that the manifest does not name."""
        damage = find_damage(self.folder, sorted(self.manifest.files), self.manifest.files)
        if damage := damage + find_foreign(self.folder, self.manifest):
            raise ConfigError(*damage)

    def find_damage(self, ranks: Ranks) -> list[str]:
        """One line for each damaged or foreign file, the same on every rank. Each reads a share; all must call."""
        names = sorted(self.manifest.files)[ranks.rank :: ranks.world_size]
        damage = find_damage(self.folder, names, self.manifest.files)
        if ranks.is_first:
            damage += find_foreign(self.folder, self.manifest)
        return [line for lines in ranks.gather_objects(damage) for line in lines]

    def check_trust(self, ranks: Ranks) -> None:
        """Whether its verified files can be read without running code; each rank judges a share. All ranks must call.

        Raises:
            AgreedError: on every rank, where a file asks for code and the checkpoint is not trusted.
        """
        if self.trusted:
            return
        names = [name for name in sorted(self.manifest.files) if name.endswith(".pt")]
        contents = ((name, unsafe_content(self.folder / name)) for name in names[ranks.rank :: ranks.world_size])
        lines = [f"{self.folder / name}: {refusal_line(content)}" for name, content in contents if content]
        everyone = [line for each in ranks.gather_objects(lines) for line in each]
        if everyone:
            raise AgreedError("\n".join(everyone))

    def needs_conversion(self, config: RunConfig, world_size: int) -> bool:
        """Whether a run of so many processes would lay DeepSpeed's files out otherwise."""
        manifest = self.manifest
        saved = (manifest.world_size, manifest.zero_stage, manifest.precision, *_layout_keys(self.config))
        return saved != (world_size, config.zero_stage, config.precision, *_layout_keys(config))

    def is_repeated_by(self, config: RunConfig, world_size: int) -> bool:
        """Whether a run of so many processes goes on from here as the one that saved it, bit for bit."""
        same = self.manifest.sequence_parallel == config.train.sequence_parallel
        return same and not self.needs_conversion(config, world_size)

    def conversion(self, config: RunConfig, world_size: int) -> str:
        """From which layout to which a run goes on from it, in words."""
        who = _processes(world_size, config.train.sequence_parallel)
        if not self.needs_conversion(config, world_size):
            return f"{self.layout}; goes on by {who}"
        what = [f"{who} in ZeRO {config.zero_stage}"]
        now, saved = config.precision, self.manifest.precision
        if now != saved:
            what.append(now)
        if now == "fp16" != saved:
            what.append("where the loss scale begins anew")
        return f"{self.layout}; converted for {', '.join(what)}"

    def load(self, engine: DeepSpeedEngine, config: RunConfig, ranks: Ranks) -> StreamState:
        """Brings an engine of the same layout, and the random generators, to where they were; returns the next batch.

        The engine keeps the settings of its own configuration. The files are verified already.

        Raises:
            ConfigError: a file holds more than tensors and numbers, and the checkpoint is not trusted; or what no run
                writes.
            AgreedError: on every rank, where the files are of another step than the manifest.
        """
        checkpoint_files(engine).trusted = self.trusted
        self.load_tables(engine)
        with (
            foreign_content_refused(self.folder, alone=ranks.world_size == 1),
            contextlib.redirect_stdout(io.StringIO()),  # one of the optimisers prints that it loads
        ):
            loaded, _ = engine.load_checkpoint(str(self.folder), tag=DEEPSPEED_TAG)
        if loaded is None or engine.global_steps != self.manifest.step:
            rule = f"its manifest says step {self.manifest.step}, and its files {engine.global_steps}"
            raise AgreedError(f"{self.folder}: {rule}; take another checkpoint")
        engine.settings.apply(engine, states.dynamic_scale(engine))
        self.load_generators(config, ranks, engine.device)
        return self.stream

    def load_tables(self, engine: DeepSpeedEngine) -> None:
        """Brings the n-gram tables of an engine of any layout, if it has any, to where they were."""
        if engine.tables is not None:
            SavedTables(self.folder, self.manifest, self.config).load(engine)

    def load_generators(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        """Brings this rank's random generators to where those of its contexts were.

        Where other numbers of ranks have contexts of their own, none were, and they are seeded anew.
        """
        if ranks.data_world_size != self.manifest.world_size // (self.manifest.sequence_parallel or 1):
            seed_generators(config.train.seed, self.manifest.step, ranks)
            return
        path = self.folder / random_name(ranks.data_rank)
        with foreign_content_refused(path):
            set_random_states(read_pickle(path, trusted=self.trusted), device)


class Refusal(NamedTuple):
    """A folder that is named like a checkpoint and is none."""

    step: int
    line: str  # what is wrong with it


def folder_name(step: int) -> str:
    """What the folder of a checkpoint is called."""
    return f"step-{step:08d}"


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / file_names.CHECKPOINTS / folder_name(step)


def random_name(data_rank: int) -> str:
    """The file of the random generators of a rank, or of all those that share its contexts."""
    return f"random-{data_rank:05d}.pt"


def seed_generators(seed: int, step: int, ranks: Ranks) -> None:
    """Seeds this rank's random generators anew: a run in another layout saved no states for all of these."""
    text = f"{seed} {step} {ranks.data_world_size} {ranks.data_rank}".encode()
    torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1)


def list_checkpoints(run: Path, *, trusted: bool = False) -> tuple[list[Checkpoint], list[Refusal]]:
    """The checkpoints of a run, newest first, and the folders that are named like one and are none."""
    checkpoints: list[Checkpoint] = []
    refused: list[Refusal] = []
    folders = [path for path in (run / file_names.CHECKPOINTS).glob("step-*") if _NAME.fullmatch(path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        try:
            checkpoints.append(_opened(folder, trusted))
        except ConfigError as error:
            refused.extend(Refusal(int(folder.name[5:]), line) for line in str(error).splitlines())
    return checkpoints, refused


def open_checkpoint(run: Path, step: int | Literal["best"] | None, *, trusted: bool = False) -> Checkpoint:
    """The checkpoint of a step, the newest one (None), or the one with the lowest validation loss.

    ``trusted``: whether its pickles may run the code they ask for.

    Raises:
        ConfigError: no such run, step or checkpoint; none that was evaluated; or the best one is damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such run folder; name one that `longstride train` wrote")
    if is_export(run):
        rule = "is an exported model, where a run is wanted; name the folder that `longstride train` wrote, or score"
        raise ConfigError(f"{run}: {rule} the model by `longstride evaluate {run} --data DIR`")
    checkpoints, refused = list_checkpoints(run, trusted=trusted)
    if step == "best" and checkpoints:
        repeated = (score for each in checkpoints for score in each.manifest.best or ())
        scores = known_scores(run, checkpoints[0].config.data.validation_split, repeated)
        there = {*(each.manifest.step for each in checkpoints), *(each.step for each in refused)}
        best = ranked(score for score in scores.values() if score.step in there)
        step = best[0].step if best else step
    for checkpoint in checkpoints:
        if step in (None, checkpoint.manifest.step):
            return checkpoint
    if isinstance(step, int) and checkpoint_folder(run, step).is_dir():
        _opened(checkpoint_folder(run, step), trusted)  # says what is wrong with it
    held = ", ".join(str(checkpoint.manifest.step) for checkpoint in reversed(checkpoints)) or "none"
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    if step == "best":
        held += "; give the number of one" if checkpoints else ""
        wanted = f"no checkpoint of a step that {file_names.METRICS} or a manifest has a validation loss of"
    raise ConfigError(f"{run / file_names.CHECKPOINTS}: {wanted}; whole ones: {held}", *(each.line for each in refused))


def agreed_checkpoints(run: Path, checkpoints: Sequence[Checkpoint], ranks: Ranks) -> list[Checkpoint]:
    """The first rank's checkpoints of a run, in its order, on every rank. All ranks must call.

    ``checkpoints`` counts on the first rank alone, and so does its trust: another host may list the folder as it was a
    little earlier. The other ranks open the folders by name.

    Raises:
        AgreedError: on every rank, where a folder does not become visible on one of them.
    """
    if ranks.world_size == 1:
        return list(checkpoints)
    named = []
    if ranks.is_first:
        named = [(each.folder.name, _manifest_sha256(each.folder), each.trusted) for each in checkpoints]
    since = time.monotonic()
    opened: list[Checkpoint] = []
    missing = None
    for name, sha256, trusted in ranks.gather_objects(named)[0]:
        checkpoint = wait_until_visible(partial(_visible, run / file_names.CHECKPOINTS / name, sha256, trusted), since)
        if checkpoint is None:
            rule = f"is not on {socket.gethostname()} what it is for the first process; all hosts must share {run}"
            missing = f"{run / file_names.CHECKPOINTS / name}: {rule}"
            break
        opened.append(checkpoint)
    lines = dict.fromkeys(line for line in ranks.gather_objects(missing) if line)
    if lines:
        raise AgreedError("\n".join(lines))
    return opened


def first_whole(run: Path, checkpoints: Sequence[Checkpoint], ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """The first whole one of the first rank's checkpoints, and the damage of those before it; the same on every rank.

    All ranks must call.

    Raises:
        AgreedError: on every rank, where one does not see them, or the whole one would have to be trusted.
    """
    damaged: list[str] = []
    for checkpoint in agreed_checkpoints(run, checkpoints, ranks):
        damage = checkpoint.find_damage(ranks)
        if not damage:
            checkpoint.check_trust(ranks)
            return checkpoint, damaged
        damaged += damage
    return None, damaged


def _opened(folder: Path, trusted: bool) -> Checkpoint:
    """The checkpoint in a folder, whose configuration is verified at once: it is read before all the rest.

    Raises:
        ConfigError: manifest or configuration is missing or damaged, or the folder is named for another step.
    """
    manifest = read_manifest(folder)
    # A copy under another name would be the newest for ever: gone on from each time, and counted as what is to stay.
    if folder.name != (name := folder_name(manifest.step)):
        rule = f"holds step {manifest.step}, which its name does not say; call it {name}, or keep it elsewhere"
        raise ConfigError(f"{folder}: {rule}")
    damage = find_damage(folder, [file_names.CONFIG], manifest.files)
    if damage:
        raise ConfigError(*damage)
    return Checkpoint(folder, manifest, trusted)


def _visible(folder: Path, sha256: str | None, trusted: bool) -> Checkpoint | None:
    """The checkpoint in a folder, once its manifest is the one of this hash."""
    try:
        checkpoint = _opened(folder, trusted)
    except ConfigError:
        return None
    return checkpoint if _manifest_sha256(folder) == sha256 else None


def _manifest_sha256(folder: Path) -> str | None:
    """Of the file's bytes; None where it cannot be read."""
    try:
        return hashlib.sha256(read_plain(folder / MANIFEST, MOST_JSON_BYTES, follow_links=False)).hexdigest()
    except OSError:
        return None


def _layout_keys(config: RunConfig) -> tuple[object, ...]:
    """What else decides where a weight lies in DeepSpeed's files, and under which of its optimisers."""
    section, stage = config.deepspeed, config.zero_stage
    optimizer = config.train.optimizer and config.train.optimizer.type
    zero = section.get("zero_optimization", {})
    if stage == 3:
        return (optimizer, zero.get("sub_group_size"))
    if stage == 0:
        return (optimizer,)
    keys = ("round_robin_gradients", "parameter_alignment")
    return (optimizer, section.get("data_types", {}).get("grad_accum_dtype"), *(bool(zero.get(key)) for key in keys))


def _processes(count: int, sequence_parallel: int | None) -> str:
    shared = "" if sequence_parallel is None else f" ({sequence_parallel} to a context)"
    return f"{count} process{'es' if count > 1 else ''}{shared}"
