#!/usr/bin/env bash
# Measures what only a machine with CUDA can show, in at most eight minutes and without a network. It runs
# tests_gpu, times the hook against other systems and counts its waits, and times a host's own policy loss and a
# training step of a Megatron GPT with and without the plugin, and score centering.
#
#   bash benchmarks/cuda.sh [--wheels DIR] [--out DIR] [--slime DIR] [--verl DIR] [--skyrl DIR] [--dry-run]
#
# It needs a python3 with torch and triton. Other missing packages come from the folder of `make cuda-wheels`
# (default: cuda-wheels). --slime, --verl and --skyrl name checkouts to compare with. Without --slime, the policy
# loss is that of the wheel miles-rl. --dry-run runs all steps on a CPU with small sizes. The results are
# OUT/cuda.md and OUT/cuda.json (default: runs/cuda). The exit status is 1 if something is wrong.
set -euo pipefail
cwd=$PWD
here=$(cd "$(dirname "$0")/.." && pwd)
wheels=$here/cuda-wheels
words=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels)
      [ $# -gt 1 ] || { echo "benchmarks/cuda.sh: --wheels: expected a folder, got nothing" >&2; exit 2; }
      wheels=$2; shift 2 ;;
    *) words+=("$1"); shift ;;
  esac
done
python=${PYTHON:-python3}
"$python" -c "import torch" 2>/dev/null || {
  echo "benchmarks/cuda.sh: expected a Python with torch, got $python: name one in PYTHON" >&2; exit 2; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# Install only what is absent, because a second torch, triton or numpy beside the machine's own would break both.
mapfile -t absent < <("$python" "$here/benchmarks/absent_wheels.py" "$wheels")
if [ ${#absent[@]} -gt 0 ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${absent[@]}"
fi
cd "$here"
PYTHONPATH=$here:$site${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 "$python" -W ignore \
  -m benchmarks.on_cuda --cwd "$cwd" --wheels "$wheels" ${words[@]+"${words[@]}"}
