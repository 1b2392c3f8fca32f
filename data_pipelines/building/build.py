"""Files on disk to a data folder of WebDataset shards. The same input gives the same bytes, whoever builds it.

The first rank finds the documents and plans every shard; shards are dealt to the ranks in rounds. What is finished
is kept where a build is killed, and the same command goes on from there, with any number of ranks.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.durable import durable_file, flush_folder
from longstride.data_pipelines.building.places import check_places, real_path, unfinished_folder
from longstride.data_pipelines.building.present import PresentOutput, check_output, is_occupied
from longstride.data_pipelines.building.unfinished import UnfinishedBuild, Workplace
from longstride.data_pipelines.datasets import (
    DatasetSettings,
    dataset_named,
    default_input,
    fetched_input,
    make_dataset_plan,
)
from longstride.data_pipelines.documents import FileSettings, Openings, Piece, Plan, Settings, make_plan, write_shard
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Modality, Properties, modality_named
from longstride.data_pipelines.shards import DataManifest, Progress, ShardRecord

SHARD_BYTES = 16 * 2**20  # payload of a shard, unless told otherwise

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    """A shard to make, or to compare with the one that is there."""

    name: str
    pieces: list[Piece]
    there: ShardRecord | None  # what it must turn out to be


@dataclass(frozen=True, slots=True)
class _Orders:
    """What every rank has to know of a build."""

    modality: str
    properties: Properties
    place: Workplace | None  # None: nothing is written
    output: Path
    content_bytes: int


def build(
    inputs: Sequence[Path],
    output: Path,
    *,
    modality: str = "text",
    properties: Properties | None = None,
    suffixes: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    validation_fraction: float = 0.05,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Write the files under ``inputs`` as shards into the folder ``output``, which appears only when whole.

    From a folder, files with one of ``suffixes`` are taken (None: the modality's own; empty: all); hidden files,
    ``__pycache__``, symlinks and files or folders named in ``exclude`` are left out. A file named in ``inputs`` is
    taken whatever its name. An identical data folder that is already there is left as it is. ``crew``: the processes
    that build together, all with the same arguments (None: those of the MPI job, if there is one); the first rank's
    arguments count, and ``progress`` is called there alone.

    Raises DataError, on all ranks, for an input that is missing, unreadable or changes meanwhile, for inputs and an
    output that do not lie apart, where nothing or only one split is found, for an output that holds anything else or
    cannot be made, and for an unfinished build of another plan.
    """

    def prepare() -> _Site:
        chosen = modality_named(modality)
        settings = FileSettings(
            modality=chosen,
            asked=dict(properties or {}),
            suffixes=chosen.suffixes if suffixes is None else tuple(sorted(suffixes)),
            exclude=tuple(sorted(exclude)),
            validation_fraction=validation_fraction,
            shard_bytes=shard_bytes,
            seed=seed,
        )
        paths = [Path(path) for path in inputs]
        return _prepare(paths, Path(output), settings, lambda: make_plan(paths, settings))

    return _build(prepare, progress, crew)


def build_dataset(
    name: str,
    given: Path | None,
    output: Path,
    *,
    unpublished: bool = False,
    download: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Write a published dataset, in the form in which it is distributed, as shards into the folder ``output``.

    ``given`` is its archive, or a folder that holds the archive or the unpacked files; what is missing there is fetched
    if ``download`` says so (None: in the folder ``downloads``). ``unpublished`` takes other content in the same form,
    such as a part of it. The rest is as ``build`` has it.

    Raises DataError, on all ranks, for a dataset that is not known, for files that are missing, damaged or not the
    published ones, where they cannot be fetched, and for what ``build`` refuses of an output.
    """

    def prepare() -> _Site:
        dataset = dataset_named(name)
        settings = DatasetSettings(dataset, unpublished, shard_bytes)
        there = Path(given) if given is not None else default_input(dataset)
        asked_for = given is not None

        def plan() -> Plan:
            found = fetched_input(dataset, there, asked_for, download, progress)
            return make_dataset_plan(settings, found)

        return _prepare([there], Path(output), settings, plan)

    return _build(prepare, progress, crew)


def _build(prepare: Callable[[], "_Site"], progress: Progress | None, crew: Crew | None) -> DataManifest:
    """A build by all ranks, of which the first one prepares it."""
    crew = join_crew() if crew is None else crew
    with crew.bound_together():
        site = crew.on_first(prepare)
        try:
            orders = crew.broadcast(site.orders if site else None)
            assert orders is not None  # the first rank has a site
            return _build_together(crew, site, orders, progress)
        finally:
            if site is not None:
                site.close()


class _Site:
    """The first rank's side of a build: which shards are to be made, and what becomes of them."""

    def __init__(self, plan: Plan, output: Path, unfinished: UnfinishedBuild | None, there: PresentOutput | None):
        self._plan, self._output, self._unfinished, self._there = plan, output, unfinished, there
        self._records: dict[str, ShardRecord] = {}
        self.done_bytes = 0  # content bytes of the shards that are finished
        self.orders = _Orders(
            modality=plan.settings.modality.name,
            properties=plan.properties,
            place=unfinished.place if unfinished else None,
            output=output,
            content_bytes=plan.content_bytes,
        )

    def tasks(self) -> Iterator[_Task]:
        """The shards that are not finished, in canonical order."""
        for name, pieces in self._plan.shards():
            finished = self._unfinished.place.finished(name, pieces) if self._unfinished else None
            if finished is not None:
                self.add(finished)
            else:
                yield _Task(name, pieces, self._there.records[name] if self._there else None)

    def add(self, record: ShardRecord) -> None:
        """Take note of a shard that is finished."""
        self._records[record.name] = record
        self.done_bytes += record.content_bytes

    def finish(self) -> DataManifest:
        """Make the output appear, or find it as it should be. Raises DataError where that fails."""
        manifest = self._plan.manifest(self._records)
        if self._unfinished:
            self._unfinished.finish(self._output, manifest)
        elif self._there:
            self._there.check_content(manifest)
            _log.info("%s: already there, and identical", self._output)
            _tidy(self._output)
        return manifest

    def close(self) -> None:
        """Let other builds go on."""
        if self._unfinished:
            self._unfinished.let_go()


def _prepare(inputs: list[Path], output: Path, settings: Settings, make: Callable[[], Plan]) -> _Site:
    settings.check()
    output = real_path(output)  # a link to a folder on a larger disk is meant to be built there
    check_output(output, settings)
    check_places(inputs, output)
    plan = make()
    if is_occupied(output):
        return _Site(plan, output, None, PresentOutput(output, plan))
    unfinished = UnfinishedBuild(output)
    try:
        if not is_occupied(output):
            unfinished.begin(plan)
            return _Site(plan, output, unfinished, None)
        unfinished.tidy()  # a build has ended while this one looked for files
    except BaseException:
        unfinished.let_go()
        raise
    unfinished.let_go()
    return _Site(plan, output, None, PresentOutput(output, plan))


def _tidy(output: Path) -> None:
    """Remove what a build left that was killed after its output was whole."""
    if unfinished_folder(output).is_dir():
        with suppress(DataError):  # another build may be at it, or the folder be read-only: no harm
            left = UnfinishedBuild(output)
            left.tidy()
            left.let_go()


def _build_together(crew: Crew, site: _Site | None, orders: _Orders, progress: Progress | None) -> DataManifest:
    try:
        _make_shards(crew, site, orders, progress)
        manifest = crew.broadcast(crew.on_first(lambda: site.finish() if site else None))
    except DataError as error:
        if orders.place is None or not orders.place.holds_finished:
            raise
        kept = orders.place.folder
        raise DataError(
            f"{error}; finished shards are kept in {kept} for the same command with the same files and options; "
            f"where a file or an option has to change, remove {kept} first"
        ) from error
    assert manifest is not None
    return manifest


def _make_shards(crew: Crew, site: _Site | None, orders: _Orders, progress: Progress | None) -> None:
    """Rounds of a shard a rank, until all are made. An outcome of each rank is known to all after every round."""
    modality = modality_named(orders.modality)
    tasks = site.tasks() if site else iter(())
    teller = _Teller(progress if crew.is_first else None, orders.content_bytes)
    with closing(Openings()) as openings:
        while True:
            any_left, task = crew.deal(tasks)
            if site:
                teller.settle(site.done_bytes)
            if not any_left:
                return
            make = partial(_make_shard, task, orders, modality, openings, teller.advance)
            for record in crew.on_each(make):
                if site and record is not None:
                    site.add(record)


def _make_shard(
    task: _Task | None, orders: _Orders, modality: Modality, openings: Openings, advance: Callable[[int], None]
) -> ShardRecord | None:
    """Make the shard, or compare it with the one that is there; None where there is none for this rank."""
    if task is None:
        return None
    place = orders.place
    if place is None:
        record, _ = write_shard(None, task.name, task.pieces, modality, orders.properties, openings, advance)
        if record != task.there:
            raise DataError(PresentOutput.other_files(orders.output))
        return record
    with durable_file(place.data / task.name, place.partial) as file:
        record, index = write_shard(file, task.name, task.pieces, modality, orders.properties, openings, advance)
    with durable_file(place.data / record.index_name, place.partial) as file:
        file.write(index)
    flush_folder(place.data)
    place.keep_record(record)
    return record


class _Teller:
    """Tells how far all ranks are: the first one's own bytes as they come, the others' after each round."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._settled = self._own = self._told = 0

    def settle(self, done: int) -> None:
        """So many bytes are in finished shards, whoever made them."""
        self._settled, self._own = done, 0
        self.advance(0)

    def advance(self, size: int) -> None:
        """So many more bytes were read on this rank."""
        self._own += size
        done = self._settled + self._own
        if self._progress is not None and done > self._told:
            self._told = done
            self._progress(done, self._total)
