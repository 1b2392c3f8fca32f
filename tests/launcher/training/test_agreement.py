"""Ranks that were given different runs say so before anything is built, in the same words on each of them."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import longstride
from longstride.data_pipelines.shards import index_tars
from longstride.launcher.config import RunConfig, load_config
from longstride.launcher.data.run import RunSetup, resolve_steps
from longstride.launcher.data.run_data import TrainingData
from longstride.launcher.output.messages import AgreedError
from longstride.launcher.ranks import code_digest
from longstride.launcher.ranks.processes import Ranks
from longstride.launcher.training import resume
from longstride.launcher.training.resume import check_agreement
from longstride.sparse_model import ModelConfig
from tests.harness.data.tars import write_tar
from tests.launcher.data.test_batches import Meeting

Agreed = Callable[..., str | None]


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> Agreed:
    """A function of the ranks' configurations -> what all of them say, in the same words; None where they agree."""

    def run(*configs: RunConfig, resume: tuple[str, ...] = ()) -> str | None:
        Meeting(len(configs)).replace_collectives(monkeypatch)

        def one(rank: int) -> None:
            ranks = Ranks(rank, rank, len(configs))
            option = resume[rank] if resume else "never"
            asked = RunSetup(configs[rank], ranks, TrainingData(configs[rank], ranks), resume=option)
            check_agreement(asked, [f"host{each} 4026531836 4026531840" for each in range(len(configs))])

        with ThreadPoolExecutor(len(configs)) as pool:
            done: list[Future[None]] = [pool.submit(one, rank) for rank in range(len(configs))]
        errors = [each.exception() for each in done]
        assert all(error is None or isinstance(error, AgreedError) for error in errors), errors
        (line,) = {None if error is None else str(error) for error in errors}
        return line

    return run


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ("train.learning_rate=0.003", "train.learning_rate=0.03", "train.learning_rate=0.003:"),
        ("model.dropout=0.1", "model.dropout=0", "model.dropout=0.1:"),
        ("model.rotary={}", "model.rotary=null", "model.rotary.base=10000.0:"),
        ("train.seed=0", "train.seed=1", "train.seed=0:"),
        ("deepspeed=zero1_bf16", "deepspeed=zero1_fp32", "deepspeed.bf16.enabled=true:"),
    ],
)
def test_first_difference_is_named_with_both_values(
    agreed: Agreed, config_file: Path, first: str, second: str, line: str
) -> None:
    """Of two out of three ranks, the first one that has it otherwise is named."""
    configs = [load_config(config_file, [override]) for override in (first, first, second)]
    said = agreed(*configs)
    second = r"rank 2 on host2 (has \S+|leaves it out)"
    expected = rf"{re.escape(line)} rank 0 on host0 has it, and {second}; give all ranks the same configuration"
    assert said is not None and re.fullmatch(expected, said), said
    assert "\n" not in said


def test_value_that_is_left_out_is_told_from_either_side(agreed: Agreed, config_file: Path) -> None:
    configs = [load_config(config_file, overrides) for overrides in ([], ["model.convolution=4"])]
    assert agreed(*configs) == (
        "model.convolution: rank 0 on host0 leaves it out, and rank 1 on host1 has 4; "
        "give all ranks the same configuration"
    )
    assert agreed(*configs[::-1]) == (
        "model.convolution=4: rank 0 on host0 has it, and rank 1 on host1 leaves it out; "
        "give all ranks the same configuration"
    )


def test_other_data_is_told_before_what_follows_from_it(agreed: Agreed, config_file: Path, tmp_path: Path) -> None:
    """The steps of a run given in epochs are other ones there."""
    for name, lengths in {"a": (900, 90), "b": (9000, 90), "c": (900, 91)}.items():
        tars = tmp_path / f"tars-{name}"
        tars.mkdir()
        for split, length in zip(("train", "validation"), lengths, strict=True):
            write_tar(tars / f"{split}-0.tar", [("text.txt", b"x" * length)])
        index_tars([str(tars)], tmp_path / name)
    given = ["train.epochs=1", "train.warmup_steps=0", "model.context=16"]
    loaded = [load_config(config_file, [*given, f'data.path="{tmp_path / name}"']) for name in "abc"]
    datas = [TrainingData(config, Ranks()) for config in loaded]
    a, b, c = (resolve_steps(config, data) for config, data in zip(loaded, datas, strict=True))
    assert a.train.steps != b.train.steps
    for configs, split in (((a, b), "train"), ((a, c), "validation")):
        assert agreed(*configs) == (
            f'data.path="{configs[0].data.path}": has another split {split} for rank 0 on host0 than '
            f"{configs[1].data.path} has for rank 1 on host1; give all hosts the same data"
        )


def test_what_hosts_have_of_their_own_may_differ(agreed: Agreed, config_file: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").symlink_to(data)
    own = [f"data.path={tmp_path / 'moved'}", "data.workers=2", "data.prefetch=5", "notes=mine"]
    own += [f"data.remote.cache={tmp_path}", "data.remote.parallel=3", f"train.output={tmp_path / 'mounted'}"]
    own += ["deepspeed.aio.queue_depth=16", "deepspeed.flops_profiler.output_file=flops", "deepspeed.log_level=error"]
    own += ['deepspeed.csv_monitor={"enabled": true, "output_path": "here"}']
    assert agreed(load_config(config_file), load_config(config_file, own)) is None


def test_number_may_be_written_in_several_ways(agreed: Agreed, config_file: Path) -> None:
    clipping = [[f"deepspeed.gradient_clipping={number}"] for number in ("1", "1.0", "1.5")]
    one, same, other = (load_config(config_file, overrides) for overrides in clipping)
    assert agreed(one, same) is None
    said = agreed(one, same, other)
    assert said is not None and "rank 0 on host0 has it, and rank 2 on host2 has 1.5" in said


def test_options_are_agreed_on(agreed: Agreed, config_file: Path) -> None:
    config = load_config(config_file)
    said = agreed(config, config, resume=("auto", "never"))
    assert said is not None and said.startswith(
        '--resume="auto": rank 0 on host0 has it, and rank 1 on host1 has "never"'
    )


@pytest.mark.parametrize("name", ["torch", "own_parts.recurrence:GatedRecurrence"])
def test_other_packages_are_told_first(
    agreed: Agreed, config_file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    versions, lock = iter(["2.12.1", "2.13.0"]), threading.Lock()

    def recorded(model: ModelConfig) -> dict[str, str]:
        with lock:
            return {name: next(versions, "2.13.0")}

    monkeypatch.setattr(resume, "package_versions", recorded)
    said = agreed(*(load_config(config_file, [f"train.seed={seed}"]) for seed in range(2)))
    assert said is not None and said.startswith(f'{name}="2.1'), said
    assert said.endswith("; install the same on all hosts")


def test_other_code_of_the_same_version_is_told(
    agreed: Agreed, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter([f"{number}" * 64 for number in range(2)])
    monkeypatch.setattr(resume, "code_digest", lambda: next(digests))
    said = agreed(*[load_config(config_file)] * 2)
    assert said is not None and said.startswith('longstride="code '), said
    assert said.endswith("; install the same on all hosts")


def test_code_is_known_by_the_python_files_of_every_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, room = tmp_path / "longstride", tmp_path / "room"
    for folder in (package, room):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (package / "room").symlink_to(room)
    monkeypatch.setattr(longstride, "__file__", str(package / "__init__.py"))
    before = code_digest()
    (room / "notes.md").write_text("not run")
    (room / ".#rates.py").symlink_to("nowhere")  # as Emacs marks a file
    assert code_digest() == before
    (room / "rates.py").write_text("RATE = 1")
    one = code_digest()
    (room / "rates.py").write_text("RATE = 2")
    assert len({before, one, code_digest()}) == 3
