"""Pictures and sounds that lie, alone and among honest ones."""

from pathlib import Path

import pytest

from tests.hostile.commands import Commands, Outcome, campaign, sampled
from tests.hostile.generators.files import sparse
from tests.hostile.generators.media import PICTURES, SOUNDS, png, png_chunk, wav

ENDS = {"image": ".png", "audio": ".wav"}
HONEST = {"image": png(4, 4, rows=(b"\0" + bytes(12)) * 4), "audio": wav()}
CASES = {"image": PICTURES, "audio": SOUNDS}
OPTIONS = {"image": ("--image-size", "4x4"), "audio": ("--rate", "8000")}


@pytest.fixture(scope="session")
def honest(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Return the outcome of a build from a valid file of each modality."""
    outcomes = {}
    for modality, content in HONEST.items():
        folder = tmp_path_factory.mktemp(modality)
        (folder / f"a{ENDS[modality]}").write_bytes(content)
        outcomes[modality] = build(commands, folder, modality)
        assert outcomes[modality].code == 0, outcomes[modality].err
    return outcomes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create an empty folder for files."""
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def build(commands: Commands, folder: Path, modality: str, *options: str) -> Outcome:
    words = ("--modality", modality, "--output", folder.parent / f"{folder.name}-built", "--validation-fraction", 0)
    return commands("data", "build", folder, *words, *options)


@pytest.mark.parametrize("is_converted", [False, True], ids=["as it is", "converted"])
@pytest.mark.parametrize(
    ("modality", "what"),
    [case for modality, kinds in CASES.items() for case in sampled([(modality, what) for what in kinds], 7)],
)
def test_file_that_lies(
    commands: Commands,
    honest: dict[str, Outcome],
    tmp_path: Path,
    folder: Path,
    modality: str,
    what: str,
    is_converted: bool,
) -> None:
    (folder / f"a{ENDS[modality]}").write_bytes(CASES[modality][what]())
    outcome = build(commands, folder, modality, *OPTIONS[modality] if is_converted else ())
    outcome.check_refused(honest[modality])
    assert not folder.with_name("files-built").exists()


@pytest.mark.parametrize("modality", ENDS)
def test_file_of_a_sparse_terabyte(commands: Commands, honest: dict[str, Outcome], folder: Path, modality: str) -> None:
    path = folder / f"a{ENDS[modality]}"
    path.write_bytes(HONEST[modality] if modality == "image" else wav(before=b"junk\xff\xff\xff\x7f"))
    sparse(path, 2**40)
    build(commands, folder, modality).check_refused(honest[modality])


@pytest.mark.parametrize("channels", [1024, *campaign([65_535])])
def test_many_channels_are_mixed_in_bounded_memory(
    commands: Commands, honest: dict[str, Outcome], folder: Path, channels: int
) -> None:
    frames = 2**27 // channels
    (folder / "a.wav").write_bytes(wav(channels=channels, data=b"", size=frames * channels))
    sparse(folder / "a.wav", 44 + frames * channels)
    outcome = build(commands, folder, "audio")
    outcome.check_bounded(honest["audio"])
    assert outcome.code == 0 and f"train {frames:,} bytes of 1 document" in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("depth", "colours", "wide"),
    [(8, 6, 4), *campaign([(16, 0, 2), (16, 2, 6)])],
    ids=["RGBA", "grey of 16 bits", "RGB of 16 bits with a key"],
)
def test_largest_picture_is_converted_in_bounded_memory(
    commands: Commands, honest: dict[str, Outcome], folder: Path, depth: int, colours: int, wide: int
) -> None:
    key = [png_chunk(b"tRNS", bytes(6))] if colours == 2 else []
    rows = bytes((8192 * wide + 1) * 8192)
    (folder / "a.png").write_bytes(png(8192, 8192, *key, rows=rows, depth=depth, kind=colours))
    outcome = build(commands, folder, "image", "--image-size", "4x4")
    outcome.check_bounded(honest["image"])
    assert outcome.code == 0, outcome.err
