"""What a request's body may say, and how it is refused."""

import json
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.serving.request import MalformedError, SampleRequest, largest_body, parse_request
from tests.harness.tiny_models import plain_config as config


def parsed(content: dict[str, Any], max_bytes: int = 64, **changes: Any) -> SampleRequest:
    return parse_request(json.dumps(content).encode(), config(**changes), max_bytes)


def test_request_has_defaults() -> None:
    found = parsed({"seed": 3})
    assert found == SampleRequest(prompt=b"", count=64, temperature=1.0, top_k=None, top_p=None, seed=3)
    assert parsed({"prompt": "häl"}).count == 60
    assert parsed({}, max_bytes=9).count == 9
    assert parsed({}, context=1024).seed != parsed({}, context=1024).seed


def test_text_is_256_bytes_unless_told_and_a_picture_all_that_fits() -> None:
    picture = {"type": "image", "height": 16, "width": 64, "channels": 1}
    assert parsed({}, 4096, context=1024).count == 256
    assert parsed({"prompt": "abcd"}, 4096, context=1024, embedding=picture).count == 1020


def test_prompt_is_text_or_bytes() -> None:
    assert parsed({"prompt": "hä\x00"}).prompt == b"h\xc3\xa4\x00"
    assert parsed({"prompt_base64": "AP//"}).prompt == b"\x00\xff\xff"


def test_every_prompt_that_fits_has_room_in_a_body() -> None:
    longest = json.dumps({"prompt": "\x01" * 63, "bytes": 1, "temperature": 1.0, "seed": 2**63 - 1}).encode()
    assert len(longest) <= largest_body(config(), 1)
    assert parse_request(longest, config(), 64).prompt == b"\x01" * 63


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"sed": 1}, "sed: unknown field; fields are prompt, prompt_base64, bytes, temperature, top_k, top_p, seed"),
        ({"prompt": 3}, "prompt=3: must be a string"),
        ({"prompt": None}, "prompt=null: must be a string"),
        ({"prompt": "\ud800"}, "prompt: holds half a character (a surrogate); give bytes as prompt_base64"),
        ({"prompt": "a" * 64}, "prompt: has 64 bytes; give at most 63, as the context has 64"),
        ({"prompt_base64": "AP/"}, "prompt_base64: must be base64, with its padding"),
        ({"prompt_base64": "ä"}, "prompt_base64: must be base64, with its padding"),
        ({"prompt": "", "prompt_base64": ""}, "prompt_base64: conflicts with prompt; give one of them"),
        ({"bytes": 0}, "bytes=0: must be an integer from 1 to 50"),
        ({"bytes": 51}, "bytes=51: must be an integer from 1 to 50"),
        ({"bytes": None}, "bytes=null: must be an integer from 1 to 50"),
        (
            {"prompt": "a" * 60, "bytes": 5},
            "bytes=5: must be an integer from 1 to 4: prompt and sample must fit in the context of 64",
        ),
        ({"top_k": 0}, "top_k=0: must be an integer of at least 1; leave it out to sample from all"),
        ({"top_k": True}, "top_k=true: must be an integer of at least 1; leave it out to sample from all"),
        ({"top_p": 0}, "top_p=0: must be above 0 and at most 1; leave it out to sample from all"),
        ({"top_p": "x"}, 'top_p="x": must be above 0 and at most 1; leave it out to sample from all'),
        ({"seed": 2**63}, f"seed={2**63}: must be an integer from 0 to 2**63 - 1; leave it out for a random one"),
    ],
)
def test_wrong_field_is_told_with_a_good_value(content: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(content, max_bytes=50)
    assert str(error.value) == line


@pytest.mark.parametrize("temperature", [-0.5, None, True, "1", [1]])
def test_wrong_temperature_is_refused(temperature: object) -> None:
    with pytest.raises(ConfigError, match=r"temperature=.*: must be a number from 0, .*; 1 is as trained"):
        parsed({"temperature": temperature})


def test_all_problems_are_told_and_no_name_at_length() -> None:
    with pytest.raises(ConfigError) as error:
        parsed({"x" * 5000: 1, "prompt": 3, "seed": -1, **{f"y{number}": 0 for number in range(100)}})
    assert len(error.value.problems) == 7
    assert len(str(error.value)) < 1000


def test_byte_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt: contains byte 97; this model knows 0 to 15"):
        parsed({"prompt": "a"}, vocabulary=16)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "the body: not JSON: Expecting value (line 1, column 1)"),
        (b"{", "the body: not JSON: Expecting property name"),
        (b"[]", "the body must be a JSON object"),
        (b"\xff", "the body: must be UTF-8; byte 0 is not"),
        (b'{"seed": 1, "seed": 2}', 'the body: key "seed" occurs twice'),
        (b'{"top_p": NaN}', "the body: NaN is not JSON"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body: an integer of 5,000 digits"),
        (b"[" * 100_000, "the body: objects and lists nested more than 64 deep"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, line: str) -> None:
    with pytest.raises(MalformedError) as error:
        parse_request(body, config(), 64)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_temperature_beyond_all_floats_is_refused() -> None:
    with pytest.raises(MalformedError, match="1e999 is beyond the largest number"):
        parse_request(b'{"temperature": 1e999}', config(), 64)
