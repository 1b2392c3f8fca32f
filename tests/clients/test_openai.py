"""The server under OpenAI's client, and under lm_eval, which asks for scores the same way."""

import asyncio
import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher import cli
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models import load_model
from longstride.sparse_model import generate
from tests.harness.clients import client
from tests.harness.served import served
from tests.harness.tiny_models import add_hub_files, content_of, tiny_export

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    with served(folder) as url:
        yield url


@pytest.fixture
def openai(url: str) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{url}v1", api_key="any", max_retries=0) as connected:
        yield connected


def content(choice: Any) -> bytes:
    return base64.b64decode(choice.bytes_base64)


@client("openai", "completions.create, whole and streamed, at a seed", "`longstride sample --seed`'s bytes")
def test_bytes_are_those_of_the_command_line(openai: Any, folder: Path, capfdbinary: Any) -> None:
    options = ["--prompt", "hä", "--bytes", "40", "--temperature", "0.8", "--top-p", "0.9", "--seed", "5"]
    assert cli.main(["sample", str(folder), *options]) == 0
    expected = capfdbinary.readouterr().out.removeprefix("hä".encode())
    assert len(expected) == 40
    fields = {"prompt": "hä", "max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 5, "model": "model"}
    completion = openai.completions.create(**fields)
    assert content(completion.choices[0]) == expected
    assert completion.choices[0].text == expected.decode(errors="replace")
    assert (completion.choices[0].finish_reason, completion.usage.total_tokens) == ("length", 43)
    *chunks, last = openai.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert b"".join(content(chunk.choices[0]) for chunk in chunks) == expected
    assert "".join(chunk.choices[0].text for chunk in chunks) == completion.choices[0].text
    assert last.usage == completion.usage


@client("openai", "8 requests at once by AsyncOpenAI, each with n=2", "each choice as alone")
def test_requests_at_once_have_their_own_bytes(url: str, folder: Path) -> None:
    from openai import AsyncOpenAI

    async def ask() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{url}v1", api_key="any") as openai:
            calls = (
                openai.completions.create(model="model", prompt=[[7, number]], n=2, seed=number, max_tokens=30)
                for number in range(8)
            )
            return await asyncio.gather(*calls)

    model = load_model(folder)
    for number, completion in enumerate(asyncio.run(ask())):
        for choice in completion.choices:
            generator = torch.Generator().manual_seed(number + choice.index)
            expected = generate(model, torch.tensor([[7, number]]), 30, generator=generator)
            assert content(choice) == bytes(map(int, expected))


@client("openai", "logprobs and echo", "the model's log-probabilities; null for the first byte")
def test_scores_are_the_models(openai: Any, folder: Path) -> None:
    completion = openai.completions.create(model="model", prompt="a stride", logprobs=2, echo=True, max_tokens=0)
    with torch.no_grad():
        expected = load_model(folder)(torch.tensor([list(b"a stride")])).double().log_softmax(-1)[0]
    logprobs = completion.choices[0].logprobs
    assert completion.choices[0].text == "a stride" and logprobs.tokens == list("a stride")
    assert logprobs.token_logprobs[0] is None
    for row, byte, value in zip(expected[1:], b" stride", logprobs.token_logprobs[1:], strict=True):
        assert math.isclose(value, row[byte], rel_tol=1e-6)


@client("openai", "stop, n, logit_bias, penalties, user", "as at OpenAI; stops of any characters")
def test_settings_are_openais(openai: Any) -> None:
    only = {str(byte): -100 for byte in range(256) if byte not in "ä€ab".encode()}
    fields = {"model": "model", "prompt": "", "logit_bias": only, "max_tokens": 50, "seed": 2, "temperature": 9}
    fields["user"] = "u"
    several = openai.completions.create(**fields, n=3, presence_penalty=0.5, frequency_penalty=-0.5)
    assert len({choice.text for choice in several.choices}) == 3
    text = openai.completions.create(**fields).choices[0].text
    stop = next((character for character in ("ä", "€") if character in text), text[-2:])
    stopped = openai.completions.create(**fields, stop=[stop, "never"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text.partition(stop)[0], "stop")


@client("openai", "models.list, models.retrieve", "the served model, with `max_model_len`")
def test_models_are_listed(openai: Any) -> None:
    (listed,) = openai.models.list()
    assert listed == openai.models.retrieve("model")
    assert (listed.id, listed.object, listed.owned_by, listed.max_model_len) == ("model", "model", "longstride", 64)


@client(
    "openai",
    "a wrong model, a wrong field, chat, a server that is full, a time-out",
    "NotFoundError, BadRequestError with `param` and `code`, NotFoundError, InternalServerError, APITimeoutError",
)
def test_errors_are_its_exceptions(openai: Any, folder: Path) -> None:
    import openai as package

    create = openai.completions.create
    with pytest.raises(package.NotFoundError, match="model='gpt-4' is not served here; take 'model'") as error:
        create(model="gpt-4", prompt="a")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(package.BadRequestError, match="maximum context length is 64 tokens") as error:
        create(model="model", prompt="a" * 60, max_tokens=5)
    assert (error.value.code, error.value.type) == ("context_length_exceeded", "invalid_request_error")
    with pytest.raises(package.BadRequestError, match="suffix: the model continues the prompt and cannot see a suffix"):
        create(model="model", prompt="a", suffix="b")
    with pytest.raises(package.NotFoundError, match="nothing is here; take "):
        openai.chat.completions.create(model="model", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(package.APITimeoutError):
        create(model="model", prompt="a", max_tokens=60, n=100, timeout=0.001)
    with served(folder, waiting=0, contexts=1) as url:
        busy = openai.with_options(base_url=f"{url}v1")
        with busy.completions.create(model="model", prompt="a", max_tokens=60, n=100, stream=True) as under_way:
            next(iter(under_way))
            with pytest.raises(package.InternalServerError, match=r"asked for too much at once; try again in \d+ s"):
                busy.completions.create(model="model", prompt="a")
    with served(folder, seconds=1e-3) as url:
        late = openai.with_options(base_url=f"{url}v1", max_retries=5)  # it tries none: the server tells it so
        with pytest.raises(package.InternalServerError, match=r"took longer than 0\.001 s"):
            late.completions.create(model="model", prompt="a", max_tokens=60, n=100)


@client(
    "lm_eval",
    "`local-completions` on the server: loglikelihood_rolling of a document, generate_until",
    "`longstride sample --likelihood`'s sum to 1e-6; greedy text up to its stop",
)
def test_lm_eval_scores_by_the_server(tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    export = tiny_export(tmp_path / "model", "text", steps=20)
    add_hub_files(export)
    context = load_model(export).config.context
    text = content_of("text", context - 2, 1).decode(errors="ignore")
    assert "ä" in text
    with served(export) as url:
        harness = get_model("local-completions")(
            model="model", base_url=f"{url}v1/completions", tokenizer=str(export), trust_remote_code=True,
            tokenizer_backend="huggingface", max_length=context,
        )  # fmt: skip
        (score,) = harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
        until = {"until": ["e"], "max_gen_toks": 40, "temperature": 0}
        (continuation,) = harness.generate_until([Instance("generate_until", {}, ("sparse den", until), 0)])
    scored = likelihood(load_model(export), text.encode())
    assert math.isclose(-score, scored["loss_nats"] * scored["tokens"], rel_tol=1e-6)
    greedy = bytes(map(int, generate(load_model(export), torch.tensor([list(b"sparse den")]), 40, temperature=0)))
    assert continuation == greedy.decode(errors="replace").partition("e")[0]
