#!/usr/bin/env bash
# Everything that is to be checked and measured on a GPU, most valuable first, in parts of under ten minutes.
#
#   benchmarks/gpu_session.sh PART [--output DIR] [--wheels DIR] [--python PROGRAM] [--overwrite] [--rehearse]
#
#   PART 1  the machine, the kernels' correctness, the cases that bars are set on, the bars
#   PART 2  tuning
#   PART 3  a whole training step, the whole grid of attention, the bars, sampling byte by byte
#   PART 4  a DeepSpeed training of some hundred steps, and its resume
#   PART 5  the paper's tables: dense, fixed and strided models trained side by side
#
# Nothing need be installed but torch, triton, numpy, pytest, hypothesis and matplotlib: the checkout is found through
# PYTHONPATH, and what else is missing is installed from --wheels into a folder that is removed afterwards. Every step
# has its own time limit, the part goes on when one fails, and the exit code is 1 if one did. --rehearse runs the same
# steps on a CPU, Triton's kernels in its interpreter, in sizes that say that everything runs and nothing of speed.
set -uo pipefail
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
PART="" OUTPUT="$ROOT/benchmarks/results" WHEELS="" PYTHON=python3 OVERWRITE=() REHEARSE=""

wrong() { echo "gpu_session: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --output|--wheels|--python)
      [ $# -ge 2 ] || wrong "$1: needs a value"
      case "$1" in --output) OUTPUT="$2" ;; --wheels) WHEELS="$2" ;; --python) PYTHON="$2" ;; esac
      shift ;;
    --overwrite) OVERWRITE=(--overwrite) ;;
    --rehearse) REHEARSE=yes ;;
    [1-5]) PART="$1" ;;
    *) wrong "$1: must be 1, 2, 3, 4 or 5, or one of --output, --wheels, --python, --overwrite, --rehearse" ;;
  esac
  shift
done
[ -n "$PART" ] || wrong "which part? 1, 2, 3, 4 or 5"
[ -z "$WHEELS" ] || [ -d "$WHEELS" ] || wrong "--wheels=$WHEELS: must be a folder"
mkdir -p "$OUTPUT" || wrong "--output=$OUTPUT: cannot be made"
OUTPUT="$(cd "$OUTPUT" && pwd)"
[ -z "$WHEELS" ] || WHEELS="$(cd "$WHEELS" && pwd)"
LOG="$OUTPUT/part$PART.log"
[ ! -e "$LOG" ] || [ ${#OVERWRITE[@]} -gt 0 ] || wrong "$LOG: exists already; --overwrite replaces it"
: > "$LOG"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
cd "$ROOT" || exit 2
export PYTHONPATH="$ROOT:$WORK/site" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "$REHEARSE" ]; then
  export CUDA_VISIBLE_DEVICES="" TRITON_INTERPRET=1
else
  unset TRITON_INTERPRET
fi

STEPS=() FAILED=0
note() { STEPS+=("$(printf '%-24s %-10s %6s' "$1" "$2" "$3")"); }
step() { # NAME SECONDS COMMAND …: runs it under a time limit and notes how it went
  local name="$1" limit="$2" began=$SECONDS code how
  shift 2
  printf '\n== %s (at most %s s): %s\n' "$name" "$limit" "$*" | tee -a "$LOG"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$LOG"
  code=${PIPESTATUS[0]}
  case $code in 0) how=ok ;; 124|137) how="timed out" ;; *) how=failed ;; esac
  [ "$how" = ok ] || FAILED=1
  note "$name" "$how" "$((SECONDS - began))"
  return "$code"
}
skip() { printf '\n== %s: %s\n' "$1" "$2" | tee -a "$LOG"; note "$1" "not run" 0; }
missing() { # MODULE …: those that cannot be found
  "$PYTHON" - "$@" <<'END'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
END
}
bars() { step bars 20 "$PYTHON" benchmarks/attention/bars.py --results "$OUTPUT" --device "$DEVICE"; }

if [ -n "$WHEELS" ]; then
  step wheels 40 "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$WORK/site" "$WHEELS"/*.whl
fi
step machine 30 "$PYTHON" - <<'END'
import importlib.metadata, platform, shutil, subprocess
import torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda or torch.version.hip)
for name in ("triton", "numpy", "pydantic", "deepspeed", "webdataset", "safetensors", "mpi4py", "pytest", "matplotlib"):
    found = next((d.version for d in importlib.metadata.distributions(name=name)), None)
    print(f"{name:<12} {found or 'not installed'}")
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

part_1() {
  local chosen=(-k triton) workers=() tests=(conformance triton_attention triton_selections)
  if [ -n "$REHEARSE" ]; then
    chosen=(-k "triton and same_bits or triton_selections and expanded") workers=(-p no:xdist)
  elif [ -z "$(missing xdist)" ]; then
    workers=(-n 14) # compiling is what takes time
  fi
  # Plugins of a strange machine may warn; what is asked here is whether the kernels are right.
  tests=("${tests[@]/#/tests/kernels/test_}")
  step kernels 240 "$PYTHON" -m pytest "${tests[@]/%/.py}" -q -W default -p no:cacheprovider "${workers[@]}" "${chosen[@]}"
  local options=(--preset bars --time-limit 180 --flex-patterns local) # each compiles for many seconds
  [ -z "$REHEARSE" ] || options=(--preset rehearsal --backend triton --no-flex --repeats 1)
  step attention-bars 210 "$PYTHON" benchmarks/attention/attention.py "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/bars-$SLUG.json"
  # Routing over the root of the context's clusters, and rounds of hashing, beside dense attention.
  options=(--contexts 12288 --repeats 20)
  [ -z "$REHEARSE" ] || options=(--contexts 64 --heads 1 --repeats 1)
  step selections 40 "$PYTHON" benchmarks/attention/selections.py "${options[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/selections-$SLUG.json"
  bars
}
part_2() {
  local options=(--time-limit 420)
  [ -z "$REHEARSE" ] || options=(--device cpu --widths 16 --processes 1)
  step tuning 520 "$PYTHON" benchmarks/attention/tune.py "${options[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/tuning-$SLUG.json"
}
part_3() {
  # The contexts that matter most come first: what the time limit cuts off is at the end.
  local small=() grid=(--time-limit 260 --flex-patterns local column "fixed merged") bytes=() absent
  grid+=(--contexts 12288 1048576 65536 262144 3072)
  if [ -n "$REHEARSE" ]; then
    small=(--layers 1 --context 64 --stride 16 --summary 4 --repeats 1)
    grid=(--contexts 64 --head-widths 16 --heads 1 --plans --repeats 1 --no-flex)
    bytes=(--contexts 256 --calls 2 --repeats 1)
  fi
  absent="$(missing pydantic pydantic_core annotated_types typing_inspection typing_extensions)"
  if [ -n "$absent" ]; then
    skip training-step "the model needs $absent; --wheels installs it"
    FAILED=1
  else
    step training-step 150 "$PYTHON" benchmarks/training/training_step.py "${small[@]}" "${OVERWRITE[@]}" \
      --output "$OUTPUT/training-step-$SLUG.json"
  fi
  step attention 330 "$PYTHON" benchmarks/attention/attention.py "${grid[@]}" "${OVERWRITE[@]}" \
    --output "$OUTPUT/attention-$SLUG.json"
  bars
  if [ -z "$absent" ]; then
    step sampling 90 "$PYTHON" benchmarks/generation/sampling.py "${bytes[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/sampling-$SLUG.json"
  fi
}
part_4() {
  local absent sources settings train
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
  step training 200 "${train[@]}" "${settings[@]}" "${steps[0]}" &&
    step resume 200 "${train[@]}" --resume auto "${settings[@]}" "${steps[1]}"
  [ ! -f "$WORK/run/metrics.jsonl" ] || cp "$WORK/run/metrics.jsonl" "$OUTPUT/training-metrics.jsonl"
}
part_5() {
  # A seed of both data sets before the next: what the time limit cuts off are seeds.
  local options=(--size real --time-limit 470) absent
  [ -z "$REHEARSE" ] || options=(--size tiny --seeds 1 --text "$ROOT/docs")
  absent="$(missing webdataset braceexpand yaml PIL matplotlib pydantic pydantic_core annotated_types typing_inspection \
    typing_extensions)"
  if [ -n "$absent" ]; then
    skip paper "it needs $absent; --wheels installs it"
    FAILED=1
    return
  fi
  step paper 540 "$PYTHON" benchmarks/paper/paper.py "${options[@]}" "${OVERWRITE[@]}" --output "$OUTPUT/paper-$SLUG.json"
}
"part_$PART"

{
  printf '\n%-24s %-10s %6s\n' step outcome seconds
  printf '%s\n' "${STEPS[@]}"
  echo "part $PART: ${SECONDS} s; results in $OUTPUT"
} | tee -a "$LOG"
exit "$FAILED"
