"""transformers' text generation with an export's tokenizer: pipelines, stop strings, streamers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from longstride.launcher.models import load_model
from longstride.sparse_model import generate
from tests.harness.clients import client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
PROMPTS = ["sparse tr", "", "byte", "dense stride byte tränen "]
OPTIONS = {"do_sample": False, "max_new_tokens": 30}


@pytest.fixture
def pipe(words: Path) -> Any:
    from transformers import pipeline

    return pipeline("text-generation", str(words), trust_remote_code=True)


def ours(folder: Path, prompt: str) -> str:
    """Run `longstride sample --temperature 0 --bytes 30`, after the prompt."""
    inputs = torch.tensor([list(prompt.encode())], dtype=torch.int64)
    sampled = generate(load_model(folder), inputs, 30, temperature=0)
    return bytes(int(token) for token in sampled).decode("utf-8", "replace")


def before_tears(folder: Path) -> str:
    """Return a prompt that the model continues by "änen s". Which it does depends on the processor of its training."""
    prompts = (f"{word} tr" for word in ("byte", "sparse", "dense", "stride"))
    return next(prompt for prompt in prompts if "änen s" in ours(folder, prompt))


@client("transformers", "`pipeline`, one prompt or a batch, padded, empty ones too", "`longstride sample`'s bytes")
def test_pipeline_continues_prompts_as_sample_does(words: Path, pipe: Any) -> None:
    expected = [prompt + ours(words, prompt) for prompt in PROMPTS]
    alone = [pipe(prompt, **OPTIONS)[0]["generated_text"] for prompt in PROMPTS]
    assert alone == expected
    pipe.tokenizer.add_bos_token = True  # transformers cannot pad what has no token at all
    batched = [continuation["generated_text"] for (continuation,) in pipe(PROMPTS, batch_size=3, **OPTIONS)]
    assert batched == expected
    (new,) = pipe(PROMPTS[0], return_full_text=False, **OPTIONS)
    assert new["generated_text"] == expected[0].removeprefix(PROMPTS[0])


@client("transformers", "`stop_strings` of any characters", "generation ends after the string's last byte")
@pytest.mark.parametrize("stop", ["ä", "n", "en s", "än"])
def test_stop_strings_are_bytes(words: Path, pipe: Any, stop: str) -> None:
    prompt = before_tears(words)
    text = ours(words, prompt)
    (continuation,) = pipe(prompt, stop_sequence=stop, return_full_text=False, **OPTIONS)
    assert continuation["generated_text"] == text.partition(stop)[0] + stop


def test_rows_that_have_stopped_are_padded(words: Path, pipe: Any) -> None:
    batch, tokenizer = [before_tears(words), "byte"], pipe.tokenizer
    inputs = tokenizer(batch, padding=True, return_tensors="pt")
    rows = pipe.model.generate(**inputs, stop_strings=["ä", "。"], tokenizer=tokenizer, **OPTIONS)
    expected = [
        prompt + (text.partition("ä")[0] + "ä" if "ä" in (text := ours(words, prompt)) else text) for prompt in batch
    ]
    assert tokenizer.decode(rows, skip_special_tokens=True) == expected
    assert rows[0, -1] == tokenizer.pad_token_id


@pytest.mark.parametrize("stop", ["é", "。", "🙂", "x🙂", ">", "\n"])
def test_stop_strings_are_found_at_the_end_alone(pipe: Any, stop: str) -> None:
    """Use transformers' own criterion, which builds a table of the tokenizer's tokens."""
    from transformers import StopStringCriteria

    criterion, last = StopStringCriteria(pipe.tokenizer, [stop]), stop.encode()
    rows = [b"any x" + last, b"x" + last[:-1], last + b" ", last[:-1] + bytes([last[-1] ^ 1]), b"\xff\xc3" + last]
    batch = pipe.tokenizer.pad({"input_ids": [list(row) for row in rows]}, return_tensors="pt").input_ids
    expected = [row.endswith(last) for row in rows]
    assert criterion(batch, None).tolist() == expected


def test_streamed_text_is_the_whole(words: Path, pipe: Any) -> None:
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True)
    inputs = pipe.tokenizer("sparse tr", return_tensors="pt")
    pipe.model.generate(**inputs, streamer=streamer, **OPTIONS)
    pieces = list(streamer)
    assert "".join(pieces) == ours(words, "sparse tr") and len(pieces) > 5
