# Source this file with pinned packages as arguments; `torch` is torch==2.13.0, or the build that TORCH names. The
# file makes a temporary folder with an environment, installs the packages there, and changes into the folder. The
# folder is removed when the script ends. PYTHON names the interpreter (3.11 is the one that was used).
set -euo pipefail
findings=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
packages=()
for package in "$@"; do
  [ "$package" = torch ] && package=${TORCH:-torch==2.13.0}
  packages+=("$package")
done
environment/bin/python -m pip --disable-pip-version-check install -qq --no-compile "${packages[@]}"
export PYTHONPATH=$findings/lib OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
run() { environment/bin/python "$@"; }
