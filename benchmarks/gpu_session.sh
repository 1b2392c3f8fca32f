#!/usr/bin/env bash
# Everything that is to be checked and measured on a GPU, most valuable first, in parts of under ten minutes.
#
#   benchmarks/gpu_session.sh PART… [--output DIR] [--seconds N] [--wheels DIR] [--compiled FILE] [--python PROGRAM]
#                             [--overwrite] [--rehearse]
#
#   PART 1  correctness: production tiles and contexts, more than 2^31 elements, small contexts, compute-sanitizer
#   PART 2  tuning: the fastest configurations, to be taken over into the kernels' tables
#   PART 3  the cases that bars are set on, the card's counters, other dtypes and widths, selections, the bars
#   PART 4  whole training steps: batch 4, batch 1, a million bytes; sampling byte by byte
#   PART 5  the whole grid of attention
#   PART 6  the paper's tables: dense, fixed and strided models trained side by side
#   PART 7  music_1m_152m, 152 million parameters over a million bytes: some steps, and their memory beside the plan's
#   PART 8  every mixer beside a CPU, a DeepSpeed training of some hundred steps and its resume; times of the indexer and
#           the delta rule
#
# Several parts run one after another; --seconds (default 590) is the time of them all, so that one call of ten minutes
# has what fits: a step that no longer does is left out and named.
#
# Nothing need be installed but torch, triton, numpy, pytest, hypothesis and matplotlib: the checkout is found through
# PYTHONPATH, and what else is missing is installed from --wheels (benchmarks/wheels.sh collects them) into a folder
# that is removed afterwards. --compiled is a file of benchmarks/attention/ahead.py: kernels need not be compiled again.
# Every step has its own time limit, a part goes on when one fails, and the exit code is 1 if one did. A part leaves at
# most five files, and 1 to 3 together seven. --rehearse runs the same steps on a CPU, Triton's kernels in its
# interpreter, in sizes that say that everything runs and nothing of speed.
set -uo pipefail
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
PARTS=() OUTPUT="$ROOT/benchmarks/results" WHEELS="" COMPILED="" PYTHON=python3 OVERWRITE=() REHEARSE="" SESSION=590

wrong() { echo "gpu_session: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --output|--wheels|--compiled|--python|--seconds)
      [ $# -ge 2 ] || wrong "$1: needs a value"
      case "$1" in --output) OUTPUT="$2" ;; --wheels) WHEELS="$2" ;;
        --compiled) COMPILED="$2" ;; --python) PYTHON="$2" ;; --seconds) SESSION="$2" ;; esac
      shift ;;
    --overwrite) OVERWRITE=(--overwrite) ;;
    --rehearse) REHEARSE=yes ;;
    [1-8]) PARTS+=("$1") ;;
    *) wrong "$1: must be parts from 1 to 8, or one of --output, --seconds, --wheels, --compiled, --python, --overwrite, --rehearse" ;;
  esac
  shift
done
[ ${#PARTS[@]} -gt 0 ] || wrong "which parts? 1 to 8"
[[ "$SESSION" =~ ^[1-9][0-9]*$ ]] || wrong "--seconds=$SESSION: must be a whole number; nearest 590"
[ -z "$WHEELS" ] || [ -d "$WHEELS" ] || wrong "--wheels=$WHEELS: must be a folder"
[ -z "$COMPILED" ] || [ -f "$COMPILED" ] || wrong "--compiled=$COMPILED: must be a file that benchmarks/attention/ahead.py wrote"
mkdir -p "$OUTPUT" || wrong "--output=$OUTPUT: cannot be made"
OUTPUT="$(cd "$OUTPUT" && pwd)"
[ -z "$WHEELS" ] || WHEELS="$(cd "$WHEELS" && pwd)"
[ -z "$COMPILED" ] || COMPILED="$(realpath "$COMPILED")"
LOG="$OUTPUT/part$(printf '%s' "${PARTS[@]}").log"
[ ! -e "$LOG" ] || [ ${#OVERWRITE[@]} -gt 0 ] || wrong "$LOG: exists already; --overwrite replaces it"
: > "$LOG"
WORK="$(mktemp -d)"
WATCHER=""
trap '[ -z "$WATCHER" ] || kill "$WATCHER"; rm -rf "$WORK"' EXIT
cd "$ROOT" || exit 2
export PYTHONPATH="$ROOT:$WORK/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "$REHEARSE" ]; then
  export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
fi

STEPS=() FAILED=0 LEAST=10
note() { STEPS+=("$(printf '%-24s %-10s %6s' "$1" "$2" "$3")"); }
step() { # NAME SECONDS COMMAND …: runs it under a time limit and notes how it went
  local name="$1" limit="$2" began=$SECONDS left=$((SESSION - SECONDS)) code how line=0
  shift 2
  if [ "$left" -lt "$LEAST" ]; then
    skip "$name" "no time is left of $SESSION s"
    return 1
  fi
  [ "$limit" -le "$left" ] || limit=$left
  [ -z "$WATCHER" ] || line=$(wc -l < "$WORK/clocks.csv")
  printf '\n== %s (at most %s s): %s\n' "$name" "$limit" "$*" | tee -a "$LOG"
  timeout --foreground --signal=INT --kill-after=15 "$limit" "$@" 2>&1 | tee -a "$LOG" # pytest then says what failed
  code=${PIPESTATUS[0]}
  case $code in 0) how=ok ;; 124|137) how="timed out" ;; *) how=failed ;; esac
  [ "$how" = ok ] || FAILED=1
  [ -z "$WATCHER" ] || clocks "$line" | tee -a "$LOG"
  note "$name" "$how" "$((SECONDS - began))"
  return "$code"
}
skip() { printf '\n== %s: %s\n' "$1" "$2" | tee -a "$LOG"; note "$1" "not run" 0; }
clocks() { # FROM: the card's clocks and power since that line, while it was busy
  awk -F', *' -v from="$1" 'NR > from && $5 >= 50 {
      n++; sum += $1; if (!least || $1 < least) least = $1; if ($1 > most) most = $1
      if ($3 > power) power = $3; if ($4 > heat) heat = $4 }
    END { if (n) printf "clocks: %d to %d MHz, mean %d; up to %d W, %d C\n", least, most, sum / n, power, heat }' \
    "$WORK/clocks.csv"
}
missing() { # MODULE …: those that cannot be found
  "$PYTHON" - "$@" <<'END'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
}
bars() { step bars 20 "$PYTHON" -m benchmarks.attention.bars --results "$OUTPUT" --device "$DEVICE"; }

if [ -n "$WHEELS" ]; then
  step wheels 40 "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$WORK/site" "$WHEELS"/*.whl
fi
if [ -n "$COMPILED" ]; then
  export TRITON_CACHE_DIR="$WORK/compiled"
  mkdir "$TRITON_CACHE_DIR" && step compiled 40 tar xJf "$COMPILED" -C "$TRITON_CACHE_DIR"
fi
if [ -z "$REHEARSE" ] && command -v nvidia-smi > /dev/null; then # reads; sets nothing
  nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu --format=csv,noheader,nounits \
    -lms 500 > "$WORK/clocks.csv" 2> /dev/null &
  WATCHER=$!
fi
step machine 30 "$PYTHON" - <<'END'
import importlib.metadata, platform, shutil, subprocess
import torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda or torch.version.hip)
for name in ("triton", "numpy", "pydantic", "deepspeed", "webdataset", "safetensors", "mpi4py", "pytest", "matplotlib"):
    found = next((d.version for d in importlib.metadata.distributions(name=name)), None)
    print(f"{name:<12} {found or 'not installed'}")
print(*(f"{name}: {shutil.which(name) or 'not installed'}" for name in ("ncu", "compute-sanitizer")), sep="\n")
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
END
SLUG="$("$PYTHON" -c 'import torch
from benchmarks.machine import slug
print(slug(torch.device("cuda" if torch.cuda.is_available() else "cpu")))')"
DEVICE="$("$PYTHON" -c 'import torch
from benchmarks.machine import device_name
print(device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")))')"
if [ -z "$REHEARSE" ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  wrong "torch sees no GPU here; --rehearse runs the same steps on a CPU"
fi

tests() { # NAME SECONDS WORDS …: pytest; plugins of a strange machine may warn, and are not what is asked about
  step "$1" "$2" "$PYTHON" -m pytest -q --tb=short -W default -p no:cacheprovider "${@:3}"
}
part_1() {
  local workers=() card=tests/kernels/test_on_a_card.py small=() tool
  if [ -n "$REHEARSE" ]; then
    tests card 120 -p no:xdist "$card" -k "single_queries or oracle or small_and_ragged"
    tests small-contexts 120 -p no:xdist tests/kernels/test_conformance.py tests/kernels/test_selections.py \
      -k "triton and (same_bits or expanded)"
    return
  fi
  [ -n "$(missing xdist)" ] || workers=(-n 12) # compiling is what takes time
  tests card 240 "${workers[@]}" "$card" -k "not more_elements"
  tests large 60 -p no:xdist "$card" -k more_elements # alone: each takes most of a card's memory
  if command -v compute-sanitizer > /dev/null; then
    small=("$PYTHON" -m pytest -q -W default -p no:cacheprovider -p no:xdist -x "$card" -k "small_and_ragged and narrow")
    for tool in memcheck racecheck; do # no caching of memory: what lies beyond a tensor must be nobody's
      step "$tool" 80 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 9 \
        --target-processes application-only "${small[@]}"
    done
  else
    skip memcheck "compute-sanitizer is not installed"
  fi
  tests small-contexts 200 "${workers[@]}" tests/kernels/test_conformance.py tests/kernels/test_triton_attention.py \
    tests/kernels/test_selections.py tests/kernels/test_triton_selections.py tests/kernels/test_grouped_heads.py \
    tests/kernels/test_nonfinite.py tests/kernels/test_decoding.py tests/kernels/test_triton_delta.py \
    tests/kernels/test_triton_indexed.py -k triton
}
part_2() {
  local options=(--time-limit $((SESSION - SECONDS < 520 ? SESSION - SECONDS - 60 : 460)))
  [ -z "$REHEARSE" ] || options=(--device cpu --widths 64 --dtypes bfloat16 --processes 1)
  step tuning 540 "$PYTHON" -m benchmarks.attention.tune "${options[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/tuning-$SLUG.json"
}
part_3() {
  local options=(--preset bars --time-limit 170 --flex-patterns local) # each compiles for many seconds
  [ -z "$REHEARSE" ] || options=(--preset rehearsal --backend triton --no-flex --repeats 1)
  step attention-bars 200 "$PYTHON" -m benchmarks.attention.attention "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/bars-$SLUG.json"
  step counters 110 "$PYTHON" -m benchmarks.attention.counters "${OVERWRITE[@]}" --output "$OUTPUT/counters-$SLUG.json"
  if [ -z "$REHEARSE" ]; then
    step beside 150 "$PYTHON" -m benchmarks.attention.attention --preset beside --time-limit 120 --no-flex "${OVERWRITE[@]}" \
      --output "$OUTPUT/beside-$SLUG.json"
  fi
  # Routing over the root of the context's clusters, and rounds of hashing, beside dense attention.
  options=(--contexts 12288 --repeats 20)
  [ -z "$REHEARSE" ] || options=(--contexts 64 --heads 1 --repeats 1)
  step selections 40 "$PYTHON" -m benchmarks.attention.selections "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/selections-$SLUG.json"
  bars
}
part_4() {
  local small=() bytes=() million=(--context 1048576 --stride 1024) absent
  if [ -n "$REHEARSE" ]; then
    small=(--layers 1 --context 64 --stride 16 --summary 4 --repeats 1)
    million=("${small[@]}")
    bytes=(--contexts 256 --calls 2 --repeats 1)
  fi
  absent="$(missing pydantic pydantic_core annotated_types typing_extensions)"
  if [ -n "$absent" ]; then
    skip training-step "the model needs $absent; --wheels installs it"
    FAILED=1
    return
  fi
  step training-step 150 "$PYTHON" -m benchmarks.training.training_step "${small[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/training-step-$SLUG.json"
  step training-step-batch-1 120 "$PYTHON" -m benchmarks.training.training_step --batch 1 "${small[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/training-step-1-$SLUG.json"
  step training-step-million 150 "$PYTHON" -m benchmarks.training.training_step --batch 1 --only sparse --repeats 2 \
    --checkpointing yes "${million[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/training-step-million-$SLUG.json"
  step sampling 90 "$PYTHON" -m benchmarks.sampling "${bytes[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/sampling-$SLUG.json"
  bars
}
part_5() {
  # The contexts that matter most come first: what the time limit cuts off is at the end.
  local grid=(--time-limit 230 --flex-patterns local column "fixed merged" --contexts 12288 1048576 65536 262144 3072)
  [ -z "$REHEARSE" ] || grid=(--contexts 64 --head-widths 16 --heads 1 --repeats 1 --no-flex)
  step attention 270 "$PYTHON" -m benchmarks.attention.attention "${grid[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/attention-$SLUG.json"
  bars
}
part_6() {
  # A seed of both data sets before the next: what the time limit cuts off are seeds.
  local options=(--size real --time-limit 470) absent
  [ -z "$REHEARSE" ] || options=(--size tiny --seeds 1 --text "$ROOT/docs")
  absent="$(missing deepspeed hjson msgpack ninja packaging psutil cpuinfo einops safetensors tqdm webdataset \
    braceexpand yaml PIL matplotlib pydantic pydantic_core annotated_types typing_extensions)"
  if [ -n "$absent" ]; then
    skip paper "it needs $absent; --wheels installs it"
    FAILED=1
    return
  fi
  step paper 540 "$PYTHON" -m benchmarks.paper.paper "${options[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/paper-$SLUG.json"
}
part_7() {
  # A card of 141 GB holds it; one of 80 may, and does where block inputs wait on the host.
  local changes=() absent
  [ -z "$REHEARSE" ] || changes=(model.context=1024 model.layers=2 model.attention.stride=32 model.embedding.row_width=32
    model.backend=reference deepspeed=zero0_fp32)
  absent="$(missing deepspeed hjson msgpack ninja packaging psutil cpuinfo einops pydantic safetensors tqdm webdataset)"
  if [ -n "$absent" ]; then
    skip long-and-large "it needs $absent; --wheels installs it"
    return
  fi
  step long-and-large 280 "$PYTHON" -m benchmarks.training.planned_memory music_1m_152m "${changes[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/planned-memory-$SLUG.json"
  [ -n "$REHEARSE" ] || changes=('deepspeed.activation_checkpointing={"cpu_checkpointing": true}')
  step long-and-large-host 280 "$PYTHON" -m benchmarks.training.planned_memory music_1m_152m "${changes[@]}" \
    "${OVERWRITE[@]}" --output "$OUTPUT/planned-memory-host-$SLUG.json"
}
part_8() {
  local workers=() options=() absent sources settings train
  [ -n "$(missing xdist)" ] || workers=(-n 12)
  [ -z "$REHEARSE" ] || workers=(-p no:xdist)
  tests delta-indexed 120 "${workers[@]}" tests/kernels/test_triton_delta.py tests/kernels/test_triton_indexed.py
  tests mixers 150 "${workers[@]}" tests/sparse_model/test_systems.py -k a_card_computes
  absent="$(missing deepspeed hjson msgpack ninja packaging psutil cpuinfo einops pydantic safetensors tqdm webdataset)"
  if [ -n "$absent" ]; then
    skip deepspeed-training "it needs $absent; --wheels installs it"
    return
  fi
  sources="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')"
  settings=(deepspeed=zero2_bf16 train.global_batch=16 train.micro_batch=16 train.checkpoint_every=200)
  settings+=(train.evaluate_every=200) steps=(train.steps=200 train.steps=400)
  if [ -n "$REHEARSE" ]; then
    sources="$ROOT/launcher"
    settings=(train.global_batch=2 train.micro_batch=2 train.checkpoint_every=2 train.evaluate_every=2)
    settings+=(train.evaluate_contexts=2) steps=(train.steps=2 train.steps=4)
  fi
  train=("$PYTHON" -m longstride.launcher.cli train --config ds_configs/experiments/demo.json --processes 1)
  settings+=("train.output=$WORK/run" "data.path=$WORK/data" train.warmup_steps=1)
  step data 60 "$PYTHON" -m longstride.launcher.cli data build "$sources" --suffix .py --exclude site-packages --output "$WORK/data"
  step training 150 "${train[@]}" "${settings[@]}" "${steps[0]}" &&
    step resume 120 "${train[@]}" --resume auto "${settings[@]}" "${steps[1]}"
  [ ! -f "$WORK/run/metrics.jsonl" ] || cp "$WORK/run/metrics.jsonl" "$OUTPUT/training-metrics.jsonl"
  [ -z "$REHEARSE" ] || options=(--contexts 128 --rounds 1)
  step indexer 90 "$PYTHON" -m benchmarks.memories.indexer --rounds 10 "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/indexer-$SLUG.json"
  [ -z "$REHEARSE" ] || options=(--context 128 "${options[@]}" --generated 128 256)
  step recurrences 60 "$PYTHON" -m benchmarks.memories.recurrences --rounds 20 "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/recurrences-$SLUG.json"
}
for part in "${PARTS[@]}"; do "part_$part"; done

{
  printf '\n%-24s %-10s %6s\n' step outcome seconds
  printf '%s\n' "${STEPS[@]}"
  echo "parts ${PARTS[*]}: ${SECONDS} s; results in $OUTPUT"
} | tee -a "$LOG"
exit "$FAILED"
