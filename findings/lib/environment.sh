# Source this file with pinned packages as arguments. It makes a temporary folder with an environment of its
# own, installs the packages, and changes into the folder. The folder is removed when the script ends.
# PYTHON names the interpreter (3.11 is the one that was used), and TORCH another build of torch.
set -euo pipefail
findings=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv environment
torch=${TORCH:-torch==2.13.0}
environment/bin/python -m pip --disable-pip-version-check install -qq --no-compile "${@/#torch/$torch}"
export PYTHONPATH=$findings/lib OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
run() { environment/bin/python "$@"; }
