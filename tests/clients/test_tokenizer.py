"""The tokenizer: bytes are the tokens, and the three that are no bytes never come from a text."""

import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.conftest import END, PADDING, START
from tests.harness.clients import client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return loaded(folder)


@client("transformers", "`AutoTokenizer`", "tokens are bytes; 256, 257, 258 are start, end and padding")
def test_tokens_are_bytes_and_specials_are_no_text(tokenizer: Any) -> None:
    written = "".join(map(tokenizer.decode, (START, END, PADDING)))
    text = f"  hä,\n\0<s></s><pad> ▁ €\t𝄞 don't {written} "
    for content in (text, ""):
        assert tokenizer(content).input_ids == list(content.encode())
        for skipped in (False, True):
            assert tokenizer.decode(list(content.encode()), skip_special_tokens=skipped) == content
    assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == list(text.encode())
    assert tokenizer.decode([0x68, 0xC3]) == "h\ufffd"
    assert (len(tokenizer), tokenizer.vocab_size) == (259, 256)
    assert tokenizer.all_special_ids == [START, END, PADDING]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (START, END, PADDING)
    row = [START, *b"a\0b", END, PADDING]
    assert tokenizer.decode(row, skip_special_tokens=True) == "a\0b"
    assert tokenizer.batch_decode([row, [0]], skip_special_tokens=True) == ["a\0b", "\0"]
    assert tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) == [1, 0, 0, 0, 1, 1]
    tokenizer.pad_token_id = 0  # what took the place of padding before there was any
    assert tokenizer.decode([0, *b"a"], skip_special_tokens=True) == "\0a"
    for wrong in (259, -1):
        with pytest.raises(ValueError, match=f"token {wrong}: does not exist; tokens are 0 to 258"):
            tokenizer.decode([wrong])


def test_batches_are_padded_on_either_side(tokenizer: Any) -> None:
    texts = ["ab", "", "c"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[97, 98], [PADDING] * 2, [PADDING, 99]]
    assert batch.attention_mask.tolist() == [[1, 1], [0, 0], [0, 1]]
    right = tokenizer(texts, padding="max_length", max_length=3, padding_side="right")
    assert right["input_ids"] == [[97, 98, PADDING], [PADDING] * 3, [99, PADDING, PADDING]]
    assert tokenizer.model_max_length == 63  # a context of 64, whose last byte nothing follows
    assert len(tokenizer("x" * 99, truncation=True).input_ids) == 63


def test_start_stands_in_front_where_it_is_asked_for(folder: Path, tmp_path: Path) -> None:
    tokenizer = loaded(folder, add_bos_token=True)
    assert tokenizer("").input_ids == [START]
    assert tokenizer("ab", "c").input_ids == [START, *b"abc"]
    assert tokenizer("ab", add_special_tokens=False).input_ids == list(b"ab")
    assert tokenizer("ab", return_special_tokens_mask=True).special_tokens_mask == [1, 0, 0]
    tokenizer.save_pretrained(tmp_path / "again")
    for again in (tokenizer.from_pretrained(tmp_path / "again"), copy.deepcopy(tokenizer)):
        assert again.add_bos_token and again("ab").input_ids == [START, *b"ab"]
        assert (again.model_max_length, again.padding_side, len(again)) == (63, "left", 259)
    again = tokenizer.from_pretrained(tmp_path / "again", add_bos_token=False)
    assert again("ab").input_ids == list(b"ab")


def test_saved_again_it_is_the_same(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    stub = (folder / "modeling_longstride.py").read_text()
    tokenizer.save_pretrained(folder)  # over the export's own, as Trainer does beside a model
    tokenizer.save_pretrained(tmp_path / "alone")
    names = ["added_tokens.json", "modeling_longstride.py", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == names
    assert (folder / "modeling_longstride.py").read_text() == stub
    for again in (loaded(folder), loaded(tmp_path / "alone"), pickle.loads(pickle.dumps(tokenizer))):
        assert again.get_vocab() == tokenizer.get_vocab()
        assert again("<s>").input_ids == list(b"<s>")
        assert again.special_tokens_map == tokenizer.special_tokens_map


def test_export_without_special_tokens_gets_them(folder: Path) -> None:
    """Load an export as written before there were special tokens."""
    content = {"tokenizer_class": "LongstrideTokenizer", "model_max_length": 64}
    content["auto_map"] = {"AutoTokenizer": ["modeling_longstride.LongstrideTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    old = loaded(folder)
    assert (old.bos_token_id, old.pad_token_id, old.model_max_length) == (START, PADDING, 64)
    assert old("é").input_ids == list("é".encode())


def test_further_tokens_are_refused(tokenizer: Any, folder: Path) -> None:
    rule = r"'\[PAD\]': is not a byte, and the model has no weights for other tokens; take one of <\|longstride_start"
    with pytest.raises(ValueError, match=rule):
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ValueError, match=rule):
        loaded(folder, pad_token="[PAD]")
    assert tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token}) == 0 and tokenizer.pad_token_id == END


def test_any_bytes_are_a_text_where_errors_are_escaped(folder: Path) -> None:
    tokenizer = loaded(folder, errors="surrogateescape")
    content = list(range(256))
    assert tokenizer(tokenizer.decode(content)).input_ids == content


def test_library_of_tokenizers_has_the_same_tokens(tokenizer: Any) -> None:
    text = "  hä,\n\0<s> ▁ €\t𝄞 don't "
    backend = tokenizer.backend_tokenizer
    assert backend.encode(text).ids == list(text.encode())
    assert backend.decode(list(text.encode())) == text


def test_a_megabyte_takes_less_than_a_second(tokenizer: Any) -> None:
    """Allow ten times what a machine of 2026 takes."""
    text = "häuser am meer " * 65536
    start = time.process_time()
    ids = tokenizer(text).input_ids
    assert time.process_time() - start < 1
    assert len(ids) == len(text.encode()) == 2**20


@client(
    "transformers", "`DataCollatorForLanguageModeling`, `DataCollatorWithPadding`", "padding is 258, its labels -100"
)
def test_collators_pad(tokenizer: Any) -> None:
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

    rows = [tokenizer(text) for text in ("abc", "\0")]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    assert batch["input_ids"].tolist() == [[97, 98, 99], [PADDING, PADDING, 0]]
    assert batch["labels"].tolist() == [[97, 98, 99], [-100, -100, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    padded = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4)(rows)
    assert torch.equal(padded["input_ids"], torch.tensor([[PADDING, 97, 98, 99], [PADDING, PADDING, PADDING, 0]]))
