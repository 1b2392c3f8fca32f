"""The interface of a modality: its files, its samples, and its words in messages.

No code outside this package names a modality. A new one is a subclass of ``Modality`` in its own file, and a line in
the registry (``__init__.py``) or an entry point of another package.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from longstride.data_pipelines.errors import DataError

Properties = Mapping[str, int]  # common to all documents of a set: height, width, rate ...


class Content(Protocol):
    """The content of one open document."""

    def read(self, offset: int, size: int) -> bytes:
        """Return content bytes ``[offset, offset + size)``, fewer at the end.

        Sequential reads are cheap; going back may not be. Raises DataError for a damaged document.
        """


@dataclass(frozen=True, slots=True)
class FileContent:
    """A document whose file is its content."""

    file: BinaryIO

    def read(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.file.seek(0, 2))  # a file rejects a read of sys.maxsize bytes
        self.file.seek(offset)
        return self.file.read(max(0, end - offset))


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option of one modality."""

    name: str  # such as --keep-rows
    metavar: str
    help: str
    type: Callable[[str], Any] = str

    @property
    def attribute(self) -> str:
        """The name in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


class Modality(ABC):
    """Converts files of one kind to the bytes of a model's contexts, and back.

    A *document* is one file of the input. Its *content* is a sequence of bytes 0..255, which the network predicts. The
    defaults suit plain bytes.
    """

    # Documents and data folders.
    name: str
    extension: str  # extension of a sample's member in a shard: KEY.extension
    odd_extension: str | None = None  # extension of a member that other programs could not read as ``extension``
    suffixes: tuple[str, ...]  # default suffixes of the files that a build takes from a folder
    asks: tuple[str, ...] = ()  # properties that a build can request
    may_ask: tuple[str, ...] = ()  # further such properties, which do not matter to a model
    build_options: tuple[Option, ...] = ()  # options of `data build` that request properties
    packing: bool = True  # whether documents are concatenated by default; else each has its own contexts
    divisible: bool = True  # whether a long document may become several samples
    cut_reach: int = 0  # content bytes: how much earlier than planned a long document may be cut, see ``cut``
    has_palettes: bool = False  # whether content is red, green and blue, so that a palette applies

    # A model's samples.
    unit: str = "byte"  # the name of a content byte in papers
    sample_bytes: int | None = None  # default size of a sample; None: what fits in the context
    prompt_help: str | None = None  # help of `sample --prompt-NAME FILE`; None: a prompt is plain bytes
    prompt_files: Literal["+"] | None = None  # "+": several at once, all of one length
    keep_option: Option | None = None  # chooses how much of a prompt file is the prompt
    output_suffix: str | None = None  # suffix of files of samples; None: any
    one_output: bool = False  # whether all samples go to one file; else each has its own
    shown_as: Literal["text", "picture", "waveform"] = "text"  # kind of the result of ``shown``

    # Words.
    words: str  # samples of a model in messages: "pictures"
    description: str  # description of the data in a model card
    examples: tuple[str, ...]  # commands for a model card
    hub_task: str | None = None  # name of the task on model hubs

    @abstractmethod
    def settle(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        """Choose the properties of a set by its first document, open as ``file``; ``path`` is for messages.

        Raises DataError for an unreadable document and for requested properties that are not possible.
        """

    @abstractmethod
    def measure(self, path: Path, properties: Properties) -> int:
        """Return the number of content bytes, from the header alone. Raises DataError for an unfit document."""

    @abstractmethod
    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Return the content of a document. ``file`` must stay open; ``path`` is for messages.

        Raises DataError for a document that does not fit the set.
        """

    def check_properties(self, properties: Properties) -> None:  # noqa: B027
        """Raise DataError for integers that cannot be a set's properties, or if one is missing."""

    def document_bytes(self, properties: Properties) -> int | None:
        """Return the number of content bytes of every document if all are equal, else None."""
        return None

    def settle_member(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        """Choose the properties of a set by a member that is already encoded; raises like ``settle``."""
        return self.settle(path, file, requested)

    def check_head(self, where: str, head: bytes, properties: Properties) -> None:  # noqa: B027
        """Raise DataError, naming ``where``, if a member's first bytes show that it is not such content."""

    def header(self, size: int, properties: Properties) -> bytes:
        """Return the bytes before ``size`` content bytes of a member. Their number is the same for every size."""
        return b""

    def stored_bytes(self, properties: Properties) -> int:
        """Return how many bytes of a member encode one byte of content."""
        return 1

    def stored(self, content: bytes, properties: Properties) -> bytes:
        """Encode n content bytes as n · ``stored_bytes`` bytes of a member; ``restored`` inverts this."""
        return content

    def restored(self, stored: np.ndarray, properties: Properties) -> np.ndarray:
        """Decode a member's bytes, (n · ``stored_bytes``,) uint8, to content, (n,) uint8."""
        return stored

    def cut(self, content: bytes, place: int) -> int:
        """Adjust a planned cut before ``content[place]``: return that place, or one up to ``cut_reach`` earlier.

        The result only depends on the ``cut_reach`` bytes before the place and the one after it.
        """
        return place

    def member_extension(self, content: bytes) -> str:
        """Return the extension of a sample with this content: ``extension`` or ``odd_extension``."""
        return self.extension

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """Encode tokens, (n,) integers 0..255, as a file for people. Raises DataError for another shape or range."""
        content = token_bytes(tokens)
        return self.header(len(content), properties) + self.stored(content, properties)

    def parse_build_option(self, option: Option, value: str) -> dict[str, int]:
        """Parse one of ``build_options`` to the properties that it requests. Raises DataError for a bad value."""
        raise NotImplementedError

    def model_properties(self, fields: Mapping[str, Any], context: int) -> dict[str, int]:
        """Select the properties of a model's data from an export's fields or from its positions. Some may be missing.

        Raises DataError if a model of that context cannot write such data; the message follows the file's name.
        """
        return {}

    def bytes_in(self, seconds: float, option: str, properties: Properties) -> int:
        """Convert seconds to content bytes; ``option`` is for messages. Raises DataError if time does not apply."""
        raise DataError(f"{option}={seconds:g}: only applies to sound, but the model writes {self.words}; give --bytes")

    def open_sample(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Return the content of a file in the form of a model's samples. Raises DataError if it does not fit."""
        return self.open(path, file, properties)

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """Read a prompt, the beginning of an open file; ``keep`` is the value of ``keep_option``, or None.

        Raises DataError if the file is shorter.
        """
        return content.read(0, sys.maxsize)

    def check_samples(self, count: int, num_prompts: int, properties: Properties) -> None:  # noqa: B027
        """Raise DataError if a file has no room for ``count`` samples per prompt, or in all without prompts."""

    def sample_files(
        self, samples: np.ndarray, properties: Properties, prompted: Sequence[tuple[bytes, bytes]] = ()
    ) -> list[bytes]:
        """Encode samples, (S, n) uint8, as output files: a single one with ``one_output``, else one per sample.

        ``prompted`` has the full content and the prompt of each file that was continued. Each file has equally many
        samples, which are consecutive.
        """
        return [self.encode(sample, properties) for sample in samples]

    def shown(self, content: np.ndarray, properties: Properties) -> np.ndarray:
        """Convert content, (n,) uint8, for drawing.

        A picture becomes (height, width, channels) uint8, a waveform (n,) numbers from -1 to 1, ``rate`` of them per
        second. A text stays bytes.
        """
        return content


def registered(group: str, kind: type) -> list[Any]:
    """Load the entry points of a group from installed packages; classes are instantiated.

    Raises:
        DataError: one cannot be imported, or is not of that kind.
    """
    instances = []
    for entry in metadata.entry_points(group=group):
        try:
            loaded = entry.load()
            instance = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # the other package may raise anything
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise DataError(f"{group}: {entry.value} cannot be imported ({why}); repair or uninstall it") from None
        if not isinstance(instance, kind):
            raise DataError(f"{group}: {entry.value} must be a {kind.__name__}; repair or uninstall it")
        instances.append(instance)
    return instances


def both_cases(*suffixes: str) -> tuple[str, ...]:
    """Add the suffixes in capital letters: cameras and recorders write .JPG and .WAV."""
    return (*suffixes, *(suffix.upper() for suffix in suffixes))


def whole_number(text: str) -> int | None:
    """Parse a number from 1 on of at most nine digits; None for anything else."""
    return (int(text) or None) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def token_bytes(tokens: np.ndarray) -> bytes:
    """Convert (n,) integers 0..255 to n bytes. Raises DataError for another shape, type or range."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens of shape {tokens.shape} and type {tokens.dtype}: must be one row of integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 255:
        raise DataError(f"tokens from {tokens.min()} to {tokens.max()}: a byte is an integer from 0 to 255")
    return tokens.astype(np.uint8).tobytes()
