"""`POST /likelihood`: the nats of each byte of a text, and what is refused."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longstride.kernels import ConfigError
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models import load_model
from longstride.launcher.serving import sampler as sampler_module
from longstride.launcher.serving.request import ScoreRequest, largest_body, parse_score
from tests.harness.served import alone, post_json, served
from tests.harness.tiny_models import plain_config, random_export

TEXT = "häh? " * 40  # 240 bytes, of a model whose context is 64


def asked(url: str, path: str = "likelihood", **content: Any) -> tuple[int, dict[str, Any]]:
    status, text = post_json(f"{url}{path}", content)
    return status, json.loads(text.splitlines()[-1])


def test_nats_are_those_of_the_command_line(exported: Path) -> None:
    model = load_model(str(exported))
    with served(exported) as url:
        for content, min_context in ((b"h\xff\x00", None), (TEXT.encode()[:64], None), (TEXT.encode(), 8)):
            given = {"text_base64": base64.b64encode(content).decode()}
            status, found = asked(url, **given, **({} if min_context is None else {"min_context": min_context}))
            expected = likelihood(model, content, min_context=min_context or 32, batch_size=1)
            assert (status, found["bytes"], len(found["nats"])) == (200, len(content), len(content))
            assert found["min_context"] == (32 if min_context is None else 8)
            assert found["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=1e-5)
            assert sum(found["nats"]) / len(content) == pytest.approx(expected["loss_nats"], rel=1e-5)
        # What stands behind a byte does not change it.
        whole, part = (asked(url, text=TEXT[:size])[1]["nats"] for size in (50, 20))
        assert whole[: len(part)] == pytest.approx(part, rel=1e-4)


def test_text_that_takes_too_long_is_ended_and_the_next_goes_well(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, released = sampler_module.nats_by_piece, threading.Event()

    def slow(*arguments: Any) -> Iterator[list[float]]:
        for nats in real(*arguments):
            yield nats
            assert released.wait(30)

    monkeypatch.setattr(sampler_module, "nats_by_piece", slow)
    with served(exported, seconds=0.5) as url:
        status, found = asked(url, text=TEXT)
        assert (status, found) == (503, {"error": "took longer than 0.5 s; ask for less"})
        released.set()
        assert asked(url, text="next")[0] == 200


def test_logits_that_are_no_numbers_are_told(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "nats_by_piece", lambda *_: iter([[float("nan")]]))
    with served(exported) as url:
        assert asked(url, text="a") == (500, {"error": "the model's logits are not finite"})


def test_short_sample_does_not_wait_for_a_long_text(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample its bytes between the pieces of the text."""
    real, begun = sampler_module.nats_by_piece, threading.Event()

    def watched(*arguments: Any) -> Iterator[list[float]]:
        for nats in real(*arguments):
            yield nats
            begun.set()
            threading.Event().wait(0.05)  # so that a sample that is asked for meanwhile is there at the next turn

    monkeypatch.setattr(sampler_module, "nats_by_piece", watched)
    order: list[str] = []

    def score() -> None:
        asked(url, text=TEXT, min_context=32)
        order.append("score")

    with served(exported) as url:
        thread = threading.Thread(target=score)
        thread.start()
        assert begun.wait(30)
        assert asked(url, "sample", prompt="a", bytes=1)[1]["done"]
        order.append("sample")
        thread.join()
    assert order == ["sample", "score"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"text": ""}, "text: is empty; give bytes to score"),
        ({}, "text: is empty; give bytes to score"),
        ({"prompt": "a", "text": "a"}, "prompt: unknown field; fields are text, text_base64, min_context"),
        ({"text": 3}, "text=3: must be a string"),
        ({"text": "a" * 257}, "text: has 257 bytes; give at most 256, 4 contexts of 64"),
        ({"text": "a", "text_base64": "AA=="}, "text_base64: conflicts with text; give one of them"),
        ({"text": "\ud800"}, "text: holds half a character (a surrogate); give bytes as text_base64"),
        ({"text_base64": "AP/"}, "text_base64: must be base64, with its padding"),
        ({"text": "a", "min_context": 33}, "min_context=33: must be an integer from 0 to 32, half the context"),
        ({"text": "a", "min_context": True}, "min_context=true: must be an integer from 0 to 32, half the context"),
        ({"text": "a", "min_context": -1}, "min_context=-1: must be an integer from 0 to 32, half the context"),
    ],
)
def test_wrong_field_is_told_with_a_good_value(content: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_score(json.dumps(content).encode(), plain_config())
    assert str(refused.value) == line


def test_every_text_that_may_be_scored_has_room_in_a_body() -> None:
    longest = json.dumps({"text": "\x01" * 256, "min_context": 0}).encode()
    assert len(longest) <= largest_body(plain_config(), 1)
    assert parse_score(longest, plain_config()) == ScoreRequest(b"\x01" * 256, 0)


def test_byte_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^text: contains byte 98; this model knows 0 to 97$"):
        parse_score(b'{"text": "ab"}', plain_config(vocabulary=98))


def test_a_model_that_carries_state_is_served_texts_longer_than_its_context(tmp_path: Path) -> None:
    """Samples, nats and scores of a prompt go on from context to context as on the command line."""
    attention = [{"type": "transformer_xl", "memory": 32}, {"type": "recurrent", "stateful": True}]
    folder = random_export(
        tmp_path / "model", layers=2, embedding={"type": "text", "row_width": 8}, attention=attention
    )
    model, prompt = load_model(folder), TEXT.encode()[:150]
    for shared in (False, True):
        with served(folder, shared, max_bytes=64 * 64) as url:
            for length in (0, 63, 64, 150):
                start = base64.b64encode(prompt[:length]).decode()
                _, answer = post_json(f"{url}sample", {"prompt_base64": start, "bytes": 90, "seed": 3})
                lines = [json.loads(line) for line in answer.splitlines()]
                sampled = b"".join(base64.b64decode(line["base64"]) for line in lines[1:-1])
                assert sampled == alone(model, prompt[:length], 90, 3, slide=True), length
            expected = likelihood(model, prompt, batch_size=1)
            status, found = asked(url, text_base64=base64.b64encode(prompt).decode())
            assert (status, found["min_context"], len(found["nats"])) == (200, 0, 150)
            assert sum(found["nats"]) / 150 == pytest.approx(expected["loss_nats"], rel=1e-5)
            fields = {"model": "model", "prompt": list(prompt[:140]), "max_tokens": 1, "echo": True, "logprobs": 1}
            scores = asked(url, "v1/completions", **fields)[1]["choices"][0]["logprobs"]["token_logprobs"]
            assert -sum(scores[1:140]) == pytest.approx(sum(found["nats"][1:140]), rel=1e-5)
            rule = "maximum context length is 4096 tokens, which are bytes: the prompt has 140"
            assert rule in asked(url, "v1/completions", **fields | {"max_tokens": 4000})[1]["error"]["message"]
            assert asked(url, text="a", min_context=2)[1]["problems"] == [
                {"field": "min_context", "rule": "must be 0, as the model carries what came before; leave it out"}
            ]
