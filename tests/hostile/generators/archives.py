"""Tars, compressed ones, pickles and arrays that state what is not there, or what nobody could hold."""

import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.hostile.generators.files import sparse

_END = bytes(1024)


def member(name: str, payload: bytes = b"text\n", **fields: object) -> bytes:
    """Build a member of a tar, in ustar format if it fits."""
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + payload + bytes(-len(payload) % 512)


def _pax(content: bytes, kind: bytes = tarfile.XHDTYPE, **fields: object) -> bytes:
    return member("pax", content, type=kind, **fields)


def _record(name: str, value: str) -> bytes:
    body = f" {name}={value}\n".encode()
    size = len(body)
    while size != len(body) + len(str(size)):
        size = len(body) + len(str(size))
    return str(size).encode() + body


_HONEST = member("a.txt")
# Tars beside an honest one; each is refused by `data index`, or read as what it honestly holds.
TARS: dict[str, Callable[[], bytes]] = {
    "a pax header of 12 GB": lambda: _HONEST + _pax(b"", size=12 * 2**30) + _END,
    "a pax header of 16 EB": lambda: _HONEST + _pax(b"", size=2**63) + _END,
    "a pax header of digits": lambda: _pax(b"9" * 900_000) + _HONEST + _END,
    "ten thousand pax headers": lambda: _pax(_record("comment", "x")) * 10_000 + _HONEST + _END,
    "a thousand global headers": lambda: (
        b"".join(
            _pax(_record(f"key{number}", "x" * 9000), tarfile.XGLTYPE) + member(f"{number}.txt")
            for number in range(1000)
        )
        + _END
    ),
    "a name of 2 MiB": lambda: _pax(b"n" * 2**21, tarfile.GNUTYPE_LONGNAME) + _HONEST + _END,
    "a name of 100 kB": lambda: _pax(_record("path", "n" * 100_000 + ".txt")) + _HONEST + _END,
    "a size of 38 digits": lambda: _pax(_record("size", "9" * 38)) + _HONEST + _END,
    "a size of 5,000 digits": lambda: _pax(_record("size", "9" * 5000)) + _HONEST + _END,
    "a size below zero": lambda: _HONEST + member("b.txt", b"", size=-512) + _END,
    "a member of 12 GB": lambda: _HONEST + member("b.txt", b"", size=12 * 2**30) + _END,
    "a member that is cut": lambda: _HONEST + member("b.txt", b"", size=4096) + b"short",
    "a sparse member": lambda: _HONEST + member("b.txt", b"", type=tarfile.GNUTYPE_SPARSE) + _END,
    "a sparse member by pax": lambda: (
        _pax(_record("GNU.sparse.map", "0,4") + _record("GNU.sparse.size", "4")) + member("b.txt", b"text") + _END
    ),
    "a link": lambda: _HONEST + member("b.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd") + _END,
    "a hard link": lambda: _HONEST + member("b.txt", b"", type=tarfile.LNKTYPE, linkname="a.txt") + _END,
    "a device": lambda: _HONEST + member("b.txt", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=5) + _END,
    "a pipe": lambda: _HONEST + member("b.txt", b"", type=tarfile.FIFOTYPE) + _END,
    "a member twice": lambda: _HONEST * 2 + _END,
    "one tar behind the other": lambda: (_HONEST + _END) * 2,
    "rubbish behind the end": lambda: _HONEST + _END + b"rubbish" * 99,
    "no end": lambda: _HONEST,
    "nothing": lambda: b"",
    "zeros alone": lambda: bytes(10240),
    "a broken check sum": lambda: _HONEST[:148] + b"0000000\0" + _HONEST[156:] + _END,
    "a header of letters": lambda: b"x" * 512 + _HONEST + _END,
}
# Names that lead elsewhere are names like others: nothing is unpacked.
NAMES = ("../../b.txt", "/etc/b.txt", "a/../../../b.txt", "C:\\b.txt", "\x1b[2J.txt", "\u202eb.txt")
BOMBS: dict[str, Callable[[Path], object]] = {
    "a terabyte of zeros behind the end": lambda path: (path.write_bytes(_HONEST + _END), sparse(path, 2**40)),
    "a member of 2 TB": lambda path: (path.write_bytes(member("b.txt", b"", size=2**41)), sparse(path, 2**28)),
}


def gzip_bomb(size: int) -> bytes:
    """Build a member of so many zeros, compressed a thousand times."""
    zeros = gzip.compress(bytes(2**26))
    return gzip.compress(member("b.txt", b"", size=size)) + zeros * (size // 2**26)


def zstd_bomb(size: int) -> bytes:
    """Build a tar member of so many zeros in a few kilobytes."""
    import zstandard

    zeros = zstandard.compress(bytes(2**26))
    return zstandard.compress(member("b.txt", b"", size=size)) + zeros * (size // 2**26)


def _pickled(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes + b"."


# Batches of CIFAR-10 that are programs.
PICKLES: dict[str, Callable[[], bytes]] = {
    "a call of the system": lambda: b"cos\nsystem\n(S'touch ran'\ntR.",
    "a name of 200 kB": lambda: b"c" + b"m" * 200_000 + b"\nsystem\n.",
    "ten million lists": lambda: _pickled(b"]" * 10_000_000),
    "ten million marks": lambda: _pickled(b"(" * 10_000_000),
    "tuples doubled as a key": lambda: _pickled(b"}N" + b"2\x86" * 90 + b"Ns"),
    "tuples doubled as keys": lambda: _pickled(b"}(N" + b"2\x86" * 90 + b"Nu"),
    "tuples doubled in a set": lambda: b"\x80\x04\x8f(N" + b"2\x86" * 90 + b"\x90.",
    "tuples doubled as an encoding": lambda: _pickled(
        b"c_codecs\nencode\nX\x01\x00\x00\x00aN" + b"2\x86" * 90 + b"\x86R"
    ),
    "a type's name again and again": lambda: _pickled(
        b"X"
        + struct.pack("<I", 5_000_000)
        + b"n" * 5_000_000
        + b"q\x000"
        + b"cnumpy\ndtype\nh\x00\x85R0" * 20_000
        + b"N"
    ),
    "room for as many as are claimed": lambda: _pickled(b"Nr\xff\xff\xff\x7f"),
    "a text of 4 GB": lambda: _pickled(b"X\xff\xff\xff\xff"),
    "a number of a million digits": lambda: _pickled(b"L" + b"9" * 1_000_000 + b"L\n"),
    "no dictionary": lambda: pickle.dumps([1]),
    "half a pickle": lambda: pickle.dumps({b"data": bytes(999)})[:100],
}


def npz_of(header: str, payload: bytes = b"", deflated: bool = False) -> bytes:
    """Build an npz file with such a header of its array `data`."""
    text = header.encode() + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + payload
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as archive:
        archive.writestr("data.npy", array)
    return file.getvalue()


def _npy(shape: str, kind: str = "|u1") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


ARRAYS: dict[str, Callable[[], bytes]] = {
    "a shape of 2**62 pictures": lambda: npz_of(_npy("(4611686018427387904, 12288)")),
    "a shape below zero": lambda: npz_of(_npy("(-1, 12288)"), bytes(12288)),
    "a shape of 5,000 digits": lambda: npz_of(_npy(f"({'9' * 5000}, 12288)")),
    "a shape of texts": lambda: npz_of(_npy("('a', 12288)")),
    "a shape of nothing": lambda: npz_of(_npy("()")),
    "objects": lambda: npz_of(_npy("(1, 12288)", "|O"), bytes(12288)),
    "a call": lambda: npz_of("__import__('os').system('touch ran')"),
    "brackets": lambda: npz_of("[" * 9000),
    "a byte too few": lambda: npz_of(_npy("(1, 12288)"), bytes(12287)),
    "no zip": lambda: b"PK\x03\x04" + bytes(99),
}
