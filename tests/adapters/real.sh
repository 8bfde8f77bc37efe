#!/usr/bin/env bash
# The adapters inside the real verl, SkyRL and cookbook, in a scratch environment on top of the one of `make install`. COOKBOOK names
# a checkout of fw-ai/cookbook at 76821fa; without it its tests are skipped. 0.3 GB, about a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
SCRATCH="${SCRATCH:-$(mktemp -d)}"
BASE="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -m venv "$SCRATCH"
echo "$BASE" >"$("$SCRATCH/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
"$SCRATCH/bin/python" -m pip --disable-pip-version-check install -qq --no-deps -r tests/adapters/requirements.txt
"$SCRATCH/bin/python" -m pip --disable-pip-version-check install -qq --no-deps -e .
CUDA_VISIBLE_DEVICES="" "$SCRATCH/bin/python" -m pytest tests/adapters -q "$@"
