"""Sound: a file is a document, and each of its frames a byte of 8-bit mu-law (ITU-T G.711) in one channel.

Channels are mixed by their mean. A member is a WAV file of format 7, which players open. The content are the bytes of
G.711, with inverted bits as in the standard, so silence is 0xFF and 0x7F. For other readers a member may be a WAV file
of 16-bit PCM, which gives the same bytes. WAV files of the set's rate are converted in integers, to the same bytes on
every machine. Other sounds depend on libsndfile, which decodes, and on libsoxr, which resamples. Both are only imported
when they are used.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.formats import StreamContent
from longstride.data_pipelines.modalities.decoder import DecodedFormat, decode, probe_format
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
_MAX_RATIO = 256  # largest ratio of two rates: the resampler's filters grow with it
_MOST_RATE = 2**31 - 1  # Hz: a WAV header has room for twice as many bytes per second
_BLOCK_BYTES = 2**22  # read at once: frames may have 65,535 channels
_PCM_BITS = 16  # of PCM members: the precision of mu-law
_QUALITY = "VHQ"  # of the resampler: its noise, at 28 bits, is far below a step of mu-law

Form = WavFormat | DecodedFormat


class Audio(Modality):
    """Sounds of one rate, in Hz. The property ``resampled`` is 1 if others are resampled to it; else it is absent."""

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

    def settle(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        """Choose the requested rate, else the first file's. Raises DataError for one that is not possible."""
        members = {name: requested[name] for name in self.may_ask if name in requested}
        if "rate" in requested:
            properties = {"rate": requested["rate"], "resampled": 1, **members}
        else:
            properties = {"rate": _form(path, file).rate, **members}
        self.check_properties(properties)
        return properties

    def settle_member(self, path: Path, file: BinaryIO, requested: Properties) -> dict[str, int]:
        form = _form(path, file)
        is_pcm = isinstance(form, WavFormat) and form.tag == PCM
        return {"rate": form.rate, **({"pcm_bits": _PCM_BITS} if is_pcm else {})}

    def check_properties(self, properties: Properties) -> None:
        rate, bits = properties.get("rate", 0), properties.get("pcm_bits", _PCM_BITS)
        if not 1 <= rate <= _MOST_RATE:
            raise DataError(f"rate={rate}: must be from 1 to 2**31 - 1 Hz; such as 12000")
        if bits != _PCM_BITS:
            raise DataError(f"pcm_bits={bits}: must be {_PCM_BITS}, or left out for mu-law")

    def measure(self, path: Path, properties: Properties) -> int:
        """Return the number of frames at the set's rate, from the header."""
        with open_plain(path) as file:
            form = _form_of_set(path, file, properties)
        return frames_at(path, form, properties["rate"])

    def open(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Return a byte per frame. A WAV file of the set's rate is read at any offset, other sounds as a stream."""
        form = _form_of_set(path, file, properties)
        if isinstance(form, WavFormat) and form.rate == properties["rate"]:
            return _WavContent(file, form)
        return _StreamedContent(path, file, form, properties["rate"])

    def header(self, size: int, properties: Properties) -> bytes:
        """Return the header of a mono WAV file of format 7 or 1, without RIFF's padding byte, as players allow."""
        rate, width = properties["rate"], self.stored_bytes(properties)
        if width == 1:
            form = struct.pack("<4sIHHIIHHH", b"fmt ", 18, MULAW, 1, rate, rate, 1, 8, 0)
            form += struct.pack("<4sII", b"fact", 4, size)
        else:
            form = struct.pack("<4sIHHIIHH", b"fmt ", 16, PCM, 1, rate, width * rate, width, 8 * width)
        chunks = b"WAVE" + form + struct.pack("<4sI", b"data", width * size)
        return struct.pack("<4sI", b"RIFF", len(chunks) + width * size) + chunks

    def stored_bytes(self, properties: Properties) -> int:
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
        """Parse a rate in Hz, or the encoding of members."""
        if option.attribute == "wav":
            if value not in ("mulaw", "pcm"):
                raise DataError(f"--wav={value}: must be mulaw or pcm; pcm is for readers without mu-law")
            return {"pcm_bits": _PCM_BITS} if value == "pcm" else {}
        rate = whole_number(value)
        if rate is None:
            raise DataError(f"--rate={value}: must be in Hz; such as 12000")
        return {"rate": rate}

    def model_properties(self, fields: Mapping[str, Any], context: int) -> dict[str, int]:
        rate = fields.get("rate")
        return {"rate": rate} if type(rate) is int and rate > 0 else {}

    def bytes_in(self, seconds: float, option: str, properties: Properties) -> int:
        """Convert seconds to bytes: one per frame, and at least one."""
        if not (isfinite(seconds) and seconds > 0):
            raise DataError(f"{option}={seconds:g}: must be above 0, in seconds")
        return max(1, round(seconds * properties["rate"]))

    def open_sample(self, path: Path, file: BinaryIO, properties: Properties) -> Content:
        """Return a sound of any rate, resampled to the model's."""
        return self.open(path, file, {"rate": properties["rate"], "resampled": 1})

    def read_prompt(self, content: Content, keep: Any, properties: Properties, context: int) -> bytes:
        """Read so many seconds; by default half a context, or all of a shorter sound."""
        if keep is None:
            return content.read(0, context // 2)
        size = self.bytes_in(keep, "--keep-seconds", properties)
        prompt = content.read(0, size)
        if len(prompt) < size:
            seconds = f"{len(prompt) / properties['rate']:.6g}"
            raise DataError(f"--keep-seconds={keep:g}: the sound has {seconds} seconds; name at most that")
        return prompt

    def shown(self, content: np.ndarray, properties: Properties) -> np.ndarray:
        """Convert each frame to a number from -1 to 1."""
        return mulaw_decode(content) / 2**15


@dataclass(frozen=True, slots=True)
class _WavContent:
    """The content of a WAV file of the set's rate. It holds no more than a block in memory."""

    file: BinaryIO
    form: WavFormat

    def read(self, offset: int, size: int) -> bytes:
        """Convert ``size`` frames from frame ``offset`` on, one byte each."""
        form = self.form
        blocks = []
        for block in _wav_blocks(self.file, form, offset, min(offset + size, form.frames)):
            if form.tag == MULAW and form.channels == 1:
                blocks.append(block)  # unchanged, both zeros included
            else:
                blocks.append(mulaw_encode(mix(*form.samples(block))).tobytes())
        return b"".join(blocks)


class _StreamedContent:
    """The content of a sound that is decoded or resampled, as a stream of blocks; ``file`` must stay open.

    The blocks do not depend on what is read, and the decoder never seeks. So the bytes of a sound are the same for any
    sequence of reads, although MP3 and Opus decoders and the resampler's filter depend on what was before.
    """

    def __init__(self, path: Path, file: BinaryIO, form: Form, rate: int) -> None:
        self._path, self._file, self._form, self._rate = path, file, form, rate
        self._frames = frames_at(path, form, rate)
        self._stream = StreamContent(self._mulaw_blocks)

    def read(self, offset: int, size: int) -> bytes:
        """Read a part, see ``Content``. Raises DataError for a sound that is damaged, or shorter than it states."""
        end = min(offset + size, self._frames)
        if offset >= end:
            return b""
        content = self._stream.read(offset, end - offset)
        if self._stream.position < end:
            sizes = f"says {self._frames} frames (at {self._rate} Hz) and holds {self._stream.position}"
            raise DataError(f"{self._path}: {sizes}: it is cut short; fetch it again or exclude it")
        return content

    def _mulaw_blocks(self) -> Iterator[bytes]:
        if self._form.rate == self._rate:
            for samples, width in self._samples():
                yield mulaw_encode(mix(samples, width)).tobytes()
            return
        # Mixed without rounding: sums of a few integers of at most 32 bits are exact in floating point.
        mono = (samples.sum(axis=1) / (samples.shape[1] << 8 * width - 1) for samples, width in self._samples())
        for block in resample(mono, self._form.rate, self._rate):
            rounded = np.clip(np.rint(block * 2**15), -(2**15), 2**15 - 1)
            yield mulaw_encode(rounded.astype(np.int16)).tobytes()

    def _samples(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield blocks of samples, (frames, channels) int64, with their width in bytes."""
        form = self._form
        if isinstance(form, WavFormat):
            yield from map(form.samples, _wav_blocks(self._file, form, 0, form.frames))
            return
        for samples in decode(self._path, self._file, BLOCK_FRAMES):
            yield samples, 4


def _wav_blocks(file: BinaryIO, form: WavFormat, first: int, end: int) -> Iterator[bytes]:
    """Read frames ``[first, end)`` of a WAV file in blocks."""
    file.seek(form.offset + first * form.frame_bytes)
    step = min(BLOCK_FRAMES, max(1, _BLOCK_BYTES // form.frame_bytes))
    for start in range(first, end, step):
        yield file.read(min(step, end - start) * form.frame_bytes)


def _form(path: Path, file: BinaryIO) -> Form:
    """Read the format of an open sound file. Raises DataError if it cannot be read, or its length is unknown."""
    return (read_format(path, file) if is_wav(file) else None) or probe_format(path, file)


def _form_of_set(path: Path, file: BinaryIO, properties: Properties) -> Form:
    form, rate = _form(path, file), properties["rate"]
    if form.rate != rate and not properties.get("resampled"):
        rule = f"has {form.rate} Hz, but the set's first file has {rate}"
        raise DataError(f"{path}: {rule}; resample all files to one rate with --rate {rate}")
    return form


def frames_at(path: Path, form: Form, rate: int) -> int:
    """Return the number of frames at another rate, rounded to the nearest, halves upwards.

    Raises DataError if the rates are too far apart or the resampler is missing, before anything is written.
    """
    if form.rate == rate:
        return form.frames
    if max(form.rate, rate) > _MAX_RATIO * min(form.rate, rate):
        rule = f"has {form.rate} Hz, too far from {rate} to be resampled (at most {_MAX_RATIO} to 1)"
        raise DataError(f"{path}: {rule}; name a rate such as 12000, or exclude the file")
    try:
        import soxr  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"{path}: has {form.rate} Hz, and soxr, which would resample it to {rate}, cannot be imported ({error}); "
            f'pip install "longstride[audio]", or resample it first, such as with `sox IN.wav -r {rate} OUT.wav`'
        ) from error
    return _rounded_frames(form.frames, form.rate, rate)


def resample(blocks: Iterator[np.ndarray], rate: int, new_rate: int) -> Iterator[np.ndarray]:
    """Convert blocks of (n,) float64 to another rate. The result does not depend on the division into blocks.

    It has as many frames as ``frames_at`` computes.
    """
    import soxr

    stream = soxr.ResampleStream(rate, new_rate, 1, dtype="float64", quality=_QUALITY)
    frames = written = 0
    for block in blocks:
        frames += len(block)
        output = stream.resample_chunk(block)
        written += len(output)
        if len(output):
            yield output
    # libsoxr rounds its length in floating point. Silence, which it appends itself, adds at least one frame.
    tail = stream.resample_chunk(np.zeros(-(-rate // new_rate)), last=True)
    yield tail[: _rounded_frames(frames, rate, new_rate) - written]


def _rounded_frames(frames: int, rate: int, new_rate: int) -> int:
    return (2 * frames * new_rate + rate) // (2 * rate)
