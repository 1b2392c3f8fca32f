"""`longstride data build|index|verify|show`: from files to shards."""

from __future__ import annotations

import argparse
from functools import partial

from longstride.launcher.verbs.shared import Verb, path, place, register

VERBS: list[Verb] = []
verb = partial(register, VERBS)


@verb(
    "data build",
    "make shards from files",
    "folders.run_build",
    "longstride data build my/texts --output data/mine",
    "longstride data build my/photos --modality image --image-size 32x32 --output data/photos",
)
def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    from longstride.data_pipelines.datasets import DATASETS  # which brings numpy
    from longstride.data_pipelines.modalities import MODALITIES

    suffixes = "; ".join(
        f"of {name} {' '.join(suffix for suffix in kind.suffixes if suffix.islower())}"
        for name, kind in MODALITIES.items()
    )
    add = parser.add_argument
    add("inputs", type=place, nargs="*", default=[], metavar="PATH", help="files and folders to take documents from")
    add("--output", type=place, required=True, metavar="DIR", help="make the data folder here; nothing is written over")
    add("--modality", choices=sorted(MODALITIES), help="what kind of documents the files are (default: text)")
    for kind in MODALITIES.values():
        for option in kind.build_options:
            add(option.name, metavar=option.metavar, help=option.help)
    palette = parser.add_mutually_exclusive_group()
    colours = "make a palette of K colours from the pictures; tokens are then pixels instead of channels"
    palette.add_argument("--palette", type=int, metavar="K", help=colours)
    same = "take the palette of another data folder, to validate on other pictures"
    palette.add_argument("--palette-from", type=place, metavar="DIR|URL", help=same)
    record = "read JSON Lines or Parquet; a document is the text under this name in each line or row"
    add("--field", metavar="NAME", help=record)
    add("--raw", action="store_true", default=None, help="take files of any format byte by byte, as they are")
    suffix = f"take files with this ending from folders, such as .py; repeatable (default: {suffixes})"
    add("--suffix", action="append", metavar=".EXT", help=suffix)
    everything = "take all files of folders, whatever their names end in"
    add("--all-files", action="store_true", default=None, help=everything)
    leave = "leave out files and folders of this name, such as vendor, wherever they lie; repeatable"
    add("--exclude", action="append", metavar="NAME", help=leave)
    share = "put this share of the files, or of the records by --field, into the validation split (default: 0.05)"
    add("--validation-fraction", type=float, metavar="SHARE", help=share)
    end = "hold out the last bytes of the data instead of whole documents; always done for a single document"
    add("--hold-out-end", action="store_true", default=None, help=end)
    size = "begin a new shard after this number of content bytes (default: 16777216)"
    add("--shard-bytes", type=int, default=None, metavar="BYTES", help=size)
    classes = "keep the class of each document: a number in the file NAME.cls beside it, or the dataset's"
    add("--labels", action="store_true", help=classes)
    seed = "split and order the documents by this seed (default: 0)"
    add("--seed", type=int, metavar="N", help=seed)
    published = f"read a published dataset in place of files: {', '.join(sorted(DATASETS))}"
    add("--dataset", metavar="NAME", help=published)
    add("--input", type=place, metavar="PATH", help="original archive or folder of the dataset")
    add("--download", action="store_true", help="download the dataset if it is missing")
    add("--unpublished", action="store_true", help="accept other content than the published one, in the dataset's form")


@verb(
    "data index",
    "train on tars as they are",
    "folders.run_index",
    "longstride data index my/tars --output data/tars",
    "longstride data index my/tars --output data/tars --split validation=val-*.tar",
)
def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    from longstride.data_pipelines.modalities import MODALITIES

    add = parser.add_argument
    tars = "tars: folders that hold them, their names, or patterns"
    add("places", type=place, nargs="+", metavar="DIR|URL|TAR", help=tars)
    folder = "write manifest and indexes here; may be the tars' own folder"
    add("--output", type=place, required=True, metavar="DIR", help=folder)
    kind = "what kind of samples the members are (default: text)"
    add("--modality", choices=sorted(MODALITIES), default="text", help=kind)
    members = "take members with this ending as the content of samples (default: the modality's own)"
    add("--extension", metavar="EXT", help=members)
    split = "put the tars that a pattern names into a split, such as validation=val-*.tar; repeatable"
    add("--split", action="append", metavar="NAME=PATTERN", help=split)
    share = "put this share of the tars into the validation split if --split names none (default: 0.05)"
    add("--validation-fraction", type=float, metavar="SHARE", help=share)
    add("--complete", action="store_true", help="refuse a sample that lacks the member, in place of leaving it out")
    add("--labels", action="store_true", help="keep the class of each sample, a number in its member .cls")
    add("--raw", action="store_true", help="take members of text as they are, compressed ones too")
    add("--unpack", action="store_true", help="copy the tars into DIR, compressed ones as plain ones")


@verb(
    "data verify",
    "check a data folder",
    "folders.run_verify",
    "longstride data verify data/mine",
    "longstride data verify s3://bucket/mine",
)
def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("location", type=place, metavar="DIR|URL", help="data folder to read whole and check")


@verb(
    "data show",
    "a few samples of a data folder",
    "drawing.samples.run",
    "longstride data show data/mine",
    "longstride data show data/photos --split validation --count 25 --output photos.png",
)
def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("location", type=place, metavar="DIR|URL", help="data folder to show samples of")
    add("--split", default="train", metavar="NAME", help="show samples of this split (default: train)")
    add("--count", type=int, metavar="N", help="show so many (default: 3 texts, 16 pictures, 4 sounds)")
    add("--seed", type=int, default=0, metavar="N", help="choose the samples by this seed (default: 0)")
    picture = "PNG to draw them into: pictures and sounds alone, as texts are printed"
    add("--output", type=path, metavar="PNG", help=picture)
