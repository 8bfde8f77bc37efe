#!/usr/bin/env bash
# The adapters inside the real verl, SkyRL and cookbook, and the dialects of verl, SkyRL, TRL and OpenRLHF beside those systems,
# in a scratch environment on top of the one of `make install`. SLIME names a slime checkout at 2e5cd7c for its score centering,
# COOKBOOK one of fw-ai/cookbook at 76821fa; without them their tests are skipped. 0.3 GB, about a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
SCRATCH="${SCRATCH:-$(mktemp -d)}"
BASE="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
.venv/bin/python -m venv "$SCRATCH"
echo "$BASE" >"$("$SCRATCH/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
"$SCRATCH/bin/python" -m pip --disable-pip-version-check install -qq --no-deps -r tests/adapters/requirements.txt
"$SCRATCH/bin/python" -m pip --disable-pip-version-check install -qq --no-deps -e .
CUDA_VISIBLE_DEVICES="" "$SCRATCH/bin/python" -m pytest tests/adapters tests/tools/convert/test_real_systems.py -q "$@"
