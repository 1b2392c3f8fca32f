"""An exported model as lm_eval has models: bytes are the tokens, and sums are `longstride sample --likelihood`'s.

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
from longstride.launcher.models import DTYPES, Exported, ModelData, computing_numbers, load_model, usable_device
from longstride.launcher.output import say
from longstride.sparse_model import generate

_BYTE_VALUES = 256
_NEW_BYTES = 256  # where a task does not say how many, as lm_eval has it for other models


class LongstrideLM(LM):
    """An export whose tokens are the bytes of text.

    A document longer than the context is cut into contexts as `longstride evaluate` cuts packed documents; its score is
    that of `longstride sample --likelihood`. Of a longer text before an answer the last bytes are seen.

    Args:
        path: folder written by `longstride export`.
        batch_size: contexts at once; "auto" or None: as many as are quick.
        max_batch_size: what "auto" may choose at most.
        device: that computes; None: a GPU where there is one.
        dtype: to compute in, by the project's name or torch's; None or "auto": as it is stored.
        min_context: earlier bytes that every byte of a long document sees; contexts overlap by them.

    Raises:
        ConfigError: no such argument or value, or no export of such a model.
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
            wrong = f"{next(iter(others))}: is none of them" if others else "path: must be given"
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
            raise ConfigError(f"dtype={dtype}: must be one of {', '.join(types)}; auto is as the export is stored")
        try:
            exported = Exported(Path(expand_path(str(path))), trust_code=trust_code)
        except ValueError as error:
            raise ConfigError(f"path={path}: {error}") from None
        if exported.has_palette or exported.config.vocabulary > _BYTE_VALUES:
            raise ConfigError(f"path={path}: its tokens are no bytes of text, which lm_eval's tasks are")
        trained = ModelData.from_json(exported.content.get("data"), exported.config)
        self._differences = trained.differences(ModelData(modality_named("text"), {}))
        for difference in self._differences.values():
            say(f"notice: path={path}: a task is not what the model was trained on: {difference}")
        if type(min_context) is not int or not 0 <= min_context < exported.config.context:
            most = exported.config.context - 1
            raise ConfigError(f"min_context={min_context}: must be from 0 to {most}, less than the context")
        self.path, self.min_context = exported.folder, min_context
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            say(f"device={device}: there is no GPU; the CPU computes")  # lm_eval names one where nobody asked for it
            device = "cpu"
        self._device = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype_of = None if dtype in (None, "auto") else types[dtype]
        self.model = load_model(self.path, self._device, dtype_of, trust_code=trust_code)
        self._fingerprint = exported.content.get("fingerprint", "")

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> LongstrideLM:
        """A model of `--model_args`, and of options beside them where they do not name the same: some have defaults."""
        others = {name: value for name, value in (additional_config or {}).items() if name not in arg_dict}
        return super().create_from_arg_obj(arg_dict, others)

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval writes beside its results."""
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "model_dtype": str(self.model.embedding.start.dtype),
            "model_sha": self._fingerprint,
            **({"other_data": self._differences} if self._differences else {}),
        }

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of an answer behind a text, in nats, and whether each of its bytes is the likeliest.

        Of a text that is too long the last bytes are seen, as many as fit. An answer longer than the context is cut
        from its end, so that its parts see as much as they can.
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
            for taken, tokens in batches(chunk, len(chunk)):
                targets = torch.from_numpy(tokens).to(self._device, torch.int64)
                with torch.no_grad():
                    logits = self.model(targets)  # (B, N, V)
                    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
                    scores = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
                    greedy = logits.argmax(-1) == targets
                for row, piece in enumerate(taken):
                    scored = slice(piece.scored, len(piece.tokens))
                    nats[piece.owner] += scores.view(targets.shape)[row, scored].tolist()
                    likeliest[piece.owner] &= bool(greedy[row, scored].all())
        found = [(-self._sum(each), greedy) for each, greedy in zip(nats, likeliest, strict=True)]
        return self._kept("loglikelihood", requests, found)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in nats."""
        pieces: list[Piece] = []
        found = [0.0 for _ in requests]
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
            found[number] = -self._sum([nat for _, nats in group for nat in nats.tolist()])
        return self._kept("loglikelihood_rolling", requests, found)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each text, up to the first of the strings that a task stops at, which is left out.

        Where the context is full, its newer half goes on (`longstride sample --slide`).

        Raises:
            ConfigError: a task asks for what `longstride sample` does not do.
        """
        found = ["" for _ in requests]
        prompts = [self._tokens(request.args[0]) for request in requests]
        # Contexts stand side by side where texts have one length and are to be continued in one way.
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault((-len(prompts[number]), repr(request.args[1])), []).append(number)
        rows = self.batch_size or self._most or max(1, MOST_POSITIONS // self.model.config.context)
        shown = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        for _, numbers in sorted(groups.items(), key=lambda group: group[0]):
            settings, stops, count = _settings(requests[numbers[0]].args[1])
            for first in range(0, len(numbers), rows):
                taken = numbers[first : first + rows]
                known = torch.from_numpy(np.stack([prompts[number] for number in taken])).to(self._device)
                for number, text in zip(taken, self._continued(known, count, stops, settings), strict=True):
                    found[number] = text.decode("utf-8", "replace")
                shown.update(len(taken))
        shown.close()
        return self._kept("generate_until", requests, found)

    def _continued(self, known: Tensor, count: int, stops: list[bytes], settings: dict[str, Any]) -> list[bytes]:
        """What follows each of (B, n) tokens: at most so many bytes, and those before the first of ``stops``."""
        texts, open_rows = [bytearray() for _ in known], set(range(len(known)))
        with computing_numbers(self.path):
            for tokens in generate(self.model, known, count, slide=True, **settings):
                values = tokens.tolist()
                for row in tuple(open_rows):
                    texts[row].append(values[row])
                    # The longest of several: lm_eval cuts at each of them.
                    if reached := max((len(stop) for stop in stops if texts[row].endswith(stop)), default=0):
                        del texts[row][-reached:]
                        open_rows.remove(row)
                if not open_rows:
                    break
        return [bytes(text) for text in texts]

    def _tokens(self, text: str) -> np.ndarray:
        """Bytes of a text, (n,) uint8."""
        content = text.encode("utf-8", "surrogateescape")
        check_bytes(content, self.model)
        return np.frombuffer(content, dtype=np.uint8)

    def _chunks(self, pieces: list[Piece], what: str, disable_tqdm: bool) -> Iterator[list[Piece]]:
        """Pieces to be computed at once, the widest first; those of one text stay together."""
        ordered, first = sorted(pieces, key=lambda piece: -piece.width), 0
        shown = tqdm(total=len(pieces), desc=what, disable=disable_tqdm)
        while first < len(ordered):
            quick = max(1, MOST_POSITIONS // ordered[first].width)
            rows = self.batch_size or min(quick, self._most or quick)
            yield ordered[first : first + rows]
            shown.update(min(rows, len(ordered) - first))
            first += rows
        shown.close()

    def _sum(self, nats: list[float]) -> float:
        """Exact but for one rounding. Raises ConfigError where the model computes no numbers."""
        total = math.fsum(nats)
        with computing_numbers(self.path):
            if not math.isfinite(total):
                raise FloatingPointError("logits that are no numbers")
        return total

    def _kept(self, what: str, requests: Sequence[Any], found: list[Any]) -> list[Any]:
        """What was found, once lm_eval's cache of answers has it, if there is one."""
        for request, each in zip(requests, found, strict=True):
            self.cache_hook.add_partial(what, request.args, each)
        return found


def _settings(asked: dict[str, Any]) -> tuple[dict[str, Any], list[bytes], int]:
    """Of a task's `generation_kwargs`: settings of ``generate``, strings to stop at, and the most bytes.

    Raises:
        ConfigError: one that is not known, or is out of range.
    """
    left = dict(asked)
    until = left.pop("until", None) or []
    stops = [stop.encode("utf-8") for stop in ([until] if isinstance(until, str) else until) if stop]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    counts = [left.pop(name, None) for name in names]
    count = next((int(count) for count in counts if count is not None), _NEW_BYTES)
    temperature, sampled = left.pop("temperature", None), left.pop("do_sample", None)
    if temperature is None:
        temperature = 1.0 if sampled else 0.0
    settings: dict[str, Any] = {"temperature": 0.0 if sampled is False else float(temperature)}
    settings |= {name: left.pop(name) for name in ("top_k", "top_p") if name in left}
    if left:
        known = "until, max_gen_toks, do_sample, temperature, top_k, top_p"
        raise ConfigError(f"generation_kwargs.{next(iter(left))}: is none of {known}")
    return settings, stops, count
