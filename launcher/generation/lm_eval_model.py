"""An exported model as a model for lm_eval: bytes are tokens, and scores equal `longstride sample --likelihood`.

Letters: B contexts at once, N positions a context, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import LM
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from longstride.data_pipelines.modalities import modality_named
from longstride.data_pipelines.plain_files import expand_path
from longstride.kernels import ConfigError
from longstride.launcher.generation.likelihood import MOST_POSITIONS, Piece, batches, check_bytes, piece_nats
from longstride.launcher.models import DTYPES, Exported, ModelData, load_model, require_finite_logits, usable_device
from longstride.launcher.output import say
from longstride.sparse_model import generate

_BYTE_VALUES = 256
_NEW_BYTES = 256  # lm_eval's default for other models


class LongstrideLM(LM):
    """An export whose tokens are the bytes of text.

    A document longer than the context is cut like packed documents in `longstride evaluate`, with the score of
    `longstride sample --likelihood`. If the text before an answer is longer, the model sees its last bytes.

    Args:
        path: folder written by `longstride export`.
        batch_size: contexts at once; "auto" or None: as many as are quick.
        max_batch_size: limit for "auto".
        device: None: a GPU if there is one.
        dtype: to compute in, by the project's or torch's name; None or "auto": as stored.
        min_context: earlier bytes that every byte of a long document sees; contexts overlap by them.
        trust_code: whether parts of the model from other packages may be imported.

    Raises:
        ConfigError: an argument or value is invalid, or the folder is no export of such a model.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        min_context: int = 0,
        trust_code: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        if others or path is None:
            wrong = f"{next(iter(others))}: is not supported" if others else "path: must be given"
            raise ConfigError(
                f"--model_args: {wrong}; path=FOLDER of an export, batch_size, device, dtype, min_context, trust_code"
            )
        automatic = batch_size is None or str(batch_size).startswith("auto")
        if not automatic and not (str(batch_size).isdigit() and int(str(batch_size)) > 0):
            raise ConfigError(f"batch_size={batch_size}: must be at least 1, or auto")
        self.batch_size = None if automatic else int(str(batch_size))
        self._most = max_batch_size if automatic else None
        types = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
        if dtype not in (None, "auto", *types):
            raise ConfigError(f"dtype={dtype}: must be one of {', '.join(types)}; auto means the stored one")
        try:
            exported = Exported(Path(expand_path(str(path))), trust_code=trust_code)
        except ValueError as error:
            raise ConfigError(f"path={path}: {error}") from None
        if exported.has_palette or exported.config.vocabulary > _BYTE_VALUES:
            raise ConfigError(f"path={path}: its tokens are not bytes of text, which lm_eval's tasks need")
        trained = ModelData.from_json(exported.content.get("data"), exported.config)
        self._differences = trained.differences(ModelData(modality_named("text"), {}))
        for difference in self._differences.values():
            say(f"notice: path={path}: a task is not what the model was trained on: {difference}")
        if type(min_context) is not int or not 0 <= min_context < exported.config.context:
            most = exported.config.context - 1
            raise ConfigError(f"min_context={min_context}: must be from 0 to {most}, less than the context")
        if min_context and exported.config.carries:
            raise ConfigError(f"min_context={min_context}: repeats bytes, but the model carries state; leave it out")
        self.path, self.min_context = exported.folder, min_context
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            say(f"device={device}: there is no GPU; the CPU is used")  # lm_eval's default
            device = "cpu"
        self._device = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype_of = None if dtype in (None, "auto") else types[dtype]
        self.model = load_model(self.path, self._device, dtype_of, trust_code=trust_code)
        self.model.config.require_next_token()
        self._fingerprint = exported.content.get("fingerprint", "")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LongstrideLM:
        """Make a model from `--model_args`, and from options that these do not set, which may be defaults."""
        others = {name: value for name, value in (additional_config or {}).items() if name not in arg_dict}
        return super().create_from_arg_obj(arg_dict, others)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval writes next to its results."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.embedding.start.dtype),
            "model_sha": self._fingerprint,
            **({"other_data": self._differences} if self._differences else {}),
        }

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each answer's log-probability after its text, in nats, and whether each of its bytes is the likeliest.

        If a text is too long, its last bytes are used. An answer longer than the context is cut from its end, so that
        its parts see as much as possible.
        """
        context = self.model.config.context
        pieces: list[Piece] = []
        nats: list[list[float]] = [[] for _ in requests]
        likeliest = [True for _ in requests]
        for number, request in enumerate(requests):
            before, answer = map(self._tokens, request.args)
            stream, end = np.concatenate([before, answer]), len(before) + len(answer)
            while end > len(before):
                start = max(0, end - context)
                pieces.append(Piece(number, stream[start:end], max(0, len(before) - start), end - start))
                end = start
        for chunk in self._chunks(pieces, "loglikelihood", disable_tqdm):
            for batch, tokens in batches(chunk, len(chunk)):
                targets = torch.from_numpy(tokens).to(self._device, torch.int64)
                with torch.no_grad():
                    logits = self.model(targets)  # (B, N, V)
                    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                    scores = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
                    greedy = logits.argmax(-1) == targets
                for row, piece in enumerate(batch):
                    scored = slice(piece.scored, len(piece.tokens))
                    nats[piece.owner] += scores.view(targets.shape)[row, scored].tolist()
                    likeliest[piece.owner] &= bool(greedy[row, scored].all())
        answers = [(-self._sum(terms), greedy) for terms, greedy in zip(nats, likeliest, strict=True)]
        return self._cache("loglikelihood", requests, answers)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each complete text, in nats."""
        pieces: list[Piece] = []
        totals = [0.0 for _ in requests]
        for number, request in enumerate(requests):
            stream = self._tokens(request.args[0])
            if len(stream):
                pieces += Piece.cut(stream, self.model.config.context, self.min_context, number)
        scores = (
            scored
            for chunk in self._chunks(pieces, "loglikelihood_rolling", disable_tqdm)
            for scored in piece_nats(self.model, chunk, len(chunk))
        )
        for number, group in groupby(scores, key=lambda scored: scored[0].owner):
            totals[number] = -self._sum([nat for _, nats in group for nat in nats.tolist()])
        return self._cache("loglikelihood_rolling", requests, totals)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each text, up to and without the first of the task's stop strings.

        If the context is full, generation continues from its newer half (`longstride sample --slide`). ConfigError if a
        task has a setting that `longstride sample` does not support.
        """
        texts = ["" for _ in requests]
        prompts = [self._tokens(request.args[0]) for request in requests]
        # A batch needs texts of one length and with the same settings.
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault((-len(prompts[number]), repr(request.args[1])), []).append(number)
        rows = self.batch_size or self._most or max(1, MOST_POSITIONS // self.model.config.context)
        progress = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        for _, numbers in sorted(groups.items(), key=lambda group: group[0]):
            settings, stops, count = _parse_settings(requests[numbers[0]].args[1])
            for first in range(0, len(numbers), rows):
                batch = numbers[first : first + rows]
                tokens = torch.from_numpy(np.stack([prompts[number] for number in batch])).to(self._device)
                for number, text in zip(batch, self._continue(tokens, count, stops, settings), strict=True):
                    texts[number] = text.decode("utf-8", "replace")
                progress.update(len(batch))
        progress.close()
        return self._cache("generate_until", requests, texts)

    def _continue(self, prompts: Tensor, count: int, stops: list[bytes], settings: dict[str, Any]) -> list[bytes]:
        """Continue each row of (B, n) tokens by at most ``count`` bytes, up to the first of ``stops``."""
        texts, open_rows = [bytearray() for _ in prompts], set(range(len(prompts)))
        with require_finite_logits(self.path):
            for tokens in generate(self.model, prompts, count, slide=True, **settings):
                values = tokens.tolist()
                for row in tuple(open_rows):
                    texts[row].append(values[row])
                    # The longest of several, because lm_eval cuts at each of them.
                    if reached := max((len(stop) for stop in stops if texts[row].endswith(stop)), default=0):
                        del texts[row][-reached:]
                        open_rows.remove(row)
                if not open_rows:
                    break
        return [bytes(text) for text in texts]

    def _tokens(self, text: str) -> np.ndarray:
        """Return the bytes of a text, (n,) uint8."""
        content = text.encode("utf-8", "surrogateescape")
        check_bytes(content, self.model)
        return np.frombuffer(content, dtype=np.uint8)

    def _chunks(self, pieces: list[Piece], what: str, disable_tqdm: bool) -> Iterator[list[Piece]]:
        """Yield the pieces of each batch, the widest first. Those of one text stay in order."""
        ordered, first = sorted(pieces, key=lambda piece: -piece.width), 0
        progress = tqdm(total=len(pieces), desc=what, disable=disable_tqdm)
        while first < len(ordered):
            quick = max(1, MOST_POSITIONS // ordered[first].width)
            rows = self.batch_size or min(quick, self._most or quick)
            yield ordered[first : first + rows]
            progress.update(min(rows, len(ordered) - first))
            first += rows
        progress.close()

    def _sum(self, nats: list[float]) -> float:
        """Sum nats with one rounding; ConfigError if the sum is not finite."""
        total = math.fsum(nats)
        with require_finite_logits(self.path):
            if not math.isfinite(total):
                raise FloatingPointError("logits are not finite")
        return total

    def _cache(self, what: str, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Add answers to lm_eval's cache, if there is one, and return them."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(what, request.args, answer)
        return answers


def _parse_settings(options: dict[str, Any]) -> tuple[dict[str, Any], list[bytes], int]:
    """Split a task's `generation_kwargs` into settings of ``generate``, stop strings and the most bytes."""
    remaining = dict(options)
    until = remaining.pop("until", None) or []
    stops = [stop.encode("utf-8") for stop in ([until] if isinstance(until, str) else until) if stop]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    counts = [remaining.pop(name, None) for name in names]
    count = next((int(count) for count in counts if count is not None), _NEW_BYTES)
    temperature, sampled = remaining.pop("temperature", None), remaining.pop("do_sample", None)
    if temperature is None:
        temperature = 1.0 if sampled else 0.0
    settings: dict[str, Any] = {"temperature": 0.0 if sampled is False else float(temperature)}
    settings |= {name: remaining.pop(name) for name in ("top_k", "top_p") if name in remaining}
    if remaining:
        supported = "until, max_gen_toks, do_sample, temperature, top_k, top_p"
        raise ConfigError(f"generation_kwargs.{next(iter(remaining))}: is not supported; supported are {supported}")
    return settings, stops, count
