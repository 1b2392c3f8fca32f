"""What a modality knows of itself: its files, how a model's samples of it begin, are written and shown, and its words.

Nothing outside this room names a modality. A new one is a subclass of ``Modality`` in a file of its own, and a line in
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

Properties = Mapping[str, int]  # what all documents of a set have in common: height, width, rate ...


class Content(Protocol):
    """The content of one open document."""

    def read(self, offset: int, size: int) -> bytes:
        """Content bytes ``[offset, offset + size)``; fewer where the document has fewer.

        Reading on is cheap, going back may not be. Raises DataError for a document that is damaged.
        """


@dataclass(frozen=True, slots=True)
class FileContent:
    """A document whose file is its content."""

    file: BinaryIO

    def read(self, offset: int, size: int) -> bytes:
        """See ``Content``."""
        end = min(offset + size, self.file.seek(0, 2))  # a file cannot be asked for any number of bytes
        self.file.seek(offset)
        return self.file.read(max(0, end - offset))


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line option that belongs to one modality."""

    name: str  # such as --keep-rows
    metavar: str
    help: str
    type: Callable[[str], Any] = str

    @property
    def attribute(self) -> str:
        """Its name in the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")


class Modality(ABC):
    """How files of one kind become the bytes of a model's contexts, and back.

    A *document* is one file of the input; its *content* is a row of bytes 0..255, which the network is to predict.
    What a modality leaves out is as for plain bytes.
    """

    # Documents and data folders.
    name: str
    extension: str  # of a sample's member in a shard: KEY.extension
    odd_extension: str | None = None  # of one that other programs could not read by that name
    suffixes: tuple[str, ...]  # of the files that a build takes from a folder by default
    asks: tuple[str, ...] = ()  # properties that a build may be asked for
    may_ask: tuple[str, ...] = ()  # likewise, and of no concern to a model
    build_options: tuple[Option, ...] = ()  # of `data build`, which ask for them
    packing: bool = True  # whether documents are laid end to end by default; else each has contexts of its own
    divisible: bool = True  # whether a long document may become several samples
    cut_reach: int = 0  # content bytes: how much earlier than planned a long document may be cut, see ``cut``
    has_palettes: bool = False  # whether content is red, green and blue, which a palette may stand for

    # A model's samples.
    unit: str = "byte"  # what papers call the thing that a byte of content stands for
    sample_bytes: int | None = None  # to sample by default; None: what fits in the context
    prompt_help: str | None = None  # of `sample --prompt-NAME FILE`; None: a prompt is plain bytes
    prompt_files: Literal["+"] | None = None  # "+": several at once, all of one length
    keep_option: Option | None = None  # how much of such a file is the prompt
    output_suffix: str | None = None  # of files of samples; None: any
    one_output: bool = False  # whether all samples go to one file; else each has its own
    shown_as: Literal["text", "picture", "waveform"] = "text"  # what ``shown`` gives

    # Words.
    words: str  # what a model of it writes: "pictures"
    description: str  # of the data, in a model card
    examples: tuple[str, ...]  # commands for a model card
    hub_task: str | None = None  # a model's, by the names that hubs have for tasks

    @abstractmethod
    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The properties of a set by its first document, open as ``file``; ``path`` is for messages.

        Raises DataError for one that cannot be read, and for properties that cannot be had.
        """

    @abstractmethod
    def measure(self, path: Path, properties: Properties) -> int:
        """Content bytes of a document, by its head alone. Raises DataError for one that does not fit the set."""

    @abstractmethod
    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The content of a document, open as ``file`` for as long as it is read; ``path`` is for messages.

        Raises DataError for a document that does not fit the set.
        """

    def check_properties(self, properties: Properties) -> None:  # noqa: B027
        """Raises DataError for whole numbers that cannot be a set's properties, or where one is missing."""

    def document_bytes(self, properties: Properties) -> int | None:
        """Content bytes of every document where all have equally many, else None."""
        return None

    def settle_member(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The properties of a set whose members lie in our form already, by the first; raises as ``settle`` does."""
        return self.settle(path, file, asked)

    def check_head(self, where: str, head: bytes, properties: Properties) -> None:  # noqa: B027
        """Raises DataError, naming ``where``, for a member that begins so and would be something else to a model."""

    def header(self, size: int, properties: Properties) -> bytes:
        """What stands before ``size`` content bytes in a member: of the same length for every size."""
        return b""

    def stored_bytes(self, properties: Properties) -> int:
        """Bytes of a member that stand for one byte of content."""
        return 1

    def stored(self, content: bytes, properties: Properties) -> bytes:
        """n content bytes as a member has them, n · ``stored_bytes``; ``restored`` gives each of them back."""
        return content

    def restored(self, stored: np.ndarray, properties: Properties) -> np.ndarray:
        """(n · ``stored_bytes``,) uint8 of a member -> its content, (n,) uint8."""
        return stored

    def cut(self, content: bytes, place: int) -> int:
        """Where a document is cut that was to be cut before ``content[place]``: there, or up to ``cut_reach`` earlier.

        It follows from the ``cut_reach`` bytes before the place and from the one behind it alone.
        """
        return place

    def member_extension(self, content: bytes) -> str:
        """The extension of a sample with this content: ``extension`` or ``odd_extension``."""
        return self.extension

    def encode(self, tokens: np.ndarray, properties: Properties) -> bytes:
        """(n,) integers 0..255 -> a file that a person opens. Raises DataError for another shape or range."""
        content = token_bytes(tokens)
        return self.header(len(content), properties) + self.stored(content, properties)

    def parse_build_option(self, option: Option, value: str) -> dict[str, int]:
        """The properties that one of ``build_options`` asks for by a value. Raises DataError for one that cannot be."""
        raise NotImplementedError

    def model_properties(self, known: Mapping[str, Any], context: int) -> dict[str, int]:
        """The properties of a model's data, from what an export or its positions tell. Some may be missing.

        Raises DataError where a model of that context cannot write such data; the message follows the file's name.
        """
        return {}

    def bytes_in(self, seconds: float, option: str, properties: Properties) -> int:
        """Content bytes of a number of seconds; ``option`` is for messages. Raises DataError where there are none."""
        raise DataError(f"{option}={seconds:g}: only applies to sound, and the model writes {self.words}; give --bytes")

    def open_sample(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """The content of a file as a model writes it. Raises DataError for one that does not fit the model."""
        return self.open(path, file, properties)

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """The beginning of an open file, which a model continues; ``keep`` is the value of ``keep_option``, or None.

        Raises DataError where the file is shorter.
        """
        return content.read(0, sys.maxsize)

    def check_samples(self, count: int, num_prompts: int, properties: Properties) -> None:  # noqa: B027
        """Raises DataError where a file cannot hold ``count`` samples of each of ``num_prompts`` prompts (0: none)."""

    def sample_files(
        self, samples: np.ndarray, properties: Properties, prompted: Sequence[tuple[bytes, bytes]] = ()
    ) -> list[bytes]:
        """Samples, (S, n) uint8 -> the contents of the output files: one where ``one_output``, else one a sample.

        ``prompted`` has, for each file that was continued, its whole content and its prompt. Each has equally many
        samples, and the samples of one file stand together.
        """
        return [self.encode(sample, properties) for sample in samples]

    def shown(self, content: np.ndarray, properties: Properties) -> np.ndarray:
        """Content (n,) uint8 -> what is drawn of it.

        A picture: (height, width, channels) uint8. A waveform: (n,) from -1 to 1, ``rate`` of them a second.
        A text: its bytes.
        """
        return content


def registered(group: str, kind: type) -> list[Any]:
    """List what installed packages register in a group of entry points, a class by an instance of it.

    Raises:
        DataError: one cannot be imported, or is not of that kind.
    """
    made = []
    for entry in metadata.entry_points(group=group):
        try:
            loaded = entry.load()
            instance = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # whatever the other package raises
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise DataError(
                f"{group}: {entry.value} cannot be imported ({why}); mend or uninstall its package"
            ) from None
        if not isinstance(instance, kind):
            raise DataError(f"{group}: {entry.value} must be a {kind.__name__}; mend or uninstall its package")
        made.append(instance)
    return made


def both_cases(*suffixes: str) -> tuple[str, ...]:
    """Suffixes in small and in capital letters: cameras and recorders write .JPG and .WAV."""
    return (*suffixes, *(suffix.upper() for suffix in suffixes))


def whole_number(text: str) -> int | None:
    """A number from 1 on of at most nine digits, as an option has it; None for anything else."""
    return (int(text) or None) if text.isascii() and text.isdecimal() and len(text) <= 9 else None


def token_bytes(tokens: np.ndarray) -> bytes:
    """(n,) integers 0..255 -> n bytes. Raises DataError for another shape, type or range."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens of shape {tokens.shape} and type {tokens.dtype}: must be one row of integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 255:
        raise DataError(f"tokens from {tokens.min()} to {tokens.max()}: a byte is an integer from 0 to 255")
    return tokens.astype(np.uint8).tobytes()
