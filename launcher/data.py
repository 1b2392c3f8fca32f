"""`longstride data build|verify`: shards from files, and whether a data folder is as it was built."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from data_pipelines import MODALITIES, Manifest, build, check_data_folder, verify


def add_build_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `data build`."""
    parser.add_argument("inputs", nargs="+", type=Path, metavar="PATH", help="files and folders")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="data folder to make")
    parser.add_argument("--modality", choices=sorted(MODALITIES), default="text")
    parser.add_argument("--suffix", action="append", default=None, help="of files to take, such as .py (repeatable)")
    parser.add_argument("--exclude", action="append", default=[], metavar="NAME", help="file or folder (repeatable)")
    parser.add_argument("--validation-fraction", type=float, default=0.05)
    parser.add_argument("--shard-bytes", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0, help="of the split by file")


def run_build(arguments: argparse.Namespace) -> int:
    """Runs `data build`."""
    sizes = {} if arguments.shard_bytes is None else {"shard_bytes": arguments.shard_bytes}
    with tqdm(unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        manifest = build(
            arguments.inputs,
            arguments.output,
            modality=arguments.modality,
            suffixes=arguments.suffix,
            exclude=arguments.exclude,
            validation_fraction=arguments.validation_fraction,
            seed=arguments.seed,
            progress=show,
            **sizes,
        )
    print(f"{arguments.output}: {_summary(manifest)}", file=sys.stderr)
    return 0


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `data verify`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="data folder")


def run_verify(arguments: argparse.Namespace) -> int:
    """Runs `data verify`: exit code 1 where damage is found, a line for each.

    Raises:
        DataError: there is no data folder.
    """
    check_data_folder(arguments.folder)
    findings = verify(arguments.folder)
    for finding in findings:
        print(finding)
    if not findings:
        print(f"{arguments.folder}: whole", file=sys.stderr)
    return 1 if findings else 0


def _summary(manifest: Manifest) -> str:
    return ", ".join(f"{name} {split.payload_bytes:,} bytes" for name, split in manifest.splits.items())
