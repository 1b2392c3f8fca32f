"""Sound: a file is a document, a sample of it a byte of 8-bit mu-law (ITU-T G.711) in one channel.

Channels are mixed by their mean. A member is a WAV file of format 7, which players open: the bytes of the content are
G.711's own, bits inverted as the standard has it, so that silence is 0xFF and 0x7F. Where more readers are to open it,
it is a WAV file of 16-bit PCM instead, whose numbers give the same bytes. For a WAV file of the set's rate
all arithmetic is in integers: the same bytes on every machine. What is decoded (by libsndfile) or resampled (by
libsoxr) is as these libraries have it. Neither is imported before it is used.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities.decoder import DecodedFormat, decoded, decoded_format
from longstride.data_pipelines.modalities.modality import (
    Content,
    Modality,
    Option,
    Properties,
    both_cases,
    whole_number,
)
from longstride.data_pipelines.modalities.wav import (
    MULAW,
    PCM,
    WavFormat,
    is_wav,
    mix,
    mulaw_decode,
    mulaw_encode,
    mulaw_to_pcm,
    read_format,
)
from longstride.data_pipelines.plain_files import open_plain

BLOCK_FRAMES = 2**16  # converted at once
_MAX_RATIO = 256  # of two rates: the filters of the resampler grow with it, and no two rates in use are as far apart
_MOST_RATE = 2**31 - 1  # Hz: twice as many bytes a second fit a WAV file's header
_BLOCK_BYTES = 2**22  # of a file, read at once: frames may have 65,535 channels
_PCM_BITS = 16  # of members that are PCM: what mu-law stands for
_QUALITY = "VHQ"  # of the resampler, with the passband and the noise of 28 bits: far below a step of mu-law

Form = WavFormat | DecodedFormat


class Audio(Modality):
    """Sounds of one rate, in Hz. The property ``resampled`` is 1 where others are brought to it, else there is none."""

    name = "audio"
    extension = "wav"
    suffixes = both_cases(".flac", ".mp3", ".ogg", ".wav")
    asks = ("rate",)
    may_ask = ("pcm_bits",)
    build_options = (
        Option("--rate", "HZ", "bring sounds to this rate, in samples a second (default: all must have one)"),
        Option("--wav", "mulaw|pcm", "write samples as WAV of 8-bit mu-law or 16-bit PCM (default: mulaw)"),
    )
    packing = False
    prompt_help = "sound to continue"
    keep_option = Option(
        "--keep-seconds", "S", "continue the first S seconds of --prompt-audio (default: half a context)", float
    )
    output_suffix = ".wav"
    shown_as = "waveform"
    words = "sounds"
    description = "sound, byte by byte"
    examples = ("longstride sample . --output sample.wav",)

    def settle(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        """The rate that is asked for, else the first file's. Raises DataError for one that cannot be."""
        members = {name: asked[name] for name in self.may_ask if name in asked}
        if members.get("pcm_bits", _PCM_BITS) != _PCM_BITS:
            raise DataError(f"pcm_bits={members['pcm_bits']}: must be {_PCM_BITS}, or left out for mu-law")
        if "rate" not in asked:
            rate = _form(path, file).rate
            if rate > _MOST_RATE:
                raise DataError(f"{path}: has {rate} Hz, and {_MOST_RATE} are the most; name a --rate such as 12000")
            return {"rate": rate, **members}
        if not 1 <= asked["rate"] <= _MOST_RATE:
            raise DataError(f"rate={asked['rate']}: must be from 1 to 2**31 - 1 Hz; such as 12000")
        return {"rate": asked["rate"], "resampled": 1, **members}

    def settle_member(self, path: Path, file: BinaryIO, asked: Properties) -> dict[str, int]:
        form = _form(path, file)
        is_pcm = isinstance(form, WavFormat) and form.tag == PCM
        return {"rate": form.rate, **({"pcm_bits": _PCM_BITS} if is_pcm else {})}

    def check_properties(self, properties: Properties) -> None:
        if not 1 <= properties.get("rate", 0) <= _MOST_RATE:
            raise DataError(f"rate: {properties.get('rate', 'missing')}")
        if properties.get("pcm_bits", _PCM_BITS) != _PCM_BITS:
            raise DataError(f"pcm_bits: {properties['pcm_bits']}")

    def measure(self, path: Path, properties: Properties) -> int:
        """The frames of a file at the set's rate, by its header."""
        with open_plain(path) as file:
            form = _fitting(path, file, properties)
        return frames_at(path, form, properties["rate"])

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """A byte a frame. A WAV file of the set's rate is read anywhere, any other sound from its beginning on."""
        form = _fitting(path, file, properties)
        if isinstance(form, WavFormat) and form.rate == properties["rate"]:
            return _WavContent(file, form)
        return _StreamedContent(path, file, form, properties["rate"])

    def header(self, size: int, properties: Properties) -> bytes:
        """Of a mono WAV file of format 7 or 1. The byte that RIFF wants at an odd end is left out, as players allow."""
        rate, width = properties["rate"], self.stored_bytes(properties)
        if width == 1:
            form = struct.pack("<4sIHHIIHHH", b"fmt ", 18, MULAW, 1, rate, rate, 1, 8, 0)
            form += struct.pack("<4sII", b"fact", 4, size)
        else:
            form = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, rate, width * rate, width, 8 * width)
        chunks = b"WAVE" + form + struct.pack("<4sI", b"data", width * size)
        return struct.pack("<4sI", b"RIFF", len(chunks) + width * size) + chunks

    def stored_bytes(self, properties: Properties) -> int:
        """Two where members are PCM."""
        return properties.get("pcm_bits", 8) // 8

    def stored(self, content: bytes, properties: Properties) -> bytes:
        if self.stored_bytes(properties) == 1:
            return content
        return mulaw_to_pcm(np.frombuffer(content, dtype=np.uint8)).astype("<i2").tobytes()

    def restored(self, stored: np.ndarray, properties: Properties) -> np.ndarray:
        if self.stored_bytes(properties) == 1:
            return stored
        return mulaw_encode(np.frombuffer(stored, dtype="<i2"))

    def parse_build_option(self, option: Option, value: str) -> dict[str, int]:
        """A rate in Hz, or how members are written."""
        if option.attribute == "wav":
            if value not in ("mulaw", "pcm"):
                raise DataError(f"--wav={value}: must be mulaw or pcm; pcm for readers that know no mu-law")
            return {"pcm_bits": _PCM_BITS} if value == "pcm" else {}
        rate = whole_number(value)
        if rate is None:
            raise DataError(f"--rate={value}: must be in Hz; such as 12000")
        return {"rate": rate}

    def model_properties(self, known: Mapping[str, Any], context: int) -> dict[str, int]:
        """The rate, where it is known."""
        rate = known.get("rate")
        return {"rate": rate} if type(rate) is int and rate > 0 else {}

    def bytes_in(self, seconds: float, option: str, properties: Properties) -> int:
        """A byte a frame, and at least one."""
        if not (isfinite(seconds) and seconds > 0):
            raise DataError(f"{option}={seconds:g}: must be above 0, in seconds")
        return max(1, round(seconds * properties["rate"]))

    def open_sample(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """A sound of any rate, resampled to the model's."""
        return self.open(path, file, {"rate": properties["rate"], "resampled": 1})

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """So many seconds; by default half a context, or all of a shorter sound."""
        if keep is None:
            return content.read(0, context // 2)
        wanted = self.bytes_in(keep, "--keep-seconds", properties)
        prompt = content.read(0, wanted)
        if len(prompt) < wanted:
            seconds = f"{len(prompt) / properties['rate']:.6g}"
            raise DataError(f"--keep-seconds={keep:g}: the sound has {seconds} seconds; name no more")
        return prompt

    def shown(self, content: np.ndarray, properties: Properties) -> np.ndarray:
        """A number from -1 to 1 a frame."""
        return mulaw_decode(content) / 2**15


@dataclass(frozen=True, slots=True)
class _WavContent:
    """Of a WAV file of the set's rate. Holds no more than is asked for."""

    file: BinaryIO
    form: WavFormat

    def read(self, offset: int, size: int) -> bytes:
        """A byte for each of ``size`` frames from frame ``offset`` on."""
        form = self.form
        end = min(offset + size, form.frames)
        self.file.seek(form.offset + offset * form.frame_bytes)
        blocks = []
        step = _step(form)
        for start in range(offset, end, step):
            block = self.file.read(min(step, end - start) * form.frame_bytes)
            if form.tag == MULAW and form.channels == 1:
                blocks.append(block)  # not even the two zeros change places
            else:
                blocks.append(mulaw_encode(mix(*form.samples(block))).tobytes())
        return b"".join(blocks)


class _StreamedContent:
    """Of a sound that is decoded or resampled: read from its beginning on, in blocks, so that it is never held whole.

    Where a block begins does not depend on what is asked for, and a decoder is never told to seek. So the bytes of a
    sound are the same in whatever pieces they are asked for: also where a decoder needs what lies before (MP3, Opus),
    and across the seams of the resampler's filter. Reading on continues; going back begins anew.
    """

    def __init__(self, path: Path, file: BinaryIO, form: Form, rate: int) -> None:
        """A byte of mu-law a frame, at ``rate`` frames a second. ``file`` stays open as long as this is read."""
        self._path, self._file, self._form, self._rate = path, file, form, rate
        self._frames = frames_at(path, form, rate)
        self._position = 0  # of the next frame
        self._block = b""  # from there on
        self._blocks = self._mulaw_blocks()

    def read(self, offset: int, size: int) -> bytes:
        """See ``Content``. Raises DataError for a sound that is damaged, or shorter than it says."""
        end = min(offset + size, self._frames)
        if offset >= end:
            return b""
        if offset < self._position:
            self._position, self._block, self._blocks = 0, b"", self._mulaw_blocks()
        pieces = []
        while self._position < end:
            if not self._block:
                self._block = next(self._blocks, b"")
                if not self._block:
                    raise DataError(
                        f"{self._path}: says {self._frames} frames (at {self._rate} Hz) and holds {self._position}: "
                        "it is cut short; fetch it again or exclude it"
                    )
            start = max(offset - self._position, 0)
            taken = min(end - self._position, len(self._block))
            pieces.append(self._block[start:taken])
            self._position += taken
            self._block = self._block[taken:]
        return b"".join(pieces)

    def _mulaw_blocks(self) -> Iterator[bytes]:
        if self._form.rate == self._rate:
            for samples, width in self._samples():
                yield mulaw_encode(mix(samples, width)).tobytes()
            return
        # Mixed, and not rounded before the filter: sums of a few numbers of at most 32 bits are exact.
        mono = (samples.sum(axis=1) / (samples.shape[1] << 8 * width - 1) for samples, width in self._samples())
        for block in resampled(mono, self._form.rate, self._rate):
            rounded = np.clip(np.rint(block * 2**15), -(2**15), 2**15 - 1)
            yield mulaw_encode(rounded.astype(np.int16)).tobytes()

    def _samples(self) -> Iterator[tuple[np.ndarray, int]]:
        """Blocks of (frames, channels) int64, and how many bytes wide the numbers are."""
        form = self._form
        if isinstance(form, WavFormat):
            self._file.seek(form.offset)
            step = _step(form)
            for start in range(0, form.frames, step):
                block = self._file.read(min(step, form.frames - start) * form.frame_bytes)
                yield form.samples(block)
            return
        for samples in decoded(self._path, self._file, BLOCK_FRAMES):
            yield samples, 4


def _step(form: WavFormat) -> int:
    """Frames of a WAV file that are converted at once."""
    return min(BLOCK_FRAMES, max(1, _BLOCK_BYTES // form.frame_bytes))


def _form(path: Path, file: BinaryIO) -> Form:
    """What an open sound file says of itself. Raises DataError where it cannot be read, or its length not be told."""
    return (read_format(path, file) if is_wav(file) else None) or decoded_format(path, file)


def _fitting(path: Path, file: BinaryIO, properties: Properties) -> Form:
    form, rate = _form(path, file), properties["rate"]
    if form.rate != rate and not properties.get("resampled"):
        raise DataError(
            f"{path}: has {form.rate} Hz, and the set's first file {rate}; bring all to one rate with --rate {rate}"
        )
    return form


def frames_at(path: Path, form: Form, rate: int) -> int:
    """Frames of a file when it has so many a second, rounded to the nearest, halves upwards.

    Raises DataError where it cannot be brought to that rate, or where the library for it is missing: before anything is
    written.
    """
    if form.rate == rate:
        return form.frames
    if max(form.rate, rate) > _MAX_RATIO * min(form.rate, rate):
        raise DataError(
            f"{path}: has {form.rate} Hz, too far from {rate} to be resampled (at most {_MAX_RATIO} to 1); name a rate "
            "such as 12000, or exclude the file"
        )
    try:
        import soxr  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{path}: has {form.rate} Hz, and soxr, which would resample it to {rate}, cannot be imported ({error}); "
            f'pip install "longstride[audio]", or resample it first, such as with `sox IN.wav -r {rate} OUT.wav`'
        ) from error
    return _rounded_frames(form.frames, form.rate, rate)


def resampled(blocks: Iterator[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    """Resample blocks of (n,) float64 to another rate; where the blocks are cut changes nothing.

    As many frames come out as ``frames_at`` plans for the frames that went in.
    """
    import soxr

    stream = soxr.ResampleStream(rate, wanted, 1, dtype="float64", quality=_QUALITY)
    frames = made = 0
    for block in blocks:
        frames += len(block)
        output = stream.resample_chunk(block)
        made += len(output)
        if len(output):
            yield output
    # libsoxr rounds its length in floating point. Silence, as it appends itself, makes it one frame longer at least.
    tail = stream.resample_chunk(np.zeros(-(-rate // wanted)), last=True)
    yield tail[: _rounded_frames(frames, rate, wanted) - made]


def _rounded_frames(frames: int, rate: int, wanted: int) -> int:
    return (2 * frames * wanted + rate) // (2 * rate)
