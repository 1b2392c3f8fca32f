"""A modality: DNA from FASTA files, a byte for each base."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.modality import (
    Content,
    FileContent,
    Modality,
    Option,
    Properties,
    both_cases,
    token_bytes,
)

LINE = 60  # bases of a line that is written


class Genome(Modality):
    """`longstride data build genomes --modality genome`: the bases of FASTA files, without headings and line ends."""

    name, words, unit, hub_task = "genome", "genomes", "base", None
    extension, suffixes, output_suffix = "dna", both_cases(".fa", ".fasta"), ".fa"
    description = "DNA, base by base"
    examples = ("longstride sample . --bytes 1000 --output sample.fa",)
    prompt_help = "FASTA file to continue"
    keep_option = Option("--keep-bases", "N", "continue the first N bases of --prompt-genome (default: all)", int)

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """Genomes have no properties in common."""
        return {}

    def measure(self, path: Path, properties: Properties) -> int:
        """Count the bases of a file."""
        with path.open("rb") as file:
            return len(_bases(path, file))

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Give the bases of a file."""
        return FileContent(io.BytesIO(_bases(path, file)))

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """Give the first bases of a file, as many as ``keep_option`` says."""
        return content.read(0, context if keep is None else keep)

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """Write (n,) bases as a FASTA file of one sequence."""
        bases = token_bytes(tokens)
        return b"\n".join([b">sample", *(bases[start : start + LINE] for start in range(0, len(bases), LINE)), b""])


def _bases(path: Path, file: BinaryIO) -> bytes:
    """Read a FASTA file's sequences, end to end, in capital letters; DataError for another file."""
    file.seek(0)
    lines = file.read().splitlines()
    if not lines or not lines[0].startswith(b">"):
        raise DataError(f"{path}: must begin with >, as FASTA files do; leave it out by --exclude")
    return b"".join(line.strip().upper() for line in lines if not line.startswith(b">"))
