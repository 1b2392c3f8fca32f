#!/usr/bin/env bash
# Collects what a GPU machine without network needs besides torch, triton, numpy, pytest, hypothesis and matplotlib.
#
#   benchmarks/wheels.sh FOLDER [--python PROGRAM] [--for VERSION]
#
# PROGRAM (default: .venv/bin/python, else python3) has the versions that this checkout was tested with; those are
# fetched, for Python VERSION (default 3.12) on x86-64 Linux. DeepSpeed has no wheel on the registry: one is built here
# without any compiled part, which is all that runs need. About 5 MB. Then: benchmarks/gpu_session.sh 1 --wheels FOLDER
set -euo pipefail
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
FOLDER="" VERSION=3.12 PYTHON="$ROOT/.venv/bin/python"
[ -x "$PYTHON" ] || PYTHON=python3
wrong() { echo "wheels: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --python|--for)
      [ $# -ge 2 ] || wrong "$1: needs a value"
      case "$1" in --python) PYTHON="$2" ;; --for) VERSION="$2" ;; esac
      shift ;;
    -*) wrong "$1: must be --python or --for" ;;
    *) [ -z "$FOLDER" ] || wrong "$1: one folder is enough"; FOLDER="$1" ;;
  esac
  shift
done
[ -n "$FOLDER" ] || wrong "which folder? benchmarks/wheels.sh FOLDER"
[[ "$VERSION" =~ ^3\.[0-9]+$ ]] || wrong "--for=$VERSION: must be a version of Python; nearest 3.12"
mkdir -p "$FOLDER"
[ -z "$(ls -A "$FOLDER")" ] || wrong "$FOLDER: must be empty, as two versions of one package cannot be installed"

NAMES=(hjson pydantic pydantic-core annotated-types typing-inspection webdataset braceexpand)
pinned() { "$PYTHON" -c 'import importlib.metadata as m, sys; [print(f"{n}=={m.version(n)}") for n in sys.argv[1:]]' "$@"; }
mapfile -t WANTED < <(pinned "${NAMES[@]}")
[ "${#WANTED[@]}" -eq "${#NAMES[@]}" ] || wrong "$PYTHON: must have all of ${NAMES[*]}"
PLATFORMS=()
for glibc in 28 27 17 12 5; do PLATFORMS+=(--platform "manylinux_2_${glibc}_x86_64"); done
PLATFORMS+=(--platform manylinux2014_x86_64)
for one in "${WANTED[@]}"; do
  "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$FOLDER" \
    --python-version "$VERSION" --implementation cp "${PLATFORMS[@]}" "$one" ||
    "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$FOLDER" "$one" # sources alone
done
# torch is at hand, so that its setup needs no other; no operation is compiled, so that any Python takes the wheel.
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$FOLDER" "$(pinned deepspeed)"
for wheel in "$FOLDER"/*.whl; do
  case "$wheel" in *-any.whl|*-cp"${VERSION/./}"-*|*-abi3-*) ;; *) wrong "$wheel: not for Python $VERSION" ;; esac
done
ls -l "$FOLDER"
du -sh "$FOLDER"
