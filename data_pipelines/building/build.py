"""Files on disk to a data folder of WebDataset shards. The same input gives the same bytes, whoever builds it.

The first rank finds the documents and plans every shard. Shards are dealt to the ranks in rounds. When a build is
killed, its finished shards are kept, and the same command goes on from there, with any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.folders import (
    PresentOutput,
    UnfinishedFolder,
    check_apart,
    check_output,
    check_room,
    open_output,
    real_path,
)
from longstride.data_pipelines.building.planning import BuildPlan, BuildSettings, DatasetSettings, FileSettings
from longstride.data_pipelines.building.shard_writer import Piece, write_shard
from longstride.data_pipelines.datasets import dataset_named, default_input, fetched_input
from longstride.data_pipelines.documents import Document, LeftOut, OpenInput
from longstride.data_pipelines.durable import durable_file
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Properties, modality_named
from longstride.data_pipelines.palette import CHANNELS, Palette, make_palette
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.shards import DataManifest, Progress, ShardRecord

SHARD_BYTES = 16 * 2**20  # default content bytes of a shard
SAMPLED_DOCUMENTS = 2**12  # at most, that a palette is made of
SAMPLED_PIXELS = 2**17  # of all of them together; for large palettes as many as _PIXELS_A_COLOUR ask for
_PIXELS_A_COLOUR = 8


def build(
    inputs: Sequence[Path],
    output: Path,
    *,
    modality: str = "text",
    properties: Properties | None = None,
    field: str | None = None,
    suffixes: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    validation_fraction: float = 0.05,
    hold_out_end: bool = False,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    palette: int | Palette | None = None,
    progress: Progress | None = None,
    found: Callable[[LeftOut], None] | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Writes the files under ``inputs`` as shards into the folder ``output``, which appears only when whole.

    ``field`` makes every line of JSON Lines, or row of a Parquet file, a document: what its field of that name holds.

    The validation split has ``validation_fraction`` of the documents; with ``hold_out_end``, and where there is but
    one document, the end of the data by this share of the bytes.

    From a folder, files with one of ``suffixes`` are taken (None: the modality's own; empty: all). Hidden files,
    ``__pycache__``, links to folders and files or folders named in ``exclude`` are left out. Links to files are
    followed, and no file is taken twice by one. A file named in ``inputs`` is taken whatever its name. ``palette``: by
    which pictures will be read, or the number of its colours, which are then found from pixels of the train split,
    drawn by ``seed``. An identical data folder that is already there is left as it is. ``crew``: the processes that
    build together, all with the same arguments (None: the processes of the MPI job, if there is one). The first rank's
    arguments count, and ``progress`` is called there alone, as is ``found``, once, with what was left out when the
    files are known and nothing is written yet.

    Raises DataError, on all ranks, for an input that is missing, unreadable or changes meanwhile, for inputs and an
    output that overlap, where nothing is found or a split would be empty, for an output that holds anything else or
    cannot be made, and for an unfinished build of another plan.
    """

    def coordinate() -> _Coordinator:
        chosen = modality_named(modality)
        default = chosen.suffixes if field is None else RECORD_SUFFIXES
        settings = FileSettings(
            modality=chosen,
            wanted=dict(properties or {}),
            suffixes=default if suffixes is None else tuple(sorted(suffixes)),
            exclude=tuple(sorted(exclude)),
            validation_fraction=validation_fraction,
            shard_bytes=shard_bytes,
            seed=seed,
            palette=palette,
            field=field,
            hold_out_end=hold_out_end,
        )
        paths = [Path(path) for path in inputs]

        def plan() -> BuildPlan:
            made = settings.plan(paths)
            if found is not None:
                found(made.left_out)
            return made

        return _Coordinator(paths, Path(output), settings, plan)

    return _build(coordinate, progress, crew)


def build_dataset(
    name: str,
    given: Path | None,
    output: Path,
    *,
    unpublished: bool = False,
    download: bool = False,
    shard_bytes: int = SHARD_BYTES,
    palette: int | Palette | None = None,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Writes a published dataset, in the form in which it is distributed, as shards into the folder ``output``.

    ``given`` is its archive, or a folder that holds the archive or the unpacked files. ``download`` fetches what is
    missing there (None: in the folder ``downloads``). ``unpublished`` takes other content in the same form, such as a
    part of the dataset. The rest is as in ``build``.

    Raises DataError, on all ranks, for a dataset that is not known, for files that are missing, damaged or not the
    published ones, where they cannot be fetched, and for what ``build`` refuses of an output.
    """

    def coordinate() -> _Coordinator:
        dataset = dataset_named(name)
        settings = DatasetSettings(dataset, unpublished, shard_bytes, palette)
        place = Path(given) if given is not None else default_input(dataset)
        return _Coordinator(
            [place],
            Path(output),
            settings,
            lambda: settings.plan([fetched_input(dataset, place, given is not None, download, progress)]),
        )

    return _build(coordinate, progress, crew)


@dataclass(frozen=True, slots=True)
class _Task:
    """A shard to make, or to compare with the one that is there."""

    name: str
    pieces: list[Piece]
    present: ShardRecord | None  # the record that it must get


@dataclass(frozen=True, slots=True)
class _Orders:
    """What every rank has to know of a build."""

    modality: str
    properties: Properties
    place: UnfinishedFolder | None  # None: nothing is written
    output: Path
    content_bytes: int
    palette: int | Palette | None  # to be made, or taken
    sampled: Sequence[Document]  # of which a palette is made
    seed: int  # of the pixels that are taken of each


class _Coordinator:
    """The first rank's side of a build: which shards are to be made, and what becomes of them."""

    def __init__(
        self, inputs: list[Path], output: Path, settings: BuildSettings, make_plan: Callable[[], BuildPlan]
    ) -> None:
        """Checks the output before a long search, and plans. Raises DataError: see ``build``."""
        settings.check()
        output = real_path(output)  # a link to a folder on a larger disk is followed: the output is built there
        check_output(output, settings)
        check_apart(inputs, output)
        self._plan = plan = make_plan()
        check_room(output, plan.content_bytes)
        self._output = open_output(output, plan)
        self._records: dict[str, ShardRecord] = {}
        self.done_bytes = 0  # content bytes of the shards that are finished
        self.orders = _Orders(
            modality=settings.modality.name,
            properties=plan.properties,
            place=self._output.place,
            output=output,
            content_bytes=plan.content_bytes,
            palette=settings.palette,
            sampled=plan.spread("train", SAMPLED_DOCUMENTS) if isinstance(settings.palette, int) else (),
            seed=getattr(settings, "seed", 0),
        )

    def tasks(self) -> Iterator[_Task]:
        """The shards that are not finished, in canonical order."""
        for name, pieces in self._plan.shards():
            finished = self._output.finished(name, pieces)
            if finished is not None:
                self.add(finished)
            else:
                yield _Task(name, pieces, self._output.records.get(name))

    def add(self, record: ShardRecord) -> None:
        """Takes the record of a finished shard."""
        self._records[record.name] = record
        self.done_bytes += record.content_bytes

    def finish(self, palette: Palette | None) -> DataManifest:
        """Makes the output appear, or checks the one that is there. Raises DataError where that fails."""
        manifest = self._plan.manifest(self._records, palette)
        self._output.finish(manifest, palette)
        return manifest

    def close(self) -> None:
        """Lets other builds begin."""
        self._output.close()


def _build(coordinate: Callable[[], _Coordinator], progress: Progress | None, crew: Crew | None) -> DataManifest:
    """A build by all ranks, which the first one coordinates."""
    crew = join_crew() if crew is None else crew
    with crew.bound_together():
        coordinator = crew.on_first(coordinate)
        try:
            orders = crew.broadcast(coordinator.orders if coordinator else None)
            assert orders is not None  # the first rank has a coordinator
            try:
                palette = _settled_palette(crew, orders)
                _make_shards(crew, coordinator, orders, progress)
                manifest = crew.broadcast(crew.on_first(lambda: coordinator.finish(palette) if coordinator else None))
            except DataError as error:
                if orders.place is None or not orders.place.holds_finished:
                    raise
                kept = orders.place.folder
                raise DataError(
                    f"{error}; finished shards are kept in {kept} for the same command with the same files and "
                    f"options; where a file or an option has to change, remove {kept} first"
                ) from error
            assert manifest is not None
            return manifest
        finally:
            if coordinator is not None:
                coordinator.close()


def _settled_palette(crew: Crew, orders: _Orders) -> Palette | None:
    """The palette, on the first rank; made there of pixels that all ranks look up. Which rank looked does not count."""
    wanted = orders.palette
    if not isinstance(wanted, int):
        return wanted
    each = -(-max(SAMPLED_PIXELS, _PIXELS_A_COLOUR * wanted) // len(orders.sampled))
    modality = modality_named(orders.modality)

    def own_pixels() -> np.ndarray:
        drawn = []
        with OpenInput() as open_input:
            for number in range(crew.rank, len(orders.sampled), crew.size):
                document = orders.sampled[number]
                content = document.read(open_input, modality, orders.properties, 0, document.size)
                pixels = np.frombuffer(content, dtype=np.uint8).reshape(-1, CHANNELS)
                words = np.random.Philox(key=np.array([orders.seed, number], dtype=np.uint64)).random_raw(each)
                drawn.append(pixels[words % np.uint64(len(pixels))])
        return np.concatenate([np.empty((0, CHANNELS), dtype=np.uint8), *drawn])

    found = crew.on_each(own_pixels)
    return crew.on_first(lambda: make_palette(np.concatenate(found), wanted))


def _make_shards(crew: Crew, coordinator: _Coordinator | None, orders: _Orders, progress: Progress | None) -> None:
    """Rounds of a shard per rank, until all are made. After every round, each rank knows of the others' errors."""
    tasks = coordinator.tasks() if coordinator else iter(())
    reporter = _Reporter(progress if crew.is_first else None, orders.content_bytes)
    with OpenInput() as open_input:
        while True:
            any_left, task = crew.deal(tasks)
            if coordinator:
                reporter.settle(coordinator.done_bytes)
            if not any_left:
                return
            for record in crew.on_each(partial(_make_shard, task, orders, open_input, reporter.advance)):
                if coordinator and record is not None:
                    coordinator.add(record)


def _make_shard(
    task: _Task | None, orders: _Orders, open_input: OpenInput, advance: Callable[[int], None]
) -> ShardRecord | None:
    """Makes the shard, or compares it with the one that is there. None where this rank has no task."""
    if task is None:
        return None
    modality, place = modality_named(orders.modality), orders.place
    if place is None:
        record, _ = write_shard(None, task.name, task.pieces, modality, orders.properties, open_input, advance)
        if record != task.present:
            raise PresentOutput.holds_other_files(orders.output)
        return record
    with durable_file(place.data / task.name, place.partial) as file:
        record, index = write_shard(file, task.name, task.pieces, modality, orders.properties, open_input, advance)
    with durable_file(place.data / record.index_name, place.partial) as file:
        file.write(index)
    place.keep_record(record)
    return record


class _Reporter:
    """Reports the progress of all ranks: the first rank's bytes as they come, the others' after each round."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._settled = self._this_round = self._reported = 0

    def settle(self, done: int) -> None:
        """``done`` bytes are in finished shards, whoever made them."""
        self._settled, self._this_round = done, 0
        self.advance(0)

    def advance(self, size: int) -> None:
        """This rank has read ``size`` more bytes."""
        self._this_round += size
        done = self._settled + self._this_round
        if self._progress is not None and done > self._reported:
            self._reported = done
            self._progress(done, self._total)
