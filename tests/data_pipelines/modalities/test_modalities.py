"""What every registered modality holds to; text in particular."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstride.data_pipelines.errors import DataError
from longstride.data_pipelines.modalities import MODALITIES, modality_named
from tests.harness.data.builds import picture, sound

DOCUMENTS = {
    "text": random.Random(0).randbytes(999),
    "image": picture(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)),
    "audio": sound(np.random.default_rng(0).integers(-(2**15), 2**15, 333)),
}


@pytest.fixture(params=sorted(MODALITIES))
def modality(request):
    return MODALITIES[request.param]


@pytest.fixture
def document(modality, tmp_path):
    """Write a small file of the modality."""
    path = tmp_path / f"document{modality.suffixes[0]}"
    path.write_bytes(DOCUMENTS[modality.name])
    return path


def settle(modality, path):
    with path.open("rb") as file:
        return modality.settle(path, file, {})


def load(modality, path, properties, offset=0, size=2**20):
    with path.open("rb") as file:
        return modality.open(path, file, properties).read(offset, size)


def test_modality_registered_under_own_name(modality):
    assert modality_named(modality.name) is modality
    assert modality.extension.isalnum() and modality.extension == modality.extension.lower()
    assert modality.suffixes and all(suffix.startswith(".") for suffix in modality.suffixes)


def test_modality_unknown_is_refused():
    with pytest.raises(DataError, match=r"modality='smell'.*audio, image, text"):
        modality_named("smell")


def test_modality_measures_what_it_loads(modality, document):
    properties = settle(modality, document)
    content = load(modality, document, properties)
    assert modality.measure(document, properties) == len(content) > 0
    assert modality.document_bytes(properties) in (None, len(content))
    assert all(isinstance(value, int) for value in properties.values())


def test_modality_loads_in_pieces(modality, document):
    properties = settle(modality, document)
    content = load(modality, document, properties)
    pieces = [load(modality, document, properties, start, 100) for start in range(0, len(content) + 100, 100)]
    assert b"".join(pieces) == content and pieces[-1] == b""


def test_modality_header_has_one_length(modality, document):
    properties = settle(modality, document)
    assert len({len(modality.header(size, properties)) for size in (0, 1, 2**20, 2**32 - 100)}) == 1


def test_modality_encodes_a_member(modality, document):
    properties = settle(modality, document)
    content = load(modality, document, properties)
    member = modality.header(len(content), properties) + content
    assert modality.encode(np.frombuffer(content, dtype=np.uint8), properties) == member
    assert modality.encode(np.frombuffer(content, dtype=np.uint8).astype(np.int64), properties) == member


def test_modality_reads_its_own_members(modality, document, tmp_path):
    """A member taken out of a shard is a document with the same content: nothing is lost by building again."""
    properties = settle(modality, document)
    content = load(modality, document, properties)
    member = tmp_path / f"member.{modality.extension}"
    member.write_bytes(modality.header(len(content), properties) + content)
    assert settle(modality, member) == properties
    assert modality.measure(member, properties) == len(content)
    assert load(modality, member, properties) == content


@pytest.mark.parametrize(
    "tokens", [np.array([256]), np.array([-1]), np.array([[1, 2]]), np.array([0.5])], ids=["256", "-1", "2d", "float"]
)
def test_modality_encodes_bytes_alone(modality, document, tokens):
    with pytest.raises(DataError, match="integer"):
        modality.encode(tokens, settle(modality, document))


@given(st.binary(max_size=300))
def test_text_encodes_any_bytes(content):
    tokens = np.frombuffer(content, dtype=np.uint8)
    assert MODALITIES["text"].encode(tokens, {}) == MODALITIES["text"].encode(tokens.astype(np.int64), {}) == content
