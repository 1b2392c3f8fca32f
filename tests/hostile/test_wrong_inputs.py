"""What a person may get wrong on the command line: one line says it, by a documented code, and nothing is written."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.runs import ROOT, configuration, files_under, plain_environment
from tests.harness.tiny_models import random_export
from tests.hostile.commands import Commands

MANY = "9" * 400  # digits
# (words, what the line says). Words are run in a folder that has data, run, run.json, model, text, text.lsz, noise,
# tables, which has other files than texts, and the files of BASES.
BASES = {
    "itself.json": {"extends": "itself.json"},
    "round.json": {"extends": "about.json"},
    "about.json": {"extends": "round.json"},
    "lost.json": {"extends": "missing.json"},
    "number.json": {"extends": 3},
    "schema.json": {"extends": "run.json", "$schema": 3},
    "place.json": {"extends": "run.json", "learning_rate": 3},
}
WRONG: list[tuple[str, str]] = [
    # No verb, no option, no value.
    ("trian", "no verb trian; there is train"),
    ("data", "no verb data; there is data build"),
    ("data biuld text", "no verb data biuld; there is data build"),
    ("--resume auto", "no verb --resume"),
    ("plan", "the following arguments are required: CONFIG; `longstride plan --help`"),
    ("train", "the following arguments are required: --config; `longstride train --help` tells the options"),
    ("train run.json", "the following arguments are required: --config; `longstride train --help` tells the"),
    ("train --config", "argument --config: expected one argument; `longstride train --help` tells the"),
    ("train --config run.json --resumption auto", "unrecognized arguments: --resumption; `longstride train"),
    ("evaluate", "the following arguments are required: RUN|MODEL; `longstride evaluate --help` tells the options"),
    ("evaluate run --split", "argument --split: expected one argument; `longstride evaluate --help` tells"),
    ("data build text", "the following arguments are required: --output; `longstride data build --help`"),
    ("data build --output new", "PATH: none given; name files or folders, such as texts, or a --dataset"),
    ("data show data --count three", "argument --count: invalid int value: 'three'; `longstride data show"),
    ("compress text --model model", "the following arguments are required: --output; `longstride compress"),
    ("show patern run.json --output new.png", "no verb show patern; there is show pattern"),
    ("serve model --port http", "argument --port: invalid int value: 'http'; `longstride serve --help`"),
    ("slurm --config run.json --nodes 1", "the following arguments are required: --processes-per-node,"),
    ("config schema run.json", "unrecognized arguments: run.json; `longstride config schema --help` tells"),
    # What is not there, or something else.
    ("plan missing.json", "missing.json: cannot be read: No such file or directory"),
    ("plan nothing", "nothing: no such file, and none of that name in ds_configs/experiments; known:"),
    ("plan text", "text:1:1: not JSON: Expecting value"),
    ("plan noise", "noise: must be UTF-8; byte 128 is not"),
    ("plan data", "data: no such file, and none of that name in ds_configs/experiments; known: bytes_base,"),
    ("train --config missing.json", "missing.json: cannot be read: No such file or directory"),
    ("train --config run.json data.path=missing", "missing: no such folder; build one with `longstride data"),
    ("train --config run.json data.path=text", "text: is a file, and no data folder; build one of it with"),
    ("train --config run.json data.path=run", "run: lacks manifest.json, so it is no data folder;"),
    ("train --config run.json data.path=ftp://example.org/data", "ftp://example.org/data: fsspec asks for"),
    ("train --config run.json train.output=text", "train.output=\"text\": must be a folder, and is a file"),
    ("train --config run.json train.output=run", "train.output=\"run\": holds a run already (config.json,"),
    ("train --config run.json train.output=text/below", "train.output=\"text/below\": "),
    ("train --config run.json train.output=s3://bucket/run", "train.output=\"s3://bucket/run\": must be a"),
    ("train --config run.json --hostfile missing", "--hostfile=missing: no such file; write one with a line"),
    ("train --config run.json --hostfile noise", "--hostfile=noise: is no text; write a line for each host,"),
    ("evaluate missing", "missing: no such run folder"),
    ("evaluate data", "data/checkpoints: no checkpoint; whole ones: none"),
    ("evaluate run --step 3", "run/checkpoints: no checkpoint of step 3; whole ones: 4, 8"),
    ("evaluate run --split test", "/manifest.json: no split 'test'; it holds train, validation"),
    ("evaluate run --data missing", "missing: no such folder; build one with `longstride data build`"),
    ("evaluate run --data run", "run: lacks manifest.json, so it is no data folder; `longstride data build`"),
    ("report missing --output new.html", "missing: there is no such folder; such as runs/demo"),
    ("report data --output new.html", "data: holds no run: it has no metrics.jsonl"),
    ("report run run/. --output new.html", "run: is named twice; name each run once"),
    ("report run --output text", "--output=text: exists already; nothing is overwritten"),
    ("report run --output new.png", "--output=new.png: must be a .html in a folder that exists"),
    ("report run --output new.html --positions noise", "--positions=noise: must be a JSON file that"),
    ("export missing --output new", "missing: no such run folder"),
    ("export model --output new", "model: is an exported model, not a run; name the folder that"),
    ("evaluate model", "or score a file by `longstride sample model --likelihood FILE`"),
    ("export run --output model", "--output=model: exists already; nothing is overwritten"),
    ("export run --output text", "--output=text: exists already; nothing is overwritten"),
    ("export run --output new --step 3", "run/checkpoints: no checkpoint of step 3; whole ones: 4, 8"),
    ("export run --output new --format pt2", "run: has no model.safetensors and no"),
    ("sample missing", "missing: has no config.json; name a folder written by `longstride export RUN"),
    ("sample run", "run: has no model.safetensors and no model.safetensors.index.json; name a folder"),
    ("sample text", "text: has no config.json; name a folder written by `longstride export RUN --output DIR`"),
    ("sample model --prompt-file missing", "--prompt-file=missing: No such file or directory"),
    ("sample model --prompt-file data", "--prompt-file=data: is a folder, not a plain file"),
    ("sample model --prompt-image noise", "--prompt-image=noise: the model writes text; take --prompt-file"),
    ("sample model --likelihood missing", "--likelihood=missing: No such file or directory"),
    ("compress missing --model model --output new.lsz", "FILE=missing: No such file or directory"),
    ("compress text --model missing --output new.lsz", "missing: has no config.json; name a folder written"),
    ("compress text --model model --output text.lsz", "--output=text.lsz: exists already; nothing is"),
    ("decompress text --model model --output new", "FILE=text: is no file that `longstride compress` wrote"),
    ("decompress noise --model model --output new", "FILE=noise: is no file that `longstride compress` wrote"),
    ("decompress text.lsz --model run --output new", "run: has no model.safetensors and no"),
    ("decompress text.lsz --model model --output text", "--output=text: exists already; nothing is"),
    ("data verify missing", "missing: no such folder; build one with `longstride data build`"),
    ("data verify run", "run: lacks manifest.json, so it is no data folder; `longstride data build` makes"),
    ("data show data --split test", "data/manifest.json: no split 'test'; it holds train, validation"),
    ("data build missing --output new", "missing: no such file or folder; name an input that exists"),
    ("data build text --output data", "/data: holds a data set made with other settings; nothing is"),
    ("data build noise --output new --modality image", "noise: cannot be read as a picture (not one of PNG,"),
    ("data build noise --output new --modality audio", "noise: cannot be read as a sound"),
    ("data build text --output new --dataset enwik9", "PATH=text: goes without --dataset; name the"),
    ("data build --dataset enwik8 --output new --input missing", "--input=missing: no such file or folder;"),
    ("data index text --output new", "text: must be the name of a tar, such as train-000.tar; rename it"),
    ("data index missing --output new", "missing: no such file or folder; name tars, or a folder that holds"),
    ("show loss missing --output new.png", "missing: there is no such folder; such as runs/demo"),
    ("show attention data --output new.png", "data/checkpoints: no checkpoint; whole ones: none"),
    ("show pattern run.json --output text", "--output=text: exists already; nothing is overwritten"),
    ("serve missing", "missing: has no config.json; name a folder written by `longstride export RUN"),
    ("serve run", "run: has no model.safetensors and no model.safetensors.index.json; name a folder written"),
    ("slurm --config missing.json --nodes 1 --processes-per-node 1 --time 1:00:00", "missing.json: cannot be read:"),
    # Values that cannot be.
    ("plan run.json train.stesp=3", "train.stesp: unknown key; nearest steps"),
    ("plan run.json learning_rate=3", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("plan run.json train.steps", "train.steps: must be path.to.key=value, such as train.steps=100"),
    ("plan run.json train.steps=three", "train.steps=\"three\": must be a valid integer"),
    ("plan run.json train.steps=-3", "train.steps=-3: must be greater than 0"),
    ("plan run.json train.steps=1.5", "train.steps=1.5: must be a valid integer"),
    (f"plan run.json train.steps={MANY}", "train.steps: an integer of 400 digits; 39 are the most"),
    (f"plan run.json train.learning_rate={MANY}", "train.learning_rate: an integer of 400 digits; 39 are the"),
    ("plan run.json train.learning_rate=1e999", "train.learning_rate: 1e999 is beyond the largest number;"),
    ("plan run.json train.learning_rate=NaN", "train.learning_rate: NaN is not JSON; give a finite number"),
    ("plan run.json train.warmup_steps=9", "train.warmup_steps=9: must be at most steps 8"),
    ("plan run.json train.global_batch=3", "train.global_batch=3: must be a multiple of micro_batch 2;"),
    ("plan run.json train.betas=[0.9]", "train.betas[1]: required, and missing"),
    ("plan run.json data.workers=1000000", "data.workers=1000000: must be less than or equal to 1024"),
    ("plan run.json data.prefetch=1000000000", "data.prefetch=1000000000: must be less than or equal to"),
    ("plan run.json data.seed=-1", "data.seed=-1: must be greater than or equal to 0"),
    ("plan run.json data.separator=256", "data.separator=256: must be less than or equal to 255"),
    ("plan run.json data.remote.parallel=1000000", "data.remote.parallel=1000000: must be less than or"),
    ("plan run.json model.width=33", "model.width=33: 33 channels must divide into heads=2; nearest heads 1"),
    ("plan run.json model.heads=0", "model.heads=0: must be greater than 0"),
    ("plan run.json model.attention.type=sparse", "model.attention.type=\"sparse\": must be a pattern's name;"),
    ("plan run.json model.dropout=1.5", "model.dropout=1.5: must be less than 1"),
    ("plan run.json deepspeed=zero4_fp32", "deepspeed=\"zero4_fp32\": no such file in ds_configs; nearest"),
    ("plan run.json deepspeed.train_batch_size=8", "deepspeed.train_batch_size: give train.global_batch"),
    ("plan run.json deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.stage=4: must be 0,"),
    ("plan run.json model=7", "model=7: must be an object"),
    ("plan run.json model.layers.first=7", "model.layers=2: has no key first to override"),
    ("plan run.json --processes 0", "--processes=0: must be whole numbers from 1 to 16,384; such as 8"),
    ("plan run.json --processes -1", "--processes=-1: must be whole numbers from 1 to 16,384; such as 8"),
    (f"plan run.json --processes {MANY}", "--processes="),
    ("plan run.json --processes 3", "train.global_batch=8: must be a multiple of micro_batch 2 × 3"),
    ("plan run.json --contexts 0", "--contexts=0: must be from 1 to 1,000,000,000,000; such"),
    ("train --config run.json model.vocabulary=100", "model.vocabulary=100: a byte of the data is 121; 256 takes any"),
    ("train --config run.json train.steps=1000000000000000000000", "train.steps=1000000000000000000000:"),
    ("train --config run.json --resume newest", "--resume=newest: must be auto, best, never or the number"),
    (f"train --config run.json --resume {MANY}", "--resume="),
    ("train --config run.json --resume 3 train.output=run", "run/checkpoints: no checkpoint of step 3;"),
    ("train --config run.json --replay 0", "--replay=0: must be the number of a step, from 1 on"),
    (f"train --config run.json --replay {MANY}", "--replay="),
    (f"train --config run.json --profile {MANY}", "--profile="),
    ("train --config run.json --processes 0", "--processes=0: must be at least 1"),
    (f"train --config run.json --processes {MANY}", "processes: a run has at most 16,384; start fewer"),
    ("train --config run.json --processes 3", "train.global_batch=8: must be a multiple of micro_batch 2 ×"),
    ("train --config run.json --max-restarts -1", "--max-restarts=-1: must be at least 0"),
    (f"evaluate run --step {MANY}", "argument --step: "),
    ("evaluate run --batch 0", "--batch=0: must be from 1 to 65,536 contexts; such as 4"),
    (f"evaluate run --batch {MANY}", "--batch="),
    (f"evaluate run --min-context {MANY}", "--min-context="),
    ("evaluate run --sequence-parallel 3", "--sequence-parallel=3: must divide the 1 process that a"),
    ("export run --output new --shard-size 1XB", "--shard-size=1XB: must be a size above 0 such as 5GB,"),
    ("export run --output new --device tpu", "--device=tpu: cannot be used: Expected one of cpu, cuda, ipu,"),
    ("sample model --bytes 0", "--bytes=0: must be at least 1"),
    (f"sample model --bytes {MANY}", "sample: prompt and sample are "),
    (f"sample model --count {MANY}", "--count="),
    ("sample model --count 0", "--count=0: must be from 1 to 65,536; such as 4"),
    ("sample model --temperature -1", "sample: temperature=-1.0: must be a number from 0, which takes the"),
    ("sample model --temperature nan", "sample: temperature=nan: must be a number from 0, which takes the"),
    ("sample model --top-k 0", "sample: top_k=0: must be a whole number from 1; leave it out to sample from"),
    ("sample model --top-p 2", "sample: top_p=2.0: must be above 0 and at most 1; leave it out to sample"),
    (f"sample model --seed {MANY}", "--seed="),
    ("sample model --seconds 1", "--seconds=1: only applies to sound, and the model writes text; give --bytes"),
    (f"sample model --likelihood text --batch {MANY}", "--batch="),
    ("data show data --count 0", "count=0: must be at least 1"),
    ("data build text --output new --validation-fraction 2", "--validation-fraction=2.0: must be at least 0"),
    ("data build text --output new --validation-fraction nan", "--validation-fraction=nan: must be at least"),
    ("data build text --output new --shard-bytes 0", "--shard-bytes=0: must be at least 1, such as 16777216"),
    ("data build text --output new --palette 1", "--palette=1: must be 2 to 65,536 colours; nearest 2, and"),
    ("data build noise --output new --modality image --image-size 0x0", "--image-size=0x0: must be height x"),
    (f"data build noise --output new --modality image --image-size {MANY}x1", "--image-size="),
    (f"data build noise --output new --modality audio --rate {MANY}", "--rate="),
    ("serve model --port 70000", "--port=70000: must be from 0, any that is free, to 65535"),
    ("serve model --timeout 0", "--timeout=0.0: must be above 0 and finite"),
    (f"serve model --contexts {MANY}", "--contexts="),
    ("serve model --host 256.0.0.1 --port 0", "--host=256.0.0.1: is no address of this machine; take"),
    ("show pattern run.json --output new.png --query 64", "--query=64: must be from 0 to 63, a position;"),
    (f"show pattern run.json --output new.png --query {MANY}", "--query="),
    ("show attention run --output new.png --head 2", "--head=2: must be from 0 to 1, a head of the model;"),
    (f"show attention run --output new.png --context-number {MANY}", "--context-number="),
    ("slurm --config run.json --nodes 0 --processes-per-node 1 --time 1:00:00", "--nodes=0: must be at least 1"),
    ("slurm --config run.json --nodes 1 --processes-per-node 1 --time soon", "--time=soon: must be"),
    ("slurm --config run.json --nodes 1 --processes-per-node 1 --time 1:00:00 --output-dir text", "/text: must be a"),
    # longstride new.
    ("new", "the following arguments are required: NAME; `longstride new --help` tells the options"),
    ("new mine more", "unrecognized arguments: more; `longstride new --help` tells the options"),
    ("new mine --data data train.steps=3", "unrecognized arguments: train.steps=3; `longstride new --help` tells"),
    ("new ''", "NAME=: must be at most 100 letters, digits, dots, dashes and underscores, the first a letter or a"),
    ("new a/b --data data", "NAME=a/b: must be at most 100 letters, digits, dots, dashes and underscores, the first"),
    ("new .. --data data", "NAME=..: must be at most 100 letters, digits, dots, dashes and underscores, the first"),
    ("new 'my run' --data data", "NAME=my run: must be at most 100 letters, digits, dots, dashes and underscores,"),
    (f"new {MANY} --data data", ": must be at most 100 letters, digits, dots, dashes and underscores, the first a"),
    ("new run --data data", "run.json: exists already; take another NAME, or another file by --output"),
    ("new mine", "data/mine: no such folder; build it by `longstride data build FILES --output data/mine`, or name"),
    ("new mine --modality image", "`longstride data build FILES --modality image --output data/mine`, or name"),
    ("new mine --data ''", "--data=: names no folder; such as data/mine, or leave it out"),
    ("new mine --data missing", "missing: no such folder; build it by `longstride data build FILES --output missing`,"),
    ("new mine --data text", "--data=text: is a file, and no data folder; build one of it by `longstride data"),
    ("new mine --data run", "run: lacks manifest.json, so it is no data folder; `longstride data build` makes one"),
    ("new mine --data data --size huge", "--size=huge: must be one of tiny, small, base; such as tiny"),
    ("new mine --data data --size ''", "--size=: must be one of tiny, small, base; such as tiny"),
    ("new mine --data data --modality video", "--modality=video: must be one of text, image, audio; such as text"),
    ("new mine --data data --modality image", "--modality=image: data holds text; leave --modality out, or name"),
    ("new mine --data data --output run.json", "run.json: exists already; take another NAME, or another file by"),
    ("new mine --data data --output mine.txt", "--output=mine.txt: must end in .json; such as mine.json"),
    ("new mine --data data --output ''", "--output=.: must end in .json; such as mine.json"),
    ("new mine --data data --output /", "--output=/: must end in .json; such as mine.json"),
    ("new mine --data data --output missing/a.json", "--output=missing/a.json: missing is no folder; make it first,"),
    ("new mine --data data --output text/a.json", "--output=text/a.json: text is no folder; make it first, or name"),
    ("new mine --data data --output /proc/a.json", "--output=/proc/a.json: cannot be written: No such file or"),
    ("new mine --data data --processes 0", "--processes=0: must be a whole number from 1 to 16,384; such as 8"),
    ("new mine --data data --processes two", "--processes=two: must be a whole number from 1 to 16,384; such as 8"),
    ("new mine --data data --processes 1.5", "--processes=1.5: must be a whole number from 1 to 16,384; such as 8"),
    (f"new mine --data data --processes {MANY}", ": must be a whole number from 1 to 16,384; such as 8"),
    ("new mine --data data --memory 0", "--memory=0: must be a number from 1 to 1,000,000; such as 80"),
    ("new mine --data data --memory nan", "--memory=nan: must be a number from 1 to 1,000,000; such as 80"),
    ("new mine --data data --memory 80GB", "--memory=80GB: must be a number from 1 to 1,000,000; such as 80"),
    ("new mine --data data --memory 1e7", "--memory=1e7: must be a number from 1 to 1,000,000; such as 80"),
    # longstride doctor.
    ("doctor missing.json", "missing.json: cannot be read: No such file or directory"),
    ("doctor ''", "CONFIG=: names no file; such as my.json, or demo"),
    ("doctor run", "run: no such file, and none of that name in ds_configs/experiments; known: bytes_base,"),
    ("doctor text --json", "text:1:1: not JSON: Expecting value"),
    ("doctor train.steps=3", "train.steps=3: no such file; changes stand behind the configuration's file, as in"),
    ("doctor run.json run.json", "run.json: must be path.to.key=value, such as train.steps=100"),
    ("doctor run.json train.stesp=3", "train.stesp: unknown key; nearest steps"),
    ("doctor run.json --processes 0", "--processes=0: must be from 1 to 16,384; such as 8"),
    ("doctor run.json --processes two", "argument --processes: invalid int value: 'two'; `longstride doctor --help`"),
    (f"doctor run.json --processes {MANY}", ": must be from 1 to 16,384; such as 8"),
    ("doctor --hostfile missing --json", "--hostfile=missing: no such file; write one with a line for each host,"),
    ("doctor --hostfile data", "--hostfile=data: is a folder; write one with a line for each host, such as `node1"),
    ("doctor --hostfile noise", "--hostfile=noise: is no text; write a line for each host, such as `node1 slots=4`"),
    ("doctor --hostfile text", ": must be a host and its number of processes, such as `node1 slots=4`"),
    ("doctor --launcher ssh", "argument --launcher: invalid choice: 'ssh' (choose from "),
    # The rate and the size of a plan.
    ("plan ''", "CONFIG=: names no file; such as my.json, or demo"),
    ("plan train.steps=3", "train.steps=3: no such file; changes stand behind the configuration's file, as in my.json"),
    ("plan run.json --tflops", "argument --tflops: expected one argument; `longstride plan --help` tells the options"),
    ("plan run.json --tflops 0", "--tflops=0: must be what a process achieves, from 0.000001 to 1,000,000; such as"),
    ("plan run.json --tflops nan", "--tflops=nan: must be what a process achieves, from 0.000001 to 1,000,000; such"),
    ("plan run.json --tflops fast", "--tflops=fast: must be what a process achieves, from 0.000001 to 1,000,000;"),
    ("plan run.json --tflops 1e-320 --json", "--tflops=1e-320: must be what a process achieves, from 0.000001 to"),
    ("plan run.json --tflops 1e300", "--tflops=1e300: must be what a process achieves, from 0.000001 to 1,000,000;"),
    (f"plan run.json --tflops {MANY}", ": must be what a process achieves, from 0.000001 to 1,000,000; such as 0.1"),
    ("plan run.json --tflops 1 --measure", "argument --measure: not allowed with argument --tflops; `longstride"),
    ("plan run.json --rate-of missing", "--rate-of=missing: no such run folder; name one that `longstride train`"),
    ("plan run.json --rate-of text", "--rate-of=text: no such run folder; name one that `longstride train` wrote"),
    ("plan run.json --rate-of data", "--rate-of=data: holds no run; name one that `longstride train` wrote"),
    ("plan run.json --rate-of model", "--rate-of=model: holds no run; name one that `longstride train` wrote"),
    ("plan run.json --processes two", "--processes=two: must be whole numbers from 1 to 16,384; such as 8"),
    ("plan run.json --processes 1 1.5", "--processes=1.5: must be whole numbers from 1 to 16,384; such as 8"),
    ("plan run.json --processes 16385", "--processes=16385: must be whole numbers from 1 to 16,384; such as 8"),
    ("plan run.json --contexts many", "argument --contexts: invalid int value: 'many'; `longstride plan --help`"),
    (f"plan run.json train.steps=null train.epochs=1 --contexts {MANY}", ": must be from 1 to 1,000,000,000,000; such"),
    # What a configuration extends, and keys at a wrong place.
    ("plan itself.json", "itself.json: extends=\"itself.json\": leads in a circle: itself.json extends itself.json;"),
    ("plan round.json", "about.json: extends=\"round.json\": leads in a circle: round.json extends about.json extends"),
    ("train --config lost.json", "lost.json: extends=\"missing.json\": no such file in the folder of lost.json, and"),
    ("train --config number.json", "number.json: extends=3: must be text: the path of a file, from this file's"),
    ("train --config schema.json", "schema.json: $schema: must be text, the file or address of a JSON schema; or"),
    ("train --config place.json", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("train --config run.json learning_rate=3", "learning_rate: unknown key; did you mean train.learning_rate"),
    ("train --config run.json train.context=128", "train.context: unknown key; did you mean model.context"),
    ("train --config run.json train.learning_rate.x=3", "train.learning_rate=0.003: has no key x to override"),
    ("train --config run.json extends=demo", "extends=\"demo\": can only stand in a file; to change the base, write"),
    ("train --config run.json '$schema=x'", "$schema=\"x\": can only stand in a file, for editors; leave it out"),
    ("train --config ''", "CONFIG=: names no file; such as my.json, or demo"),
    # Where a run's first weights come from.
    ("train --config run.json --from missing", "--from=missing: no such folder; name a folder of `longstride export`,"),
    ("train --config run.json --from data", "--from=data: holds no model; name a folder of `longstride export`, or"),
    ("train --config run.json --from text", "--from=text: no such folder; name a folder of `longstride export`, or a"),
    ("train --config run.json --from run --resume 4", "--from=run: begins a run, but --resume=4 continues"),
    ("train --config run.json --from-step 4", "--from-step=4: says how weights are taken, and no --from says where"),
    ("train --config run.json --from run --from-step -1", "argument --from-step: -1: must be the number of a step, or"),
    (f"train --config run.json --from run --from-step {MANY}", ": must be the number of a step, or best; `longstride"),
    ("train --config run.json --from-weights ema", "--from-weights=ema: says how weights are taken, and no --from"),
    ("train --config run.json --from-positions repeat", "--from-positions=repeat: says how weights are taken, and no"),
    ("train --config run.json --from run --from-positions odd", "argument --from-positions: invalid choice: 'odd'"),
    ("train --config run.json --from-partly", "--from-partly: says how weights are taken, and no --from says where"),
    # Reports and pictures.
    ("report run", "the following arguments are required: --output; `longstride report --help` tells the options"),
    ("report --output new.html", "the following arguments are required: RUN; `longstride report --help` tells the"),
    ("report text --output new.html", "text: is a file; name the folder around it; such as runs/demo"),
    ("report run model --output new.html", "model: holds no run: it has no metrics.jsonl; name a folder that"),
    (f"report {'run ' * 13}--output new.html", "run: is run 13; a page compares 12 at most"),
    ("report run --output missing/new.html", "--output=missing/new.html: must be a .html in a folder that exists;"),
    ("report run --output text/new.html", "--output=text/new.html: must be a .html in a folder that exists; such as"),
    ("report run --output new.html --positions run.json", "--positions=run.json: must be a JSON file that `longstride"),
    ("show attention run", "the following arguments are required: --output; `longstride show attention --help` tells"),
    ("show attention --output new.png", "RUN|MODEL is missing; give it once"),
    ("show attention text --output new.png", "text: no such run folder; name one that `longstride train` wrote"),
    ("show attention run --output run.json", "--output=run.json: exists already; nothing is overwritten"),
    ("show attention run --output new.jpg", "--output=new.jpg: must be a .png in a folder that exists; such as"),
    ("show attention run --output text/new.png", "--output=text/new.png: must be a .png in a folder that exists; such"),
    ("show attention model --output new.png", "model: an exported model has no data of its own; give --data DIR or"),
    ("show attention model --text missing --output new.png", "--text=missing: cannot be read: No such file or"),
    ("show attention model --text data --output new.png", "--text=data: cannot be read: is a folder, not a plain"),
    ("show attention run --output new.png --query one", "argument --query: must be positions, such as --query 100"),
    ("show attention run --output new.png --step three", "argument --step: three: must be the number of a step, or"),
    ("show attention run --output new.png --head -1", "--head=-1: must be from 0 to 1, a head of the model; nearest 0"),
    ("show pattern run.json", "--output: is missing; such as --output pattern.png, or --html pattern.html for a page"),
    ("show pattern --html new.html", "CONFIG is missing; give it once"),
    ("show pattern data --html new.html", "data: holds no run: it has no config.json; name a run's folder or a JSON"),
    ("show pattern run.json --html text", "--html=text: exists already; nothing is overwritten"),
    ("show pattern run.json --html data", "--html=data: exists already; nothing is overwritten"),
    ("show pattern run.json --html new.png", "--html=new.png: must be a .html in a folder that exists; such as"),
    ("show pattern run.json --html missing/new.html", "--html=missing/new.html: must be a .html in a folder that"),
    ("show pattern run.json --html new.html --query -1", "--query=-1: must be from 0 to 63, a position; nearest 0"),
    ("show pattern run.json --html new.html --text text", "--text=text: a page has no text; draw --output FILE.png,"),
    ("show loss data --output new.png", "data: holds no run: it has no metrics.jsonl; name a folder that `longstride"),
    ("show loss text --output new.png", "text: is a file; name the folder around it; such as runs/demo"),
    ("show loss run --output new.html", "--output=new.html: must be a .png in a folder that exists; such as new.png"),
    # Shells and schemas.
    ("completion", "the following arguments are required: shell; `longstride completion --help` tells the options"),
    ("completion fish", "argument shell: invalid choice: 'fish' (choose from "),
    ("completion bash zsh", "unrecognized arguments: zsh; `longstride completion --help` tells the options"),
    ("config schema --output text/a.json", "--output=text/a.json: must lie in a folder that exists"),
    ("config schema --output /proc/a.json", "--output=/proc/a.json: cannot be written: No such file or directory;"),
    # Folders of other files than texts, and numbers that a manifest could not tell.
    ("data build tables --output new", "there are .csv, .json: name those to take by --suffix"),
    ("data build tables --output new --suffix csv", "--suffix=csv: must begin with a dot, such as .csv"),
    ("data build tables --output new --suffix .", "--suffix=.: must be what a name ends in from its last dot (or"),
    ("data build tables --output new --suffix .CSV", "tables: no file to take (suffixes: .CSV); there are .csv"),
    ("data build tables --output new --suffix .csv --all-files", "--suffix=.csv: --all-files takes files of any name;"),
    ("data build tables --output new --suffix .csv", "--validation-fraction=0.05: holds out none of 4 bytes; add"),
    ("data build tables --output new --modality image", "there are .csv, .json: name those to take by --suffix"),
    ("data build tables --output new --all-files --seed -1", "--seed=-1: must be from 0 to 2**63 - 1, such as 0"),
    (f"data build tables --output new --all-files --seed {MANY}", ": must be from 0 to 2**63 - 1, such as 0"),
    (f"data build tables --output new --all-files --shard-bytes {MANY}", ": must be at most 9223372036854775807, such"),
    # Sampling and serving.
    ("sample ''", "has no config.json; name a folder written by `longstride export RUN --output DIR`"),
    ("sample model --prompt x --prompt-file text", "argument --prompt-file: not allowed with argument --prompt;"),
    ("sample model --bytes 1000", "take at most --bytes 64, or add --slide to go on beyond it"),
    ("sample model --bytes many", "argument --bytes: invalid int value: 'many'; `longstride sample --help` tells the"),
    ("sample model --output missing/new", "--output=missing/new: must lie in a folder that exists"),
    ("sample model --modality image", "--modality=image: config.json tells no picture's size; take --modality text"),
    ("sample model --rate 8000", "--rate=8000: the model writes text; leave it out"),
    ("sample model --seed -1", "--seed=-1: must be from 0 to 2**63 - 1"),
    ("sample model --batch 3", "--batch: only works together with --likelihood FILE; leave it out"),
    ("sample model --likelihood text --min-context 64", "--min-context=64: must be from 0 to 63, less than the"),
    ("serve model --host '' --port 0", "--host=\"\": must be an address of this machine; such as 127.0.0.1"),
    ("serve model --host nowhere.invalid --port 0", "--host=nowhere.invalid: is no address of this machine; take"),
    ("serve model --allow-host http://a.example", "--allow-host=\"http://a.example\": must be a name or an address"),
    ("serve model --port -1", "--port=-1: must be from 0, any that is free, to 65535"),
    ("serve model --timeout nan", "--timeout=NaN: must be above 0 and finite"),
    ("serve model --queue -1", "--queue=-1: must be 0, nobody waits, or more"),
    ("serve model --contexts 0", "--contexts=0: must be from 1 to 1,024"),
    ("serve model --max-bytes 0", "--max-bytes=0: must be at least 1"),
    ("serve model --name ''", "--name=\"\": must be a name, in characters"),
]  # fmt: skip

# What works anywhere, with the folder of what it makes. The doctor ends by 1 where something is broken on this machine.
WORKING = (
    "plan run.json",
    "new mine --data data --output {made}/mine.json",
    "report run --quick --output {made}/report.html",
    "doctor",
    "completion bash",
)


@pytest.fixture(scope="session")
def place(
    tmp_path_factory: pytest.TempPathFactory, trained: Callable[..., Path], data: Path, commands: Commands
) -> Path:
    """Create a folder with one of everything; nothing in it may change."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(trained("wrong-inputs", 1), folder / "run")
    shutil.copytree(data, folder / "data")
    random_export(folder / "model")
    (folder / "text").write_text("The bytes of a short text. " * 4)
    (folder / "noise").write_bytes(bytes(range(256)) * 4)
    (folder / "run.json").write_text(json.dumps(configuration(Path("data"), Path("fresh"))))
    for name, content in BASES.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tables").mkdir()
    (folder / "tables/a.json").write_text("[1]")
    (folder / "tables/b.csv").write_text("1, 2")
    made = commands("compress", "text", "--model", "model", "--output", "text.lsz", folder=folder)
    assert made.code == 0, made.err
    return folder


@pytest.mark.parametrize(("words", "said"), WRONG, ids=lambda text: text[:80])
def test_wrong_words_are_told_in_one_line(commands: Commands, place: Path, words: str, said: str) -> None:
    before, names = files_under(place), set(place.iterdir())
    try:
        outcome = commands(*shlex.split(words), folder=place)
        line = outcome.check_refused()
        assert said in line, line
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
    told = "longstride: notice: model.embedding.type=audio: has positions as audio does, and the data is text"
    assert outcome.err.count("notice: ") == 1 and told in outcome.err
    plain = commands(*words, f"train.output={tmp_path / 'plain'}", folder=place)
    assert plain.code == 0 and "notice" not in plain.err


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"HOME": None}, id="no HOME"),
        pytest.param({"HOME": "/nowhere"}, id="HOME is not there", marks=pytest.mark.campaign),
        pytest.param({"COLUMNS": "0"}, id="narrow"),
    ],
)
@pytest.mark.parametrize("words", [*WORKING, "data verify data", "evaluate run", "sample model --bytes 4"])
def test_verbs_work_in_a_bare_environment(
    commands: Commands, place: Path, tmp_path: Path, words: str, environment: dict[str, str | None]
) -> None:
    outcome = commands(*words.format(made=tmp_path).split(), folder=place, environment=environment)
    assert outcome.code == 0 or (words == "doctor" and outcome.code == 1), outcome.err
    assert "Traceback" not in outcome.err and "a process that imports it" not in outcome.out


@pytest.mark.parametrize("words", WORKING)
def test_a_result_that_finds_no_room_is_told_in_one_line(
    commands: Commands, place: Path, tmp_path: Path, words: str
) -> None:
    outcome = commands(*words.format(made=tmp_path).split(), folder=place, stdout="full")
    line = "standard output, or a file: cannot be written: No space left on device; write where there is room"
    assert outcome.check_refused() == line


@pytest.mark.parametrize("words", WORKING)
def test_verbs_end_quietly_where_their_reader_goes_away(
    commands: Commands, place: Path, tmp_path: Path, words: str
) -> None:
    outcome = commands(*words.format(made=tmp_path).split(), folder=place, stdout="closed")
    assert (outcome.code, outcome.err) == (141, "")


@pytest.mark.parametrize("words", [*WORKING[1:3], "config schema --output {made}/new.json"])
def test_a_file_that_finds_no_room_is_not_there(commands: Commands, place: Path, tmp_path: Path, words: str) -> None:
    limit = [("RLIMIT_FSIZE", 1000)]
    line = commands(*words.format(made=tmp_path).split(), folder=place, limits=limit).check_refused()
    assert line.startswith(f"--output={tmp_path}/") and ": cannot be written: File too large" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "code"),
    [("plan run.json --processes 3", 2), *((words, 0) for words in WORKING)],
    ids=lambda value: str(value)[:40],
)
def test_a_locale_of_ascii_alone_takes_every_line(place: Path, tmp_path: Path, words: str, code: int) -> None:
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "longstride.launcher.cli", *words.format(made=tmp_path).split()]
    environment = {**plain_environment(), **ascii_alone, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == code or (words == "doctor" and ended.returncode == 1), ended.stderr
    assert b"Traceback" not in ended.stderr and ended.stdout.isascii()


@pytest.mark.parametrize("words", [*WORKING, "train --config run.json", "serve model"])
def test_a_removed_working_directory_is_told(place: Path, tmp_path: Path, words: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m longstride.launcher.cli {words}"
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    line = "longstride: error: the working directory has been removed; change to one that exists\n"
    assert (ended.returncode, ended.stderr) == (2, line)


def test_a_limit_on_file_sizes_is_told(place: Path, tmp_path: Path) -> None:
    command = (
        f"exec {sys.executable} -m longstride.launcher.cli train --config run.json train.output={tmp_path / 'run'}"
    )
    environment = {**plain_environment(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; {command}"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2, ended.stderr
    assert "raise the limit on file sizes" in ended.stderr and "Traceback" not in ended.stderr
