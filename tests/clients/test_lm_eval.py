"""lm_eval's figures are the project's own: of documents, answers and continuations, by its own command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from longstride.data_pipelines.building.build import build
from longstride.data_pipelines.order import split_bytes
from longstride.kernels import ConfigError
from longstride.launcher import cli
from longstride.launcher.generation.likelihood import likelihood
from longstride.launcher.models import load_model
from longstride.sparse_model import generate
from tests.clients.conftest import run_python
from tests.harness.clients import client
from tests.harness.data.builds import write_files
from tests.harness.runs import configuration, spawn
from tests.harness.tiny_models import content_of

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as bits of products depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tasks:
    """A folder of tasks over documents that lie beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, []
        folder.mkdir()

    def add(self, name: str, documents: list[dict[str, Any]], **content: Any) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        files = {"data_files": {"test": str(self.folder / f"{name}.jsonl")}}
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(head | content))
        self.names.append(name)

    def add_bits(self, name: str, texts: list[str]) -> None:
        content = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        self.add(name, [{"text": text} for text in texts], metric_list=[{"metric": "bits_per_byte"}], **content)

    def run(self, model: Any, **options: Any) -> dict[str, Any]:
        """Return results by task, with their samples."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        results = lm_eval.simple_evaluate(
            model=model,
            tasks=self.names,
            task_manager=TaskManager(include_path=str(self.folder), include_defaults=False),
            bootstrap_iters=0,
            **options,
        )
        for name in self.names:
            results["results"][name]["samples"] = sorted(results["samples"][name], key=lambda line: line["doc_id"])
        return results["results"]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tasks:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return Tasks(tmp_path / "tasks")


def ours(folder: Path, **options: Any) -> Any:
    from longstride.launcher.generation.lm_eval_model import LongstrideLM

    return LongstrideLM(folder, device="cpu", **options)


def instance(kind: str, *arguments: Any) -> Any:
    """Return a request as lm_eval makes it."""
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0)


def text_of(size: int, seed: int) -> str:
    return content_of("text", 2 * size, seed).decode("utf-8", "ignore").encode()[:size].decode("utf-8", "ignore")


@client("lm_eval", "`longstride lm-eval --model longstride`: bits per byte", "every digit of `longstride evaluate`")
def test_command_gives_the_evaluations_figure(tmp_path: Path, tasks: Tasks, capsys: pytest.CaptureFixture[str]) -> None:
    texts = write_files(tmp_path / "texts", {f"{number}.txt": text_of(700, number).encode() for number in range(10)})
    build([texts], tmp_path / "data", validation_fraction=0.3)
    (tmp_path / "run.json").write_text(json.dumps(configuration(tmp_path / "data", tmp_path / "run")))
    assert spawn(["--config", str(tmp_path / "run.json")], 1).codes == [0]
    assert cli.main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run"), "--batch", "1"]) == 0
    expected = json.loads(capsys.readouterr().out)
    held_out = b"".join(split_bytes(tmp_path / "data", "validation"))
    assert likelihood(load_model(tmp_path / "model"), held_out, batch_size=1)["loss_nats"] == expected["loss_nats"]
    tasks.add_bits("held_out", [held_out.decode()])
    words = ["lm-eval", "--model", "longstride", "--model_args", f"path={tmp_path / 'model'}", "--tasks", "held_out"]
    words += ["--include_path", str(tasks.folder), "--output_path", str(tmp_path / "results")]
    environment = {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "cache")}
    ended = run_python("-m", "longstride.launcher.cli", *words, **environment)
    assert ended.returncode == 0, ended.stderr
    (results,) = (tmp_path / "results").rglob("results_*.json")
    report = json.loads(results.read_text())
    assert report["results"]["held_out"]["bits_per_byte,none"] == expected["bits_per_byte"]
    assert report["config"]["model_sha"] == json.loads((tmp_path / "model/config.json").read_text())["fingerprint"]


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"min_context": 100, "dtype": "float32"}], ids=str)
def test_documents_cost_what_the_likelihood_says(words: Path, tasks: Tasks, options: dict[str, Any]) -> None:
    documents = [text_of(size, size) for size in (1000, 1, 192, 193, 77)]
    tasks.add_bits("documents", documents)
    results = tasks.run(ours(words, **options))["documents"]
    model = load_model(words)
    lines = [likelihood(model, text.encode(), min_context=options.get("min_context", 0)) for text in documents]
    sums = [line["loss_nats"] * line["tokens"] for line in lines]
    assert [-sample["bits_per_byte"][0] for sample in results["samples"]] == pytest.approx(sums, rel=1e-6)
    total = sum(len(text.encode()) for text in documents)
    assert results["bits_per_byte,none"] == pytest.approx(sum(sums) / total / 0.6931471805599453, rel=1e-6)


def sums(folder: Path, text: str, answer: str) -> tuple[float, bool]:
    """Return an answer's log-probability after what fits in the context, and whether it is the greedy answer."""
    model = load_model(folder)
    content, count = (text + answer).encode()[-model.config.context :], len(answer.encode())
    with torch.no_grad():
        tokens = torch.tensor([list(content)])
        logits = model(tokens)[0, -count:]
    targets = tokens[0, -count:]
    return -float(F.cross_entropy(logits, targets, reduction="sum")), bool((logits.argmax(-1) == targets).all())


@client("lm_eval", "multiple choice, behind texts longer than the context too", "sums of the model's log-softmax")
def test_answers_cost_what_the_network_says(words: Path, tasks: Tasks) -> None:
    choices = ["sparse", "trän", "bytes", "long"]
    questions = [{"question": text_of(size, size)} for size in (0, 30, 400)]
    content = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": choices}
    tasks.add("choices", questions, doc_to_target=0, metric_list=[{"metric": "acc"}], **content)
    results = tasks.run(ours(words, batch_size=5))["choices"]
    for question, sample in zip(questions, results["samples"], strict=True):
        expected = [sums(words, question["question"], f" {choice}") for choice in choices]
        assert [float(score) for score, _ in sample["filtered_resps"]] == pytest.approx(
            [s for s, _ in expected], rel=1e-5
        )
        assert [likeliest in (True, "True") for _, likeliest in sample["filtered_resps"]] == [g for _, g in expected]
    assert 0 <= results["acc,none"] <= 1


def test_answer_longer_than_the_context_counts_each_byte_once(words: Path) -> None:
    answer = text_of(500, 1)
    (results,) = ours(words).loglikelihood([instance("loglikelihood", "dense ", answer)], disable_tqdm=True)
    stream, model, expected = ("dense " + answer).encode(), load_model(words), 0.0
    for end in (len(stream), len(stream) - 192, len(stream) - 384):
        piece = torch.tensor([list(stream[max(0, end - 192) : end])])
        with torch.no_grad():
            nats = model(piece, return_nats=True)[0]
        expected += float(nats[6 if end < 192 else 0 :].sum())
    assert results == (pytest.approx(-expected, rel=1e-5), False)


@client(
    "lm_eval", "`generate_until`, with stop strings that are not ASCII", "`longstride sample`'s bytes up to the string"
)
def test_continuations_stop_where_the_task_says(words: Path, tasks: Tasks) -> None:
    prompts = ["sparse dense", "tr", "", "x" * 300, "byte stride "]
    model = load_model(words)

    def greedy(prompt: str) -> str:
        inputs = torch.tensor([list(prompt.encode())], dtype=torch.int64)
        return bytes(int(token) for token in generate(model, inputs, 40, temperature=0, slide=True)).decode(
            "utf-8", "replace"
        )

    settings = {"until": ["ä", "\n\n"], "max_gen_toks": 40}
    content = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": ""}
    content |= {"generation_kwargs": settings, "metric_list": [{"metric": "exact_match"}]}
    tasks.add("go_on", [{"text": prompt} for prompt in prompts], **content)
    results = [sample["resps"][0][0] for sample in tasks.run(ours(words))["go_on"]["samples"]]
    expected = [greedy(prompt) for prompt in prompts]
    assert results == [text.partition("ä")[0] for text in expected]
    assert any("ä" in text for text in expected) and not all("ä" in text for text in expected)


def test_what_it_is_not_given_rightly_is_told_in_one_line(words: Path, tmp_path: Path) -> None:
    rules = [
        ({"path": None}, "path: must be given; path=FOLDER of an export"),
        ({"path": words, "pretrained": "x"}, "--model_args: pretrained: is not supported; path=FOLDER of an export"),
        ({"path": words, "batch_size": 0}, "batch_size=0: must be at least 1, or auto"),
        ({"path": words, "dtype": "int8"}, "dtype=int8: must be one of"),
        ({"path": words, "min_context": 192}, "min_context=192: must be from 0 to 191"),
        ({"path": tmp_path}, "has no config.json"),
    ]
    from longstride.launcher.generation.lm_eval_model import LongstrideLM

    for arguments, rule in rules:
        with pytest.raises(ConfigError, match=rule):
            LongstrideLM(**arguments)
    rule = r"generation_kwargs\.num_beams: is not supported; supported are until, max_gen_toks"
    with pytest.raises(ConfigError, match=rule):
        ours(words).generate_until([instance("generate_until", "a", {"num_beams": 2})])


def test_settings_of_a_task_are_lm_evals(words: Path) -> None:
    model = ours(words)

    def said(**settings: Any) -> str:
        return str(model.generate_until([instance("generate_until", "sparse ", settings)])[0])

    greedy = said(max_gen_toks=40)
    # Tasks switch sampling on beside a temperature that switches it off.
    assert said(max_completion_tokens=40, do_sample=True, temperature=0.0) == greedy
    assert said(max_gen_toks=40, do_sample=False, temperature=2.0) == greedy
    assert said(max_gen_toks=40, do_sample=True) != greedy
    for end in range(3, 40):  # a string and its end are reached at once, and neither is left
        stops = [greedy[end - 1 : end], greedy[end - 3 : end]]
        if greedy.index(stops[0]) == end - 1:
            assert said(max_gen_toks=40, until=stops) == greedy[: end - 3]
            break
    else:
        raise AssertionError("no character is new")


def test_arguments_of_the_model_go_before_options(words: Path) -> None:
    from longstride.launcher.generation.lm_eval_model import LongstrideLM

    arguments = {"path": str(words), "batch_size": 3, "device": "cpu"}
    model = LongstrideLM.create_from_arg_obj(arguments, {"batch_size": 1, "device": "cuda:0", "max_batch_size": None})
    assert (model.batch_size, str(model._device)) == (3, "cpu")


def plain(folder: Path) -> dict[str, Any]:
    """Return the arguments of `lm_eval --model hf`."""
    return {"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32", "device": "cpu"}


@client(
    "lm_eval", "`--model hf`: documents below the context, answers, continuations", "the same figures up to rounding"
)
def test_plain_path_has_the_same_figures(words: Path, tasks: Tasks) -> None:
    documents = [text_of(size, size) for size in (1, 77, 191)]
    tasks.add_bits("short", documents)
    choices = {"doc_to_text": "{{text}}", "doc_to_choice": ["sparse", "trän"], "doc_to_target": 1}
    tasks.add("choices", [{"text": "dense"}, {"text": "tr"}], output_type="multiple_choice", **choices)
    settings = {"until": ["ä"], "max_gen_toks": 40}
    content = {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": ""}
    tasks.add("go_on", [{"text": "sparse dense"}, {"text": "tr"}], generation_kwargs=settings, **content)
    results, expected = tasks.run("hf", model_args=plain(words)), tasks.run(ours(words))

    def answers(results: dict[str, Any], name: str) -> list[Any]:
        return [sample["filtered_resps"] for sample in results[name]["samples"]]

    assert answers(results, "go_on") == answers(expected, "go_on")
    for theirs, mine in zip(answers(results, "choices"), answers(expected, "choices"), strict=True):
        assert [likeliest for _, likeliest in theirs] == [likeliest for _, likeliest in mine]
        assert [score for score, _ in theirs] == pytest.approx([score for score, _ in mine], rel=1e-5)
    for theirs, mine in zip(answers(results, "short"), answers(expected, "short"), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-6)


@client("lm_eval", "`--model hf`: longer documents", "a number; only the first window has a start token")
def test_plain_path_has_a_figure_of_longer_documents(words: Path, tasks: Tasks) -> None:
    text = text_of(600, 1).encode()[: 191 * 3].decode("utf-8")
    tasks.add_bits("long", [text])
    results = tasks.run("hf", model_args=plain(words))["long"]
    stream, model, expected = torch.tensor([list(text.encode())]), load_model(words), 0.0
    with torch.no_grad():
        for begin in range(0, stream.shape[1], 191):
            nats = model(stream[:, max(0, begin - 1) : begin + 191], return_nats=True)[0]
            expected += float(nats[1 if begin else 0 :].sum())
    assert -results["samples"][0]["bits_per_byte"][0] == pytest.approx(expected, rel=1e-6)
