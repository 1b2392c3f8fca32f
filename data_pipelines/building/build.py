"""Build a data folder of WebDataset shards from files. The same input gives the same bytes on any number of ranks.

The first rank finds the documents and plans every shard. Shards are distributed to the ranks in rounds. The finished
shards of a killed build are kept, and the same command resumes from there, with any number of ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from longstride.data_pipelines.building.crew import Crew, join_crew
from longstride.data_pipelines.building.folders import (
    Output,
    UnfinishedFolder,
    check_apart,
    check_output,
    check_room,
    open_output,
    real_path,
)
from longstride.data_pipelines.building.planning import BuildPlan, BuildSettings, DatasetSettings, FileSettings
from longstride.data_pipelines.building.shard_writer import Piece, write_shard
from longstride.data_pipelines.datasets import dataset_named, default_input, fetch_input
from longstride.data_pipelines.documents import LeftOut, OpenInput
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import Properties, modality_named
from longstride.data_pipelines.palette import CHANNELS, Palette, make_palette
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.shards import DataManifest, Progress, ShardRecord

SHARD_BYTES = 16 * 2**20  # default content bytes of a shard
SAMPLED_DOCUMENTS = 2**12  # most documents that are sampled for a palette
SAMPLED_PIXELS = 2**17  # sampled in all; more for large palettes, see _PIXELS_PER_COLOUR
_PIXELS_PER_COLOUR = 8


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
    labels: bool = False,
    progress: Progress | None = None,
    found: Callable[[LeftOut], None] | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Write the files under ``inputs`` as shards into the folder ``output``, which only appears when it is complete.

    An identical data folder that already exists is left unchanged. The arguments of the first rank count.

    Args:
        inputs: folders and files. From a folder, hidden files, ``__pycache__`` and links to folders are left out. Links
            to files are followed, but no file is read twice. A file in ``inputs`` is read whatever its name.
        properties: to convert the documents to.
        field: makes every line of JSON Lines, or row of a Parquet file, a document: the content of that field.
        suffixes: of the files to read from folders; None: the modality's own, empty: all.
        exclude: names of files and folders to leave out.
        validation_fraction: share of the documents in the validation split.
        hold_out_end: whether validation is the end of the data, by its share of the bytes, as for a single document.
        palette: for reading pictures, or its number of colours. They are then computed from pixels of the train split,
            which are drawn by ``seed``.
        labels: whether to keep the class of each document, from the file ``.cls`` with its name up to the first dot.
        progress: called on the first rank.
        found: called once on the first rank with what was left out, before anything is written.
        crew: the processes that build together, with the same arguments; None: those of the MPI job, if any.

    Raises:
        DataError: on all ranks, for an input that is missing, unreadable, empty or changes meanwhile, for inputs that
            overlap the output, for an empty split, for an output that has other content or cannot be created, and for
            an unfinished build of another plan.
    """

    def begin() -> Output:
        kind = modality_named(modality)
        default = kind.suffixes if field is None else RECORD_SUFFIXES
        settings = FileSettings(
            modality=kind,
            requested=dict(properties or {}),
            suffixes=default if suffixes is None else tuple(sorted(suffixes)),
            exclude=tuple(sorted(exclude)),
            validation_fraction=validation_fraction,
            shard_bytes=shard_bytes,
            seed=seed,
            palette=palette,
            field=field,
            hold_out_end=hold_out_end,
            labels=labels,
        )
        paths = [Path(path) for path in inputs]

        def make_plan() -> BuildPlan:
            plan = settings.plan(paths)
            if found is not None:
                found(plan.left_out)
            return plan

        return _begin(paths, output, settings, make_plan)

    return _build(begin, progress, crew)


def build_dataset(
    name: str,
    source: Path | None,
    output: Path,
    *,
    unpublished: bool = False,
    download: bool = False,
    shard_bytes: int = SHARD_BYTES,
    palette: int | Palette | None = None,
    labels: bool = False,
    progress: Progress | None = None,
    crew: Crew | None = None,
) -> DataManifest:
    """Write a published dataset, in the form in which it is distributed, as shards into the folder ``output``.

    Args:
        source: the archive, or a folder with the archive or the unpacked files; None: the folder ``downloads``.
        unpublished: whether to accept other content in the same form, such as a part of the dataset.
        download: whether to fetch missing files to ``source``.
        labels: whether to keep the class of each document, which not every dataset has.

    The other arguments are those of ``build``.

    Raises:
        DataError: on all ranks, for an unknown dataset, for files that are missing, damaged, not the published ones, or
            cannot be fetched, and for an output as in ``build``.
    """

    def begin() -> Output:
        dataset = dataset_named(name)
        settings = DatasetSettings(dataset, unpublished, shard_bytes, palette, labels)
        place = Path(source) if source is not None else default_input(dataset)

        def make_plan() -> BuildPlan:
            return settings.plan([fetch_input(dataset, place, source is not None, download, progress)])

        return _begin([place], output, settings, make_plan)

    return _build(begin, progress, crew)


class _Orders(NamedTuple):
    """The data of a build that every rank needs."""

    modality: str
    properties: Properties
    place: UnfinishedFolder | None  # None: nothing is written


def _begin(inputs: list[Path], output: Path, settings: BuildSettings, make_plan: Callable[[], BuildPlan]) -> Output:
    """Check the output before a long search, plan, and open the output. Raises DataError like ``build``."""
    settings.check()
    output = real_path(output)  # a link to a folder on a larger disk is followed
    check_output(output, settings)
    check_apart(inputs, output)
    plan = make_plan()
    _ = plan.labels  # raises for a wrong class before anything is written
    check_room(output, plan.content_bytes)
    return open_output(output, plan)


def _build(begin: Callable[[], Output], progress: Progress | None, crew: Crew | None) -> DataManifest:
    """Run a build on all ranks. Only the first has the plan and the output."""
    crew = join_crew() if crew is None else crew
    with crew.bound_together(), ExitStack() as stack:
        output = crew.on_first(begin)
        orders = None
        if output is not None:
            stack.callback(output.close)
            orders = _Orders(output.plan.settings.modality.name, output.plan.properties, output.place)
        orders = crew.broadcast(orders)
        assert orders is not None  # the first rank has an output
        try:
            palette = crew.on_first(lambda: _settle_palette(output.plan) if output else None)
            records = _make_shards(crew, output, orders, progress)
            manifest = crew.broadcast(crew.on_first(lambda: output.finish(records, palette) if output else None))
        except DataError as error:
            if orders.place is None or not orders.place.holds_finished:
                raise
            folder = orders.place.folder
            raise DataError(
                f"{error}; finished shards are kept in {folder} for the same command with the same files and "
                f"options; where a file or an option has to change, remove {folder} first"
            ) from error
        assert manifest is not None
        return manifest


def _settle_palette(plan: BuildPlan) -> Palette | None:
    """Return the palette of the settings; a new one is computed from pixels of documents all over the train split."""
    palette = plan.settings.palette
    if not isinstance(palette, int):
        return palette
    members = plan.splits["train"]
    count = min(SAMPLED_DOCUMENTS, len(members))
    pixels_per_document = -(-max(SAMPLED_PIXELS, _PIXELS_PER_COLOUR * palette) // count)
    samples = []
    with OpenInput() as open_input:
        for number in range(count):
            document = members[number * len(members) // count]
            content = document.read(open_input, plan.settings.modality, plan.properties, 0, document.size)
            pixels = np.frombuffer(content, dtype=np.uint8).reshape(-1, CHANNELS)
            key = np.array([getattr(plan.settings, "seed", 0), number], dtype=np.uint64)
            drawn = np.random.Philox(key=key).random_raw(pixels_per_document) % np.uint64(len(pixels))
            samples.append(pixels[drawn])
    return make_palette(np.concatenate(samples), palette)


def _make_shards(
    crew: Crew, output: Output | None, orders: _Orders, progress: Progress | None
) -> dict[str, ShardRecord]:
    """Write all shards in rounds of one per rank. After every round, each rank learns of the others' errors.

    Returns the records of all shards by name on the first rank.
    """
    records: dict[str, ShardRecord] = {}
    finished = 0  # content bytes of finished shards
    done = reported = 0  # those and what this rank has read of its shard; what was last reported

    def add(record: ShardRecord) -> None:
        nonlocal finished
        records[record.name] = record
        finished += record.content_bytes

    def tasks() -> Iterator[tuple[str, list[Piece]]]:
        for name, pieces in output.plan.shards() if output else ():
            if output and (record := output.finished(name, pieces)) is not None:
                add(record)
            else:
                yield name, pieces

    def advance(size: int) -> None:
        nonlocal done, reported
        done += size
        if progress is not None and output is not None and done > reported:
            reported = done
            progress(done, output.plan.content_bytes)

    remaining = tasks()
    with OpenInput() as open_input:
        while True:
            any_left, task = crew.deal(remaining)
            done = finished
            advance(0)
            if not any_left:
                return records
            for record in crew.on_each(partial(_make_shard, task, orders, open_input, advance)):
                if output is not None and record is not None:
                    add(record)


def _make_shard(
    task: tuple[str, list[Piece]] | None, orders: _Orders, open_input: OpenInput, advance: Callable[[int], None]
) -> ShardRecord | None:
    """Write the shard, or only compute its record. Returns None if this rank has no task."""
    if task is None:
        return None
    (name, pieces), place = task, orders.place
    with nullcontext() if place is None else place.open(name) as file:
        modality = modality_named(orders.modality)
        record, index = write_shard(file, name, pieces, modality, orders.properties, open_input, advance)
    if place is not None:
        place.write(record.index_name, [index])
        place.keep_record(record)
    return record
