"""Damaged and faked checkpoint folders, and what lies around them in a run: what anybody may put there, by name.

Each is done to a run folder in place, whose newest checkpoint is the one that is spoilt.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longstride.launcher.checkpoints.manifest import MANIFEST, add_digest, json_text, read_manifest
from tests.hostile.generators.files import HOSTILE_JSON, NO_FILES, replace, sparse
from tests.hostile.generators.pickles import PICKLES, seal

Damage = Callable[[Path], object]  # of a run folder
NEWEST = "step-00000008"
MODEL = "deepspeed/mp_rank_00_model_states.pt"
FILES = ("config.json", "random-00000.pt", "probe.npy", MODEL)


def newest(run: Path) -> Path:
    """Return the checkpoint to damage."""
    return run / "checkpoints" / NEWEST


def _file(name: str, spoil: Damage) -> Damage:
    """Build a function that damages a file of the newest checkpoint and leaves its manifest."""
    return lambda run: spoil(newest(run) / name)


def _resealed(name: str, spoil: Damage) -> Damage:
    """Build a function that damages a file of the newest checkpoint and adapts its manifest."""

    def damage(run: Path) -> None:
        spoil(newest(run) / name)
        seal(newest(run))

    return damage


def _text(change: Callable[[bytes], bytes]) -> Damage:
    """Changes the bytes of the manifest."""

    def damage(run: Path) -> None:
        path = newest(run) / MANIFEST
        path.write_bytes(change(path.read_bytes()))

    return damage


def _says(**changes: Any) -> Damage:
    """Lets the manifest say something else, under a hash that agrees."""
    return _text(lambda text: json_text(add_digest(json.loads(text) | changes)).encode())


def _names(name: str, size: int = 0) -> Damage:
    """Lets the manifest name one file more."""

    def change(text: bytes) -> bytes:
        content = json.loads(text)
        content["files"][name] = {"bytes": size, "sha256": "0" * 64}
        return json_text(add_digest(content)).encode()

    return _text(change)


def _inside(field: str, **changes: Any) -> Damage:
    """Change keys of a field of the manifest, under a valid hash."""
    return lambda run: _says(**{field: read_manifest(newest(run)).model_dump(mode="json")[field] | changes})(run)


def _copied(name: str) -> Damage:
    return lambda run: shutil.copytree(newest(run).with_name("step-00000004"), newest(run).with_name(name))


def _placed(kind: str, name: str) -> Damage:
    return lambda run: replace(newest(run).with_name(name), kind)


def _renamed(run: Path) -> None:
    """Give the newest checkpoint another step, in its name and content."""
    _says(step=99)(run)
    newest(run).rename(newest(run).with_name("step-00000099"))


def _stranger_behind(run: Path) -> None:
    """Remove a file of the newest checkpoint, and give the one before it other data."""
    (newest(run) / "random-00000.pt").unlink()
    path = newest(run).with_name("step-00000004") / MANIFEST
    content = json.loads(path.read_text())
    content["stream"]["fingerprint"] = "0" * 64
    path.write_text(json_text(add_digest(content)))


def _array(header: bytes | None = None, array: Any = None) -> Damage:
    """Replace the probe's array under its manifest's hash, or keep the array under another header."""

    def spoil(path: Path) -> None:
        content = path.read_bytes()
        if array is not None:
            np.save(path, array, allow_pickle=True)
        else:
            path.write_bytes(content.replace(b"(64,)", header or b""))

    return _resealed("probe.npy", spoil)


# The newest is told from a checkpoint by its manifest, its name or its files: `auto` passes it over.
DAMAGED: dict[str, Damage] = {
    **{f"manifest: {kind}": _file(MANIFEST, lambda path, kind=kind: replace(path, kind)) for kind in NO_FILES},
    **{
        f"manifest: {what}": _file(MANIFEST, lambda path, make=make: path.write_bytes(make()))
        for what, make in HOSTILE_JSON.items()
    },
    "manifest: missing": _file(MANIFEST, Path.unlink),
    "manifest: a terabyte": _file(MANIFEST, lambda path: sparse(path, 2**40)),
    "manifest: other line ends": _text(lambda text: text.replace(b"\n", b"\r\n")),
    "manifest: without its last line end": _text(bytes.rstrip),
    "manifest: one more line end": _text(lambda text: text + b"\n"),
    "manifest: on one line": _text(lambda text: json.dumps(json.loads(text)).encode()),
    "manifest: a digit of its hash": _text(lambda text: text.replace(b'"sha256": "', b'"sha256": "f', 1)),
    "manifest: a step of 5,000 digits": _text(lambda text: text.replace(b'"step": 8', b'"step": ' + b"9" * 5000)),
    "says: step of 38 digits": _says(step=10**38),
    "says: a step before": _says(step=4),
    "says: step -1": _says(step=-1),
    "says: world_size 0": _says(world_size=0),
    "says: world_size of 10**12": _says(world_size=10**12),
    "says: sequence_parallel that divides nothing": _says(sequence_parallel=3),
    "says: files a list": _says(files=[]),
    "says: no files": _says(files={}),
    "says: something unknown": _says(more=1),
    "says: probe empty": _says(probe={}),
    "says: probe's loss a text": _inside("probe", loss_nats="5"),
    "says: probe's check sum of 38 digits": _inside("probe", crc32=10**37),
    "names: a file with a line end": _names("a\nb"),
    "names: a file of 2**70 bytes": _names("x", 2**70),
    "names: a file that is not there": _names("x"),
    "name: a copy of an older one": _copied("step-00000099"),
    "name: a copy with nine digits": _copied("step-000000004"),
    "name: a copy with Arabic digits": _copied("step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0669"),
    "name: a copy with 200 digits": _copied("step-" + "9" * 200),
    **{f"name: {kind}": _placed(kind, "step-00000099") for kind in NO_FILES},
    "name: a file": lambda run: (run / "checkpoints/step-00000099").write_bytes(b"x"),
    "name: a link to an older one": lambda run: (run / "checkpoints/step-00000099").symlink_to("step-00000004"),
    **{
        f"{name}: {kind}": _file(name, lambda path, kind=kind: replace(path, kind))
        for name in FILES
        for kind in ("pipe", "socket", "folder", "link to zeros", "link to nothing", "link to itself")
    },
    **{f"{name}: a terabyte": _file(name, lambda path: sparse(path, 2**40)) for name in FILES},
    "a pipe more": _file("more", os.mkfifo),
}
# Its manifest agrees with it, as whoever means harm can make it: a line, and nothing is gone on from.
FAKED: dict[str, Damage] = {
    "another step by name and manifest": _renamed,
    "a stranger behind a damaged one": _stranger_behind,
    "manifest: in another order": _text(lambda text: json_text(dict(reversed(json.loads(text).items()))).encode()),
    "says: stream empty": _says(stream={}),
    "says: stream a step of text": _inside("stream", step="8"),
    "says: stream of other data": _inside("stream", fingerprint="0" * 64),
    "says: stream of a step of 38 digits": _inside("stream", step=10**37),
    "says: guards of text": _says(guards={"losses": "all"}),
    "says: plateau below nothing": _says(plateau={"step": -1}),
    "says: zero_stage 3": _says(zero_stage=3),
    "says: two processes": _says(world_size=2),
    "says: as many processes as there may be": _says(world_size=2**14),
    "says: no parameters": _says(parameter_groups=[]),
    "says: another probe's loss": _inside("probe", loss_nats=1.0),
    "config.json: empty": _resealed("config.json", lambda path: path.write_text("{}")),
    "config.json: a list": _resealed("config.json", lambda path: path.write_text("[]")),
    "probe: as long as 2**60": _array(b"(1152921504606846976,)"),
    "probe: of two dimensions": _array(array=np.zeros((8, 8), np.uint8)),
    "probe: of numbers": _array(array=np.zeros(64)),
    "probe: of objects": _array(array=np.array([{}], object)),
    "probe: shorter": _array(array=np.zeros(8, np.uint8)),
    "probe: other bytes": _array(array=np.zeros(64, np.uint8)),
    "probe: no array": _resealed("probe.npy", lambda path: path.write_bytes(b"PK\x03\x04")),
    **{f"{MODEL}: {what}": _resealed(MODEL, spoil) for what, spoil in PICKLES.items()},
    **{f"random-00000.pt: {what}": _resealed("random-00000.pt", spoil) for what, spoil in PICKLES.items()},
}


def _line(text: bytes) -> Damage:
    """Append a line to metrics.jsonl."""

    def damage(run: Path) -> None:
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(text + b"\n")

    return damage


# In the run folder, where a resume looks or writes: it goes on from the newest, and says the same.
AROUND: dict[str, Damage] = {
    "metrics: a step of 5,000 digits": _line(b'{"split": "validation", "step": ' + b"9" * 5000 + b"}"),
    "metrics: tokens of 5,000 digits": _line(b'{"split": "validation", "step": 8, "tokens": ' + b"9" * 5000 + b"}"),
    "metrics: an evaluation that is none": _line(b'{"split": "validation", "step": 3, "tokens": "x"}'),
    "metrics: NaN": _line(b'{"split": "validation", "step": 9, "tokens": NaN}'),
    "metrics: a step that is no number": _line(b'{"split": "train", "step": true}'),
    "metrics: a step alone": _line(b'{"step": 1}'),
    "metrics: deep": _line(b"[" * 100_000),
    "metrics: no text": _line(b"\xff\xfe\x00"),
    "metrics: ten megabytes of a line": _line(b"x" * 10_000_000),
    "metrics: a list": _line(b"[1]"),
    "metrics: torn": _line(b'{"split": "train", "ste'),
    "metrics: a terabyte": lambda run: sparse(run / "metrics.jsonl", 2**40),
    "metrics: a pipe in the place of its next content": lambda run: os.mkfifo(run / ".metrics.jsonl.partial"),
    **{
        f"latest: {kind}": lambda run, kind=kind: replace(run / "checkpoints/latest", kind)
        for kind in NO_FILES
        if kind != "folder"
    },
    "a pipe in the place of the next checkpoint": lambda run: os.mkfifo(run / f"checkpoints/.{NEWEST}.partial"),
    "a file in the place of the next checkpoint": lambda run: (run / f"checkpoints/.{NEWEST}.partial").write_text("x"),
    "latest: a pipe in the place of its next content": lambda run: os.mkfifo(run / "checkpoints/.latest.partial"),
    "latest: a link out in the place of its next content": lambda run: (
        (run / "precious").write_text("precious"),
        (run / "checkpoints/.latest.partial").symlink_to(run / "precious"),
    ),
}
# A person has to put right what is there first.
IN_THE_WAY: dict[str, Damage] = {
    **{f"metrics: {kind}": lambda run, kind=kind: replace(run / "metrics.jsonl", kind) for kind in NO_FILES},
    "latest: folder": lambda run: replace(run / "checkpoints/latest", "folder"),
}
