"""`longstride data build|index|verify`: shards from files, an index of others' tars, a check of both."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from longstride.data_pipelines.building import Crew, build, build_dataset, join_crew, kept_folder
from longstride.data_pipelines.datasets import DATASETS
from longstride.data_pipelines.documents import FOLDERS, LeftOut
from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES
from longstride.data_pipelines.palette import Palette
from longstride.data_pipelines.records import SUFFIXES as RECORD_SUFFIXES
from longstride.data_pipelines.shards import DataFolder, DataManifest, index_tars, verify
from longstride.data_pipelines.stores import open_store
from longstride.launcher.output import counting, exit_codes, mistake, report, say

_SHOWN_SUFFIXES = 4  # of files that are left out
_UNPRINTED = re.compile(r"[^ -~]")
_SETTINGS = {  # of `build` and `index`, and their options
    "validation_fraction": "--validation-fraction",
    "hold_out_end": "--hold-out-end",
    "shard_bytes": "--shard-bytes",
    "seed": "--seed",
    "exclude": "--exclude",
    "suffixes": "--suffix",
    "dataset": "--dataset",
    "palette": "--palette",
    "field": "--field",
    "extension": "--extension",  # of `index`
    "split": "--split",
}
_OPTIONS = [(name, option) for name, kind in MODALITIES.items() for option in kind.build_options]  # of one alone
# Of files alone: a dataset has its own. Parsed as None where they are not given: an option in vain is refused.
_DEFAULTS: dict[str, Any] = {
    "modality": "text",
    "suffix": None,
    "all_files": None,
    "exclude": [],
    "validation_fraction": 0.05,
    "hold_out_end": None,
    "seed": 0,
}


def run_build(arguments: argparse.Namespace) -> int:
    """Runs `data build`, on every rank of an MPI job; the first one speaks for all.

    Raises:
        DataError: the processes of a launcher do not find each other.
        KeyboardInterrupt: with where the finished shards are kept, if there are any.
    """
    crew = join_crew()
    try:
        manifest = _build(arguments, crew)
    except (DataError, OSError) as error:
        if mistake(error) is None:
            raise
        code = report(_by_option(error)) if crew.is_first else exit_codes.WRONG_INPUT
        crew.meet()  # the launcher ends all ranks once one has failed: not before it is told why
        return code
    except KeyboardInterrupt:
        kept = kept_folder(Path(arguments.output))
        if kept is None:
            raise
        raise KeyboardInterrupt(f"what is finished is kept in {kept}: the same command goes on from there") from None
    if crew.is_first:
        print(f"{arguments.output}: {_summary(manifest)}", file=sys.stderr)
        _tell_share(arguments, manifest)
    return 0


def _build(arguments: argparse.Namespace, crew: Crew) -> DataManifest:
    _check_kind(arguments)
    for given in arguments.inputs:
        _check_on_this_machine("PATH", given, "a file or folder on this machine, such as texts; fetch it first")
    if arguments.input is not None:
        rule = "a file or folder on this machine, such as downloads; let --download fetch what is not here"
        _check_on_this_machine("--input", arguments.input, rule)
    rule = "a folder on this machine, such as data/mine; build, then upload"
    _check_on_this_machine("--output", arguments.output, rule)
    sizes: dict[str, Any] = {} if arguments.shard_bytes is None else {"shard_bytes": arguments.shard_bytes}
    sizes["palette"] = arguments.palette if arguments.palette_from is None else _palette_of(arguments.palette_from)
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
                **sizes,
            )
        return build(
            [Path(given) for given in arguments.inputs],
            Path(arguments.output),
            modality=arguments.modality,
            properties=asked_properties(arguments),
            field=arguments.field,
            suffixes=[] if arguments.all_files else arguments.suffix,
            exclude=arguments.exclude,
            validation_fraction=arguments.validation_fraction,
            hold_out_end=bool(arguments.hold_out_end),
            seed=arguments.seed,
            progress=counter.at,
            found=partial(_tell_left_out, arguments),
            crew=crew,
            **sizes,
        )


def _tell_left_out(arguments: argparse.Namespace, left_out: LeftOut) -> None:
    """A line each about links, and about files that were not asked for, by suffix, and how they would be taken."""
    if left_out.followed:
        places = [f"{count:,} in {_UNPRINTED.sub('?', place)}" for place, count in left_out.followed.most_common(3)]
        more = "" if len(left_out.followed) <= len(places) else f", and {len(left_out.followed) - len(places)} folders"
        say(f"followed {left_out.followed.total():,} links to files: {', '.join(places)}{more}")
    if left_out.links:
        counts = [f"{count:,} to {what}" for what, count in left_out.links.items()]
        folders = "; name a folder itself to take what it holds" if FOLDERS in left_out.links else ""
        say(f"left out {left_out.links.total():,} links: {', '.join(counts)}{folders}")
    endings = left_out.endings
    if not endings:
        return
    order = sorted((ending for ending in endings if ending), key=lambda ending: (-endings[ending], ending))
    common = [(ending, endings[ending]) for ending in order[:_SHOWN_SUFFIXES]]
    counts = [f"{count:,} {_UNPRINTED.sub('?', ending)}" for ending, count in common]
    rest = endings.total() - sum(count for _, count in common)
    counts += [f"{rest:,} other{'s' if rest > 1 else ''}"] if rest else []
    others = []
    for name, kind in MODALITIES.items():
        those = sum(count for ending, count in endings.items() if ending in kind.suffixes)
        if those and name != arguments.modality:
            others.append(f"--modality {name} takes {kind.words} ({those:,})")
    raw = " --raw" if others and arguments.modality == "text" and not arguments.raw else ""  # else they are refused
    advice = [*([] if arguments.suffix else [f"--all-files{raw} takes them"]), *others]
    if arguments.field is None and arguments.modality == "text" and endings.keys() & set(RECORD_SUFFIXES):
        advice.append("--field NAME takes the records of JSON Lines and Parquet")
    told = f"left out {endings.total():,} of {left_out.looked_at:,} files: {', '.join(counts)}"
    say("; ".join([told, *([", ".join(advice)] if advice else [])]))


def _tell_share(arguments: argparse.Namespace, manifest: DataManifest) -> None:
    """A line where whole documents in the validation split are far from its share of the bytes."""
    fraction = arguments.validation_fraction
    if not fraction or arguments.hold_out_end or arguments.modality == "image":
        return
    sizes = {name: split.content_bytes for name, split in manifest.splits.items()}
    share = sizes["validation"] / sum(sizes.values())
    if not fraction / 2 <= share <= fraction * 2:
        what = "files" if arguments.field is None else "records"
        rule = f"held out as whole {what}; --hold-out-end holds out the last {fraction:.1%} of the bytes"
        say(f"notice: validation has {share:.1%} of the bytes, {rule}")


def _check_kind(arguments: argparse.Namespace) -> None:
    """Files or a dataset: fills in what files have where it was not given.

    Raises DataError for neither, for both, and for an option that belongs to the other one.
    """
    if arguments.dataset is None:
        for name in ("input", "download", "unpublished"):
            if getattr(arguments, name):
                raise DataError(f"--{name}: goes with --dataset; name one of {', '.join(sorted(DATASETS))}")
        if not arguments.inputs:
            raise DataError("PATH: none given; name files or folders, such as texts, or a --dataset")
        for name, default in _DEFAULTS.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, default)
        if arguments.all_files and arguments.suffix is not None:
            raise DataError(
                f"--suffix={arguments.suffix[0]}: --all-files takes files of any name; leave one of them out"
            )
        return
    if arguments.inputs:
        rule = "goes without --dataset; name the dataset's archive or folder by --input"
        raise DataError(f"PATH={arguments.inputs[0]}: {rule}")
    for name in (*_DEFAULTS, "field", "raw", *(option.attribute for _, option in _OPTIONS)):
        value = getattr(arguments, name)
        if value is not None:
            shown = "" if value is True else f"={value[0] if isinstance(value, list) else value}"
            option = f"--{name.replace('_', '-')}{shown}"
            raise DataError(f"{option}: goes without --dataset, which has its own; leave it out")


def _palette_of(location: str) -> Palette:
    """The palette of a data folder; DataError where it has none."""
    palette = DataFolder(location).palette if location else None
    if palette is None:
        rule = "must be a data folder that has a palette, as `longstride data build --palette 512` makes it"
        raise DataError(f"--palette-from={location}: {rule}")
    return palette


def _check_on_this_machine(option: str, value: str, rule: str) -> None:
    if not value or "://" in value:
        raise DataError(f"{option}={value!r}: must be {rule}")


def _by_option(error: DataError | OSError) -> Exception:
    """The error with the option that the user wrote in place of the setting's name."""
    setting, equals, rest = str(error).partition("=")
    return DataError(f"{_SETTINGS[setting]}={rest}") if equals and setting in _SETTINGS else error


def run_index(arguments: argparse.Namespace) -> int:
    """Runs `data index`.

    Raises:
        DataError: what cannot be read as it lies, or an output that is taken.
    """
    _check_on_this_machine("--output", arguments.output, "a folder on this machine, such as data/mine; then upload it")
    try:
        with closing(counting.WorkCounter("indexing", 0, "bytes")) as counter:
            manifest = index_tars(
                arguments.places,
                Path(arguments.output),
                modality=arguments.modality,
                extension=arguments.extension,
                splits=arguments.split or (),
                validation_fraction=arguments.validation_fraction,
                complete=arguments.complete,
                unpack=arguments.unpack,
                properties=_raw(arguments),
                progress=counter.at,
                dealt=_tell_splits,
            )
    except DataError as error:
        raise _by_option(error) from error
    print(f"{arguments.output}: {_summary(manifest)}", file=sys.stderr)
    return 0


def _tell_splits(by_split: Mapping[str, Sequence[str]]) -> None:
    """Print a line for each split: how many tars belong to it, and which."""
    for name, tars in by_split.items():
        last = f" to {tars[-1]}" if len(tars) > 1 else ""
        shown = _UNPRINTED.sub("?", f"{tars[0]}{last}")
        say(f"{name}: {len(tars):,} tar{'s' if last else ''}, {shown}")


def asked_properties(arguments: argparse.Namespace) -> dict[str, int]:
    """What the options of one modality ask of all documents.

    Raises:
        DataError: an option of another modality, or a value that cannot be read.
    """
    properties = _raw(arguments)
    for modality, option in _OPTIONS:
        value = getattr(arguments, option.attribute)
        if value is None:
            continue
        if modality != arguments.modality:
            rule = f"goes with --modality {modality}, and this is {arguments.modality}"
            raise DataError(f"{option.name}={value}: {rule}")
        properties |= MODALITIES[modality].parse_build_option(option, value)
    return properties


def _raw(arguments: argparse.Namespace) -> dict[str, int]:
    """What --raw asks of all documents; DataError where they are no texts."""
    if arguments.raw and arguments.modality != "text":
        raise DataError(f"--raw: goes with --modality text, and this is {arguments.modality}")
    return {"raw": 1} if arguments.raw else {}


def run_verify(arguments: argparse.Namespace) -> int:
    """Runs `data verify`: exit code 1 where damage is found, a line for each.

    Raises:
        DataError: there is no data folder.
    """
    check_location(arguments.location)
    with closing(counting.WorkCounter("verifying", 0, "bytes")) as counter:
        findings = verify(arguments.location, counter.at)
    for finding in findings:
        print(finding)
    if not findings:
        location = open_store(arguments.location).location  # which hides the secrets in a URL
        print(f"{location}: whole", file=sys.stderr)
    return 1 if findings else 0


def check_location(location: str) -> None:
    """Raises DataError for an empty name, which would be the folder that a person is in."""
    if not location:
        raise DataError("DIR|URL='': must be a data folder, such as data/mine")


def _summary(manifest: DataManifest) -> str:
    """What was made, and what was left out of it."""
    made = ", ".join(
        f"{name} {split.content_bytes:,} bytes of {split.documents:,} document{'' if split.documents == 1 else 's'}"
        for name, split in manifest.splits.items()
    )
    left_out = [f"{count:,} {what.replace('_', ' ')}" for what, count in manifest.made["left_out"].items() if count]
    made += f"; left out {', '.join(left_out)}" if left_out else ""
    begins = manifest.made.get("validation_begins")
    return f"{made}; validation begins in {begins['source']}, at byte {begins['byte']:,}" if begins else made
