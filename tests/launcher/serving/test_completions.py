"""What `/v1` answers: the bytes, texts and scores of completions, and OpenAI's errors."""

import base64
import itertools
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.kernels import ConfigError
from longstride.launcher.models import load_model
from longstride.launcher.serving.completions import parse_completion
from longstride.launcher.serving.metrics import Metrics
from longstride.launcher.serving.request import SampleRequest
from longstride.launcher.serving.sampler import End, Job, Piece, sample
from longstride.sparse_model import Session, SparseTransformer
from tests.harness.served import alone, post_json, served
from tests.harness.tiny_models import EMBEDDINGS, plain_config, tiny_export

INDEXED = {"type": "indexed", "keys": 8, "block": 4, "window": 5, "local": {"heads": 1, "window": 6}}
each_model = pytest.mark.parametrize("exported", [{}, {"attention": INDEXED}], ids=["local", "indexed"], indirect=True)


@pytest.fixture
def model(exported: Path) -> SparseTransformer:
    return load_model(exported)


@pytest.fixture
def url(exported: Path) -> Iterator[str]:
    with served(exported) as url:
        yield url


def post(url: str, expected: int = 200, **content: Any) -> Any:
    """Return the answer to a completion as JSON, or the chunks of a stream."""
    status, text = post_json(f"{url}v1/completions", {"model": "model"} | content)
    assert status == expected, text
    if not content.get("stream") or status != 200:
        return json.loads(text)
    *events, last, empty = text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content_of(choice: dict[str, Any]) -> bytes:
    return base64.b64decode(choice["bytes_base64"])


def test_completion_has_the_bytes_of_a_sample(url: str, model: SparseTransformer) -> None:
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    found = post(url, prompt="hä", max_tokens=40, seed=5, **settings)
    (choice,) = found["choices"]
    expected = alone(model, "hä".encode(), 40, 5, **settings)
    assert content_of(choice) == expected and choice["text"] == expected.decode(errors="replace")
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 40, "total_tokens": 43}
    assert found["object"] == "text_completion" and found["model"] == "model" and found["id"].startswith("cmpl-")
    assert len(content_of(post(url)["choices"][0])) == 16  # all that OpenAI's defaults ask for


@each_model
def test_choices_do_not_depend_on_what_stands_beside_them(url: str, model: SparseTransformer) -> None:
    prompts = [list(b"abc"), [256, *b"xyz"], list(b"abc"), [255]]  # 256 is the start
    choices = post(url, prompt=prompts, n=3, seed=7, max_tokens=20, temperature=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(12))
    for number, choice in enumerate(choices):
        prompt = bytes(token for token in prompts[number // 3] if token < 256)
        assert content_of(choice) == alone(model, prompt, 20, 7 + number % 3, temperature=2)
    # The indexed model prefers two bytes. Fewer or cooler tokens would be equal by chance.
    drawn = post(url, prompt=["a", "a"], n=2, max_tokens=60, temperature=2)["choices"]
    assert len({choice["bytes_base64"] for choice in drawn}) == 4


def test_requests_at_once_have_the_bytes_that_each_has_alone(url: str, model: SparseTransformer) -> None:
    requests = [
        {"prompt": "x" * (number % 3), "seed": number, "max_tokens": 10 + number % 2, "temperature": number % 5 / 2}
        for number in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda asked: post(url, **asked), requests))
    for asked, answer in zip(requests, found, strict=True):
        expected = alone(model, asked["prompt"].encode(), asked["max_tokens"], asked["seed"],
                         temperature=asked["temperature"])  # fmt: skip
        assert content_of(answer["choices"][0]) == expected


@each_model
@pytest.mark.parametrize("shared", [False, True])
def test_contexts_are_computed_apart_unless_they_are_shared(
    shared: bool, model: SparseTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare in fp64, where both ways choose the same bytes. Last bits depend on the size of a batch."""
    batches, prefill = [], Session.prefill
    forward = model.double().forward_cached
    monkeypatch.setattr(model, "forward_cached", lambda h, *rest: batches.append(len(h)) or forward(h, *rest))
    prompts: list[int] = []
    monkeypatch.setattr(
        Session, "prefill", lambda self, tokens: prompts.extend([1] * len(tokens)) or prefill(self, tokens)
    )
    contents: list[list[bytes]] = [[] for _ in range(5)]

    def deliver(number: int) -> Callable[[Piece | End], None]:
        def take(event: Piece | End) -> None:
            if isinstance(event, Piece):
                contents[number].append(event.content)
                jobs[1].stopped |= number == 1 and len(contents[1]) == 4  # its client leaves

        return take

    asked = [(b"ab", 7), (b"cd", 7), (b"ab", 8), (b"cd", 7), (b"ab", 9)]
    jobs = [
        Job(SampleRequest(prompt, 12, 0.9, None, None, seed), deliver(number))
        for number, (prompt, seed) in enumerate(asked)
    ]
    for _ in sample(model, "cpu", jobs, Metrics(), shared):
        pass
    assert set(batches) == ({2, 5, 4} if shared else {1}) and len(prompts) == 2  # each prompt once
    monkeypatch.undo()
    for number, (prompt, seed) in enumerate(asked):
        expected = alone(model, prompt, 12, seed, temperature=0.9)
        assert b"".join(contents[number]) == expected[: 4 if number == 1 else 12]


def test_as_many_prompts_as_may_be_have_room_in_a_body(url: str) -> None:
    found = post(url, prompt=["\x7f" * 64] * 128, max_tokens=0)
    assert found["usage"]["prompt_tokens"] == 128 * 64


def test_stream_joined_is_what_is_not_streamed(url: str) -> None:
    asked = {"prompt": ["a", "ä"], "n": 2, "seed": 3, "max_tokens": 30, "logprobs": 2, "echo": True, "stop": ["é", "q"]}
    whole = post(url, **asked)
    *chunks, last = post(url, **asked, stream=True, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None and chunk["id"] == last["id"] for chunk in chunks)
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert b"".join(map(content_of, own)) == content_of(choice)
        for name, values in choice["logprobs"].items():
            assert [value for each in own for value in each["logprobs"][name]] == values
        assert [each["finish_reason"] for each in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]


ONLY_ABC = {str(byte): 100 if byte in b"abc" else -100 for byte in range(256)}


def test_sample_ends_before_the_first_stop_that_is_whole(url: str) -> None:
    asked = {"seed": 1, "max_tokens": 60, "logit_bias": ONLY_ABC, "temperature": 5}
    text = post(url, **asked)["choices"][0]["text"]
    assert set(text) == set("abc") and len(text) == 60
    for stops in (["abca"], [text[30:34], "a"], [text[20:23], "zz"], [text[58:], text[:59] + "z"], ["zz"]):
        ends = (end for end in range(1, 61) if text[:end].endswith(tuple(stops)))
        end = next(ends, None)
        cut = 60 if end is None else end - max(len(stop) for stop in stops if text[:end].endswith(stop))
        found = post(url, **asked, stop=stops)
        (choice,) = found["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[:cut], "length" if end is None else "stop")
        assert found["usage"]["completion_tokens"] == (end or 60)
        streamed = post(url, **asked, stop=stops, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    sampled = content_of(post(url, seed=1, max_tokens=60, stop="ä\uffff")["choices"][0])  # held back, and let go
    assert len(sampled) == 60


def test_scores_are_those_of_a_forward_pass(url: str, model: SparseTransformer) -> None:
    found = post(url, prompt=[256, *b"a stride"], echo=True, logprobs=3, max_tokens=6, seed=2)["choices"][0]
    known = content_of(found)
    with torch.no_grad():
        expected = model(torch.tensor([list(known)])).double().log_softmax(-1)[0]
    logprobs = found["logprobs"]
    assert logprobs["tokens"][0] == "<|longstride_start|>"
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for row, byte, value, top in zip(
        expected, known, logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert math.isclose(value, row[byte], abs_tol=1e-4)
        assert top[f"bytes:\\x{byte:02x}" if byte > 127 else chr(byte)] == value
        assert math.isclose(max(top.values()), row.max(), abs_tol=1e-4) and len(top) in (3, 4)
    scored = post(url, prompt="hä!", echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert scored["text"] == "hä!" and scored["finish_reason"] == "length"
    assert scored["logprobs"]["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa4", "!"]
    assert scored["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert scored["logprobs"]["token_logprobs"][0] is None  # as OpenAI has it, where no start stands before


def test_penalties_and_bias_change_what_is_likely(url: str, model: SparseTransformer) -> None:
    def text(**changes: Any) -> str:
        return str(post(url, max_tokens=9, temperature=0, **changes)["choices"][0]["text"])

    assert text(logit_bias={"97": 100}) == "a" * 9
    with torch.no_grad():  # the penalties by their definition, from forward passes
        known = [99]
        counts = torch.zeros(256)
        for _ in range(9):
            logits = model(torch.tensor([[*known, 0]]))[0, -1]
            allowed = torch.full_like(logits, -100.0)
            allowed[list(b"abc")] = 100.0
            byte = int((logits + allowed - 1.5 * counts - 0.5 * (counts > 0)).argmax())
            known.append(byte)
            counts[byte] += 1
    asked = {"prompt": "c", "logit_bias": ONLY_ABC}
    assert text(**asked, frequency_penalty=1.5, presence_penalty=0.5) == bytes(known[1:]).decode()


@pytest.mark.parametrize(
    ("changes", "param", "line"),
    [
        ({"prompt": 3}, "prompt", "prompt: must be a string, a list of strings, a list of"),
        ({"prompt": [1, "a"]}, "prompt", "prompt: must be a string, a list of strings"),
        ({"prompt": []}, "prompt", "prompt: must be a string, a list of strings"),
        ({"prompt": ["a", "\ud800"]}, "prompt[1]", "prompt[1]: holds half a character"),
        ({"prompt": [1, 256]}, "prompt", "prompt: must be numbers from 0 to 255, which are bytes; the first"),
        ({"prompt": [True]}, "prompt", "prompt: must be a string"),
        ({"prompt": ["a"] * 129}, "prompt", "prompt: has 129 prompts; at most 128"),
        ({"prompt": ["a"] * 3, "n": 50}, "n", "n: 3 prompts have 150 choices; at most 128"),
        ({"suffix": "x"}, "suffix", "suffix: the model continues the prompt and cannot see a suffix"),
        ({"best_of": 3}, "best_of", "best_of=3: choices are not ranked here; leave it out"),
        ({"stop": ["a", ""]}, "stop", "stop: must be a string that is not empty, or a list of at most 16"),
        ({"logprobs": 257}, "logprobs", "logprobs=257: must be less than or equal to 256"),
        ({"logit_bias": {"256": 1}}, "logit_bias", "logit_bias: '256' is not a token; tokens are \"0\" to \"255\""),
        ({"temperature": -1}, "temperature", "temperature=-1: must be a number from 0"),
        ({"top_k": 0}, "top_k", "top_k=0: must be an integer of at least 1"),
        ({"seed": -1}, "seed", "seed=-1: must be an integer from 0"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: only applies to streams"),
        ({"max_token": 3}, "max_token", "max_token: unknown key; nearest max_tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_field_is_refused_by_its_name(changes: dict[str, Any], param: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_completion(json.dumps({"model": "model"} | changes).encode(), plain_config(), "model", 64)
    assert error.value.problems[0].path == param
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_scores_of_one_request_are_bounded() -> None:
    """Refuse scores that would take gigabytes, as every client could request them."""

    def ask(**changes: Any) -> int:
        body = json.dumps({"model": "model", "max_tokens": 500, "n": 32} | changes).encode()
        return len(parse_completion(body, plain_config(context=1024), "model", 1024).samples)

    assert ask(logprobs=256) == ask() == 32
    for changes in ({"n": 33}, {"prompt": "a" * 20, "echo": True}):
        with pytest.raises(ConfigError, match=r"logprobs=256: is too much for 16,\d{3} bytes.*; at most 16,320"):
            ask(logprobs=256, **changes)


def test_refusals_have_the_form_of_openai(url: str) -> None:
    error = post(url, 404, model="gpt-4")["error"]
    assert error == {
        "message": "model='gpt-4' is not served here; take 'model'",
        "type": "invalid_request_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip
    error = post(url, 400, prompt="a" * 60, max_tokens=5)["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert error["message"] == (
        "max_tokens=5: this model's maximum context length is 64 tokens, which are bytes: "
        "the prompt has 60, and at most 4 can be sampled"
    )
    assert post(url, 400, n=0)["error"]["param"] == "n"
    assert post(url, prompt="a" * 60)["usage"]["completion_tokens"] == 4
    assert post(url, prompt="a" * 64, max_tokens=0, echo=True)["choices"][0]["text"] == "a" * 64
    for path, headers, status in (
        ("v1/completions", {"Content-Type": "text/plain"}, 415),
        ("v1/chat/completions", {}, 404),
        ("v1/models/gpt-4", {}, 404),
        ("v1/models", {"Origin": "http://evil.example"}, 403),
        ("v1/models", {"Host": "evil.example"}, 403),
        ("metrics", {"Host": "evil.example"}, 403),
    ):
        data = b"{}" if status == 415 else None
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60)
        assert refused.value.code == status
        found = json.loads(refused.value.read())["error"]
        assert isinstance(found, str) if path == "metrics" else set(found) == {"message", "type", "param", "code"}


def test_model_is_described(url: str) -> None:
    with urllib.request.urlopen(f"{url}v1/models", timeout=60) as response:
        listed = json.load(response)
    with urllib.request.urlopen(f"{url}v1/models/model", timeout=60) as response:
        assert listed == {"object": "list", "data": [json.load(response)]}
    assert listed["data"][0].pop("created") > 0
    assert listed["data"][0] == {"id": "model", "object": "model", "owned_by": "longstride", "max_model_len": 64}


def test_metrics_count_what_was_done(url: str) -> None:
    post(url, prompt="abc", max_tokens=5, n=2)
    post(url, 404, model="x")
    with urllib.request.urlopen(f"{url}metrics", timeout=60) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = response.read().decode()
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert found['longstride_requests_total{route="/v1/completions",status="200"}'] == "1"
    assert found['longstride_requests_total{route="/v1/completions",status="404"}'] == "1"
    assert found["longstride_sampled_bytes_total"] == "10" and found["longstride_prompt_bytes_total"] == "6"
    assert (
        found["longstride_first_byte_seconds_count"] == found['longstride_first_byte_seconds_bucket{le="+Inf"}'] == "2"
    )
    assert float(found["longstride_sampling_seconds_total"]) > 0 and found["longstride_requests_waiting"] == "0"


def test_pictures_are_bytes_without_text(tmp_path: Path) -> None:
    folder = tiny_export(tmp_path / "model", "image", model={"embedding": EMBEDDINGS["image"]})
    with served(folder) as url:
        choice = post(url, prompt=[1, 2, 3], max_tokens=9, seed=1)["choices"][0]
    assert choice["text"] == "" and content_of(choice) == alone(load_model(folder), bytes([1, 2, 3]), 9, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_context_without_numbers_ends_alone(shared: bool, model: SparseTransformer) -> None:
    model.double()  # in which a shared batch does not change a choice
    events: list[list[Piece | End]] = [[], []]
    jobs = [Job(SampleRequest(b"a", 3, 1.0, None, None, number), events[number].append) for number in range(2)]
    calls = itertools.count(1)

    def lose_first(_: object, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        """Spoil the second byte of the first context, which is sampled after the first bytes of both."""
        if next(calls) == (2 if shared else 3):
            logits[:1, ..., 7] = torch.nan
        return logits

    with model.logits.register_forward_hook(lose_first):
        for _ in sample(model, "cpu", jobs, Metrics(), shared):
            pass
    (first, end) = events[0]
    assert isinstance(first, Piece) and end == End("the model's logits are not finite")
    sampled = b"".join(event.content for event in events[1] if isinstance(event, Piece))
    assert sampled == alone(model, b"a", 3, 1)
