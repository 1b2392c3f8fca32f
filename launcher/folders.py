"""`longstride data build|index|verify`: make shards from files, index existing tars, and check both.

Imports neither torch nor the configuration, so that these commands start at once, on every rank of an MPI job.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from longstride.data_pipelines.building import Crew, build, build_dataset, join_crew, unfinished_folder
from longstride.data_pipelines.datasets import DATASETS
from longstride.data_pipelines.documents import FOLDERS, LeftOut
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.labels import LABEL_EXTENSION
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.shards import DataFolder, DataManifest, index_tars, verify
from longstride.data_pipelines.stores import open_store
from longstride.launcher.output import counting, exit_codes, mistake, report, say

_SHOWN_SUFFIXES = 4  # of skipped files
_UNPRINTABLE = re.compile(r"[^ -~]")
_NAMES = (
    *("validation_fraction", "hold_out_end", "shard_bytes", "seed", "exclude", "dataset", "palette", "field"),
    *("extension", "split"),  # of `index`
)
_SETTINGS = {"suffixes": "--suffix", **{name: f"--{name.replace('_', '-')}" for name in _NAMES}}  # and their options
_OPTIONS = [(name, option) for name, kind in MODALITIES.items() for option in kind.build_options]
# Only for files; a dataset has its own. Absent options are parsed as None, so that a useless one can be refused.
_OF_FILES = ("modality", "field", "exclude", "validation_fraction", "hold_out_end", "seed")


@contextmanager
def rename_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the name of a setting in a DataError by its path in the configuration, or by its option."""
    try:
        yield
    except DataError as error:
        name, _, message = str(error).partition("=")
        if name in names:
            raise DataError(f"{names[name]}={message}") from None
        raise


def run_build(arguments: argparse.Namespace) -> int:
    """Run `data build` on every rank of an MPI job; rank 0 prints for all.

    Raises:
        DataError: the processes of a launcher do not find each other.
        KeyboardInterrupt: its message has the folder of the finished shards, if there are any.
    """
    crew = join_crew()
    try:
        with rename_settings(_SETTINGS):
            manifest = _build(arguments, crew)
    except (DataError, OSError) as error:
        if mistake(error) is None:
            raise
        code = report(error) if crew.is_first else exit_codes.WRONG_INPUT
        crew.meet()  # the launcher ends all ranks after the first failure: rank 0 must have reported before
        return code
    except KeyboardInterrupt:
        folder = unfinished_folder(Path(arguments.output))
        if folder is None:
            raise
        raise KeyboardInterrupt(
            f"finished shards are kept in {folder}: the same command continues from there"
        ) from None
    if crew.is_first:
        print(f"{arguments.output}: {_summary(manifest)}", file=sys.stderr)
        fraction = manifest.made["settings"].get("validation_fraction")
        if fraction and not arguments.hold_out_end and manifest.modality != "image":
            sizes = {name: split.content_bytes for name, split in manifest.splits.items()}
            share = sizes["validation"] / sum(sizes.values())
            if not fraction / 2 <= share <= fraction * 2:
                what = "files" if arguments.field is None else "records"
                rule = f"held out as whole {what}; --hold-out-end holds out the last {fraction:.1%} of the bytes"
                say(f"notice: validation has {share:.1%} of the bytes, {rule}")
    return 0


def _build(arguments: argparse.Namespace, crew: Crew) -> DataManifest:
    _check_source(arguments)
    for path in arguments.inputs:
        _check_on_this_machine("PATH", path, "a file or folder on this machine, such as texts; fetch it first")
    if arguments.input is not None:
        rule = "a file or folder on this machine, such as downloads; use --download to fetch missing files"
        _check_on_this_machine("--input", arguments.input, rule)
    rule = "a folder on this machine, such as data/mine; build, then upload"
    _check_on_this_machine("--output", arguments.output, rule)
    values = {name: getattr(arguments, name) for name in (*_OF_FILES, "palette", "shard_bytes")}
    settings = {name: value for name, value in values.items() if value is not None}
    if (location := arguments.palette_from) is not None:
        settings["palette"] = DataFolder(location).palette if location else None
        if settings["palette"] is None:
            rule = "must be a data folder with a palette, such as one from `longstride data build --palette 512`"
            raise DataError(f"--palette-from={location}: {rule}")
    settings |= {"labels": True} if arguments.labels else {}
    with closing(counting.WorkCounter("building", 0, "bytes", shown=crew.is_first)) as counter:
        if arguments.dataset is not None:
            return build_dataset(
                arguments.dataset,
                None if arguments.input is None else Path(arguments.input),
                Path(arguments.output),
                unpublished=arguments.unpublished,
                download=arguments.download,
                progress=counter.at,
                crew=crew,
                **settings,
            )
        arguments.modality = arguments.modality or "text"
        properties = _raw(arguments)
        for modality, option in _OPTIONS:
            value = getattr(arguments, option.attribute)
            if value is None:
                continue
            if modality != arguments.modality:
                rule = f"only applies to --modality {modality}, and this is {arguments.modality}"
                raise DataError(f"{option.name}={value}: {rule}")
            properties |= MODALITIES[modality].parse_build_option(option, value)
        return build(
            list(map(Path, arguments.inputs)),
            Path(arguments.output),
            properties=properties,
            suffixes=[] if arguments.all_files else arguments.suffix,
            progress=counter.at,
            found=partial(_print_left_out, arguments),
            crew=crew,
            **settings,
        )


def _print_left_out(arguments: argparse.Namespace, left_out: LeftOut) -> None:
    """Print a line about links, and one about skipped files by suffix, with the options that would include them."""
    if left_out.followed:
        places = [f"{count:,} in {_UNPRINTABLE.sub('?', place)}" for place, count in left_out.followed.most_common(3)]
        hidden = len(left_out.followed) - len(places)
        places[-1] += f", and {hidden} folders" if hidden else ""
        say(f"followed {left_out.followed.total():,} links to files: {', '.join(places)}")
    if left_out.links:
        counts = [f"{count:,} to {what}" for what, count in left_out.links.items()]
        folders = "; name a folder itself to take what it holds" if FOLDERS in left_out.links else ""
        say(f"left out {left_out.links.total():,} links: {', '.join(counts)}{folders}")
    endings = left_out.endings
    if arguments.labels:
        del endings[f".{LABEL_EXTENSION}"]  # they are read
    if not endings:
        return
    order = sorted((ending for ending in endings if ending), key=lambda ending: (-endings[ending], ending))
    common = [(ending, endings[ending]) for ending in order[:_SHOWN_SUFFIXES]]
    counts = [f"{count:,} {_UNPRINTABLE.sub('?', ending)}" for ending, count in common]
    remaining = endings.total() - sum(count for _, count in common)
    counts += [f"{remaining:,} other{'s' if remaining > 1 else ''}"] if remaining else []
    modalities = []
    for name, kind in MODALITIES.items():
        num_files = sum(count for ending, count in endings.items() if ending in kind.suffixes)
        if num_files and name != arguments.modality:
            modalities.append(f"--modality {name} takes {kind.words} ({num_files:,})")
    raw = " --raw" if modalities and arguments.modality == "text" and not arguments.raw else ""  # they are no texts
    advice = [*([] if arguments.suffix else [f"--all-files{raw} takes them"]), *modalities]
    if arguments.field is None and arguments.modality == "text" and endings.keys() & set(RECORD_SUFFIXES):
        advice.append("--field NAME takes the records of JSON Lines and Parquet")
    line = f"left out {endings.total():,} of {left_out.looked_at:,} files: {', '.join(counts)}"
    say("; ".join([line, *([", ".join(advice)] if advice else [])]))


def _check_source(arguments: argparse.Namespace) -> None:
    """Raise DataError unless the source is either files or a dataset, or for an option that only the other one has."""
    if arguments.dataset is None:
        for name in ("input", "download", "unpublished"):
            if getattr(arguments, name):
                raise DataError(f"--{name}: only applies with --dataset; name one of {', '.join(sorted(DATASETS))}")
        if not arguments.inputs:
            raise DataError("PATH: missing; name files or folders, such as texts, or a --dataset")
        if arguments.all_files and arguments.suffix is not None:
            rule = "--all-files takes files of any name; leave one of them out"
            raise DataError(f"--suffix={arguments.suffix[0]}: {rule}")
        return
    if arguments.inputs:
        rule = "cannot be combined with --dataset; name the dataset's archive or folder with --input"
        raise DataError(f"PATH={arguments.inputs[0]}: {rule}")
    for name in (*_OF_FILES, "raw", "suffix", "all_files", *(option.attribute for _, option in _OPTIONS)):
        value = getattr(arguments, name)
        if value is not None:
            shown = "" if value is True else f"={value[0] if isinstance(value, list) else value}"
            option = f"--{name.replace('_', '-')}{shown}"
            raise DataError(f"{option}: cannot be combined with --dataset, which has its own; leave it out")


def _check_on_this_machine(option: str, value: str, rule: str) -> None:
    if not value or "://" in value:
        raise DataError(f"{option}={value!r}: must be {rule}")


def run_index(arguments: argparse.Namespace) -> int:
    """Run `data index`.

    Raises:
        DataError: tars cannot be read as they are, or the output exists.
    """
    _check_on_this_machine("--output", arguments.output, "a folder on this machine, such as data/mine; then upload it")

    def print_splits(by_split: Mapping[str, Sequence[str]]) -> None:
        for name, tars in by_split.items():
            last = f" to {tars[-1]}" if len(tars) > 1 else ""
            shown = _UNPRINTABLE.sub("?", f"{tars[0]}{last}")
            say(f"{name}: {len(tars):,} tar{'s' if last else ''}, {shown}")

    with rename_settings(_SETTINGS), closing(counting.WorkCounter("indexing", 0, "bytes")) as counter:
        manifest = index_tars(
            arguments.places,
            Path(arguments.output),
            modality=arguments.modality,
            extension=arguments.extension,
            splits=arguments.split or (),
            validation_fraction=arguments.validation_fraction,
            complete=arguments.complete,
            unpack=arguments.unpack,
            labels=arguments.labels,
            properties=_raw(arguments),
            progress=counter.at,
            dealt=print_splits,
        )
    print(f"{arguments.output}: {_summary(manifest)}", file=sys.stderr)
    return 0


def _raw(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the property of --raw; raise DataError unless the documents are texts."""
    if arguments.raw and arguments.modality != "text":
        raise DataError(f"--raw: only applies to --modality text, and this is {arguments.modality}")
    return {"raw": 1} if arguments.raw else {}


def run_verify(arguments: argparse.Namespace) -> int:
    """Run `data verify`: print a line for each damage; the exit code is 1 if there is any.

    Raises:
        DataError: there is no data folder.
    """
    check_location(arguments.location)
    with closing(counting.WorkCounter("verifying", 0, "bytes")) as counter:
        findings = verify(arguments.location, counter.at)
    for finding in findings:
        print(finding)
    if not findings:
        location = open_store(arguments.location).location  # without the secrets of a URL
        print(f"{location}: whole", file=sys.stderr)
    return 1 if findings else 0


def check_location(location: str) -> None:
    """Raise DataError for an empty name, which would mean the working directory."""
    if not location:
        raise DataError("DIR|URL='': must be a data folder, such as data/mine")


def _summary(manifest: DataManifest) -> str:
    """Summarise the splits of a data folder, and what was left out."""
    summary = ", ".join(
        f"{name} {split.content_bytes:,} bytes of {split.documents:,} document{'' if split.documents == 1 else 's'}"
        for name, split in manifest.splits.items()
    )
    left_out = [f"{count:,} {what.replace('_', ' ')}" for what, count in manifest.made["left_out"].items() if count]
    summary += "" if manifest.labels is None else ", with classes"
    summary += f"; left out {', '.join(left_out)}" if left_out else ""
    begins = manifest.made.get("validation_begins")
    return f"{summary}; validation begins in {begins['source']}, at byte {begins['byte']:,}" if begins else summary
