"""What a person may get wrong on the command line: one line says it, by a documented code, and nothing is written."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.harness.runs import files_under
from tests.hostile.commands import Commands

MANY = "9" * 400  # digits
# (words, part of the line). They run in the fixture `place`: data, run, run.json, model, text, text.lsz, noise,
# tables, which has other files than texts, and the files of conftest.BASES.
WRONG: list[tuple[str, str]] = [
    # No verb, no option, no value: the parser says so for every verb alike.
    ("trian", "no verb trian; did you mean train"),
    ("data", "no verb data; did you mean data build"),
    ("data biuld text", "no verb data biuld; did you mean data build"),
    ("--resume auto", "no verb --resume"),
    ("plan", "the following arguments are required: CONFIG; `longstride plan --help`"),
    ("train", "the following arguments are required: --config; `longstride train --help` lists the options"),
    ("train run.json", "the following arguments are required: --config; `longstride train --help` lists the"),
    ("train --config", "argument --config: expected one argument; `longstride train --help` lists the"),
    ("train --config run.json --resumption auto", "unrecognized arguments: --resumption; `longstride train"),
    ("data show data --count three", "argument --count: invalid int value: 'three'; `longstride data show"),
    ("show patern run.json --output new.png", "no verb show patern; did you mean show pattern"),
    # What is not there, or something else.
    ("plan noise", "noise: must be UTF-8; byte 128 is not"),
    ("train --config run.json data.path=text", "text: is a file, not a data folder; build one from it with"),
    ("train --config run.json data.path=run", "run: lacks manifest.json, so it is not a data folder;"),
    ("train --config run.json data.path=ftp://example.org/data", "ftp://example.org/data: fsspec needs more"),
    ("train --config run.json train.output=text", "train.output=\"text\": must be a folder, and is a file"),
    ("train --config run.json train.output=text/below", "train.output=\"text/below\": "),
    ("train --config run.json train.output=s3://bucket/run", "train.output=\"s3://bucket/run\": must be a"),
    ("train --config run.json --hostfile noise", "--hostfile=noise: is not text; write a line for each host,"),
    ("evaluate missing", "missing: no such run folder"),
    ("evaluate data", "data/checkpoints: no checkpoint; complete ones: none"),
    ("evaluate run --step 3", "run/checkpoints: no checkpoint of step 3; complete ones: 4, 8"),
    ("evaluate run --data missing", "missing: no such folder; build one with `longstride"),
    ("evaluate run --data run", "run: lacks manifest.json, so it is not a data folder; build one with `longstride"),
    ("report missing --output new.html", "missing: no such folder; such as runs/demo"),
    ("export missing --output new", "missing: no such run folder"),
    ("export model --output new", "model: is an exported model, not a run; name the folder that"),
    ("evaluate model", "or score a file with `longstride sample model --likelihood FILE`"),
    ("export run --output new --step 3", "run/checkpoints: no checkpoint of step 3; complete ones: 4, 8"),
    ("sample missing", "missing: has no config.json; name a folder written by `longstride export RUN"),
    ("sample model --likelihood missing", "--likelihood=missing: No such file or directory"),
    ("compress text --model model --output text.lsz", "--output=text.lsz: already exists and is"),
    ("decompress text.lsz --model model --output text", "--output=text: already exists and is"),
    ("data verify missing", "missing: no such folder; build one with `longstride"),
    ("data verify run", "run: lacks manifest.json, so it is not a data folder; build one with"),
    ("data show data --split test", "data/manifest.json: has no split 'test'; it has train, validation"),
    ("data build noise --output new --modality image", "noise: cannot be read as a picture (not one of PNG,"),
    ("data build text --output new --labels", "text: has no text.cls with its class; add it, or leave out --labels"),
    ("data index text --output new", "text: must be the name of a tar, such as train-000.tar; rename it"),
    ("data index missing --output new", "missing: no such file or folder; name tars, or a folder that holds"),
    ("show attention data --output new.png", "data/checkpoints: no checkpoint; complete ones: none"),
    ("slurm --config missing.json --nodes 1 --processes-per-node 1 --time 1:00:00", "missing.json: cannot be read:"),
    # Values that cannot be.
    ("plan run.json train.stesp=3", "train.stesp: unknown key; nearest steps"),
    ("plan run.json learning_rate=3", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("plan run.json train.steps", "train.steps: must be path.to.key=value, such as train.steps=100"),
    (f"plan run.json train.steps={MANY}", "train.steps: an integer of 400 digits; at most 39 are allowed"),
    (f"plan run.json train.learning_rate={MANY}", "train.learning_rate: an integer of 400 digits; at most 39"),
    ("plan run.json train.learning_rate=1e999", "train.learning_rate: 1e999 is beyond the largest number;"),
    ("plan run.json train.betas=[0.9]", "train.betas[1]: required, and missing"),
    ("plan run.json data.workers=1000000", "data.workers=1000000: must be less than or equal to 1024"),
    ("plan run.json data.prefetch=1000000000", "data.prefetch=1000000000: must be less than or equal to"),
    ("plan run.json data.separator=256", "data.separator=256: must be less than or equal to 255"),
    ("plan run.json data.remote.parallel=1000000", "data.remote.parallel=1000000: must be less than or"),
    ("plan run.json model.width=33", "model.width=33: 33 channels must divide into heads=2; nearest heads 1"),
    ("plan run.json model.attention.type=sparse", "model.attention.type=\"sparse\": must be a pattern's name;"),
    ("plan run.json model.dropout=1.5", "model.dropout=1.5: must be less than 1"),
    ("plan run.json deepspeed.train_batch_size=8", "deepspeed.train_batch_size: give train.global_batch"),
    ("plan run.json deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.stage=4: must be 0,"),
    ("plan run.json model=7", "model=7: must be an object"),
    ("plan run.json model.layers.first=7", "model.layers=2: has no key first to override"),
    (f"plan run.json --processes {MANY}", "--processes="),
    ("train --config run.json model.vocabulary=100", "model.vocabulary=100: the data contains byte 121; 256 allows"),
    ("train --config run.json train.steps=1000000000000000000000", "train.steps=1000000000000000000000:"),
    (f"train --config run.json --resume {MANY}", "--resume="),
    ("train --config run.json --resume 3 train.output=run", "run/checkpoints: no checkpoint of step 3;"),
    (f"train --config run.json --replay {MANY}", "--replay="),
    (f"train --config run.json --profile {MANY}", "--profile="),
    ("train --config run.json --processes 0", "--processes=0: must be at least 1"),
    (f"train --config run.json --processes {MANY}", "processes: a run has at most 16,384; start fewer"),
    ("train --config run.json --max-restarts -1", "--max-restarts=-1: must be at least 0"),
    (f"evaluate run --step {MANY}", "argument --step: "),
    ("evaluate run --batch 0", "--batch=0: must be from 1 to 65,536 contexts; such as 4"),
    (f"evaluate run --batch {MANY}", "--batch="),
    (f"evaluate run --min-context {MANY}", "--min-context="),
    ("export run --output new --device tpu", "--device=tpu: cannot be used: Expected one of cpu, cuda, ipu,"),
    ("sample model --bytes 0", "--bytes=0: must be at least 1"),
    (f"sample model --bytes {MANY}", "sample: prompt and sample are "),
    (f"sample model --count {MANY}", "--count="),
    ("sample model --count 0", "--count=0: must be from 1 to 65,536; such as 4"),
    ("sample model --temperature nan", "sample: temperature=nan: must be a number from 0, which takes the"),
    ("sample model --top-p 2", "sample: top_p=2.0: must be above 0 and at most 1; leave it out to sample"),
    (f"sample model --seed {MANY}", "--seed="),
    (f"sample model --likelihood text --batch {MANY}", "--batch="),
    ("data show data --count 0", "count=0: must be at least 1"),
    ("data build noise --output new --modality image --image-size 0x0", "--image-size=0x0: must be height x"),
    (f"data build noise --output new --modality image --image-size {MANY}x1", "--image-size="),
    (f"data build noise --output new --modality audio --rate {MANY}", "--rate="),
    (f"serve model --contexts {MANY}", "--contexts="),
    ("show pattern run.json --output new.png --query 64", "--query=64: must be from 0 to 63, a position;"),
    (f"show pattern run.json --output new.png --query {MANY}", "--query="),
    (f"show attention run --output new.png --context-number {MANY}", "--context-number="),
    ("slurm --config run.json --nodes 0 --processes-per-node 1 --time 1:00:00", "--nodes=0: must be at least 1"),
    ("slurm --config run.json --nodes 1 --processes-per-node 1 --time soon", "--time=soon: must be"),
    ("slurm --config run.json --nodes 1 --processes-per-node 1 --time 1:00:00 --output-dir text", "/text: is a file"),
    # longstride new.
    ("new mine more", "unrecognized arguments: more; `longstride new --help` lists the options"),
    ("new mine --data data train.steps=3", "unrecognized arguments: train.steps=3; `longstride new --help` lists"),
    ("new 'my run' --data data", "NAME=my run: must be at most 100 letters, digits, dots, dashes and underscores,"),
    (f"new {MANY} --data data", ": must be at most 100 letters, digits, dots, dashes and underscores, the first a"),
    ("new mine --data ''", "--data=: must name a folder, such as data/mine; or leave it out"),
    ("new mine --data text", "--data=text: is a file, not a data folder; build one from it with `longstride"),
    ("new mine --data data --modality image", "--modality=image: data holds text; leave --modality out, or name"),
    ("new mine --data data --output run.json", "run.json: already exists; give another NAME, or another file"),
    ("new mine --data data --output mine.txt", "--output=mine.txt: must be a .json in a folder that exists; such as"),
    ("new mine --data data --output ''", "--output=.: already exists and is not overwritten"),
    ("new mine --data data --output /", "--output=/: already exists and is not overwritten"),
    ("new mine --data data --output missing/a.json", "--output=missing/a.json: must be a .json in a folder that"),
    ("new mine --data data --output text/a.json", "--output=text/a.json: must be a .json in a folder that exists"),
    ("new mine --data data --output /proc/a.json", "--output=/proc/a.json: cannot be written: No such file or"),
    (f"new mine --data data --processes {MANY}", ": must be an integer from 1 to 16,384; such as 8"),
    ("new mine --data data --memory 80GB", "--memory=80GB: must be a number from 1 to 1,000,000; such as 80"),
    # longstride doctor.
    ("doctor missing.json", "missing.json: cannot be read: No such file or directory"),
    ("doctor ''", "CONFIG=: must name a file, such as my.json, or a preset, such as demo"),
    ("doctor run", "run: no such file, and no preset of that name in ds_configs/experiments; known: bert_bytes,"),
    ("doctor text --json", "text:1:1: not JSON: Expecting value"),
    ("doctor train.steps=3", "train.steps=3: no such file; changes follow the configuration's file, as in"),
    ("doctor run.json run.json", "run.json: must be path.to.key=value, such as train.steps=100"),
    ("doctor run.json train.stesp=3", "train.stesp: unknown key; nearest steps"),
    (f"doctor run.json --processes {MANY}", ": must be from 1 to 16,384; such as 8"),
    ("doctor --hostfile data", "--hostfile=data: is a folder; write one with a line for each host, such as `node1"),
    ("doctor --hostfile noise", "--hostfile=noise: is not text; write a line for each host, such as `node1 slots=4`"),
    # The rate and the size of a plan.
    ("plan ''", "CONFIG=: must name a file, such as my.json, or a preset, such as demo"),
    ("plan train.steps=3", "train.steps=3: no such file; changes follow the configuration's file, as in my.json"),
    ("plan run.json --tflops 1e300", "--tflops=1e300: must be the TFLOP/s of a process, from 0.000001 to 1,000,000;"),
    (f"plan run.json --tflops {MANY}", ": must be the TFLOP/s of a process, from 0.000001 to 1,000,000; such as 0.1"),
    ("plan run.json --tflops 1 --measure", "argument --measure: not allowed with argument --tflops; `longstride"),
    ("plan run.json --processes two", "--processes=two: must be integers from 1 to 16,384; such as 8"),
    (f"plan run.json train.steps=null train.epochs=1 --contexts {MANY}", ": must be from 1 to 1,000,000,000,000; such"),
    # What a configuration extends, and keys at a wrong place.
    ("plan itself.json", "itself.json: extends=\"itself.json\": forms a cycle: itself.json extends itself.json;"),
    ("plan round.json", "about.json: extends=\"round.json\": forms a cycle: round.json extends about.json extends"),
    ("train --config lost.json", "lost.json: extends=\"missing.json\": no such file in the folder of lost.json, and"),
    ("train --config number.json", "number.json: extends=3: must be text: the path of a file, from this file's"),
    ("train --config schema.json", "schema.json: $schema: must be text, the file or address of a JSON schema; or"),
    ("train --config place.json", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("train --config run.json learning_rate=3", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("train --config run.json train.context=128", "train.context: unknown key; did you mean model.context"),
    ("train --config run.json extends=demo", "extends=\"demo\": can only be set in a file; to change the base, write"),
    ("train --config run.json '$schema=x'", "$schema=\"x\": can only be set in a file, for editors; leave it out"),
    ("train --config ''", "CONFIG=: must name a file, such as my.json, or a preset, such as demo"),
    # Where a run's first weights come from.
    ("train --config run.json --from run --from-step -1", "argument --from-step: -1: must be the number of a step, or"),
    (f"train --config run.json --from run --from-step {MANY}", ": must be the number of a step, or best; `longstride"),
    ("train --config run.json --from run --from-positions odd", "argument --from-positions: invalid choice: 'odd'"),
    # Reports and pictures.
    (f"report {'run ' * 13}--output new.html", "run: is run 13; a page compares at most 12"),
    ("report run --output new.html --positions run.json", "--positions=run.json: must be a JSON file that `longstride"),
    ("show attention model --text data --output new.png", "--text=data: cannot be read: is a folder, not a plain"),
    ("show attention run --output new.png --step three", "argument --step: three: must be the number of a step, or"),
    ("show pattern run.json", "--output: is missing; such as --output pattern.png, or --html pattern.html for a page"),
    ("show pattern data --html new.html", "data: holds no run: it has no config.json; name a run's folder or a JSON"),
    ("show pattern run.json --html missing/new.html", "--html=missing/new.html: must be a .html in a folder that"),
    ("show pattern run.json --html new.html --query -1", "--query=-1: must be from 0 to 63, a position; nearest 0"),
    ("show loss data --output new.png", "data: holds no run: it has no metrics.jsonl; name a folder that `longstride"),
    ("show loss text --output new.png", "text: is a file; name the folder that contains it; such as runs/demo"),
    # Shells and schemas.
    ("config schema --output /proc/a.json", "--output=/proc/a.json: cannot be written: No such file or directory;"),
    # Folders of other files than texts, and numbers that a manifest could not tell.
    ("data build tables --output new --suffix csv", "--suffix=csv: must begin with a dot, such as .csv"),
    ("data build tables --output new --suffix .", "--suffix=.: must be the ending of a file name, from its last dot"),
    ("data build tables --output new --suffix .CSV", "tables: no matching file (suffixes: .CSV); there are .csv"),
    ("data build tables --output new --suffix .csv", "--validation-fraction=0.05: holds out none of 4 bytes; add"),
    (f"data build tables --output new --all-files --seed {MANY}", ": must be from 0 to 2**63 - 1, such as 0"),
    (f"data build tables --output new --all-files --shard-bytes {MANY}", ": must be at most 9223372036854775807, such"),
    # Sampling and serving.
    ("sample model --prompt x --prompt-file text", "argument --prompt-file: not allowed with argument --prompt;"),
    ("sample model --bytes 1000", "take at most --bytes 64, or add --slide to continue beyond it"),
    ("sample model --output missing/new", "--output=missing/new: must lie in a folder that exists"),
    ("sample model --rate 8000", "--rate=8000: the model writes text; leave it out"),
    ("sample model --seed -1", "--seed=-1: must be from 0 to 2**63 - 1"),
    ("sample model --likelihood text --min-context 64", "--min-context=64: must be from 0 to 63, less than the"),
    ("serve model --host '' --port 0", "--host=\"\": must be an address of this machine; such as 127.0.0.1"),
    ("serve model --contexts 0", "--contexts=0: must be from 1 to 1,024"),
    ("serve model --max-bytes 0", "--max-bytes=0: must be at least 1"),
    ("serve model --name ''", "--name=\"\": must be a name, in characters"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda text: text[:80])
def test_wrong_words_are_told_in_one_line(commands: Commands, place: Path, words: str, message: str) -> None:
    before, names = files_under(place), set(place.iterdir())
    try:
        outcome = commands(*shlex.split(words), folder=place)
        line = outcome.check_refused()
        assert message in line, line
        assert files_under(place) == before
    finally:
        for path in set(place.iterdir()) - names:  # or the next would meet it
            shutil.rmtree(path)


def test_words_that_no_terminal_should_obey_are_shown(commands: Commands, place: Path) -> None:
    line = commands("plan", "\x1b[2J\x07\nname\u202e" + "x" * 100_000, folder=place).check_refused()
    assert line.isprintable()
    assert "\\x1b[2J\\x07" in line and "\\u202e" in line


def test_positions_of_another_kind_of_data_are_told(commands: Commands, place: Path, tmp_path: Path) -> None:
    words = ["train", "--config", "run.json", f"train.output={tmp_path / 'run'}", "train.steps=2"]
    outcome = commands(*words, 'model.embedding={"type": "audio", "row_width": 8}', folder=place)
    assert outcome.code == 0, outcome.err
    notice = "longstride: notice: model.embedding.type=audio: has positions as audio does, and the data is text"
    assert outcome.err.count("notice: ") == 1 and notice in outcome.err
    plain = commands(*words, f"train.output={tmp_path / 'plain'}", folder=place)
    assert plain.code == 0 and "notice" not in plain.err
