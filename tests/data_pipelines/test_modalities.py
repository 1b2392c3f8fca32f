"""Every registered modality; text in particular."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines import MODALITIES, DataError, modality_named


@pytest.mark.parametrize("name", sorted(MODALITIES))
def test_modality_registered_under_own_name(name):
    modality = modality_named(name)
    assert modality.name == name
    assert "." not in modality.extension and modality.extension == modality.extension.lower()
    assert all(suffix.startswith(".") for suffix in modality.suffixes)


def test_modality_unknown_is_refused():
    with pytest.raises(DataError, match=r"modality='smell'.*text"):
        modality_named("smell")


@given(st.binary(max_size=300))
def test_text_round_trips(payload):
    text = MODALITIES["text"]
    tokens = text.decode(payload)
    assert tokens.dtype == np.uint8 and tokens.shape == (len(payload),)
    assert text.encode(tokens) == payload
    assert text.encode(tokens.astype(np.int64)) == payload


@pytest.mark.parametrize(
    "tokens", [np.array([256]), np.array([-1]), np.array([[1, 2]]), np.array([0.5])], ids=["256", "-1", "2d", "float"]
)
def test_text_encode_refuses_what_is_no_byte(tokens):
    with pytest.raises(DataError):
        MODALITIES["text"].encode(tokens)
