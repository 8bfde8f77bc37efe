#!/usr/bin/env bash
# If an engine answers 500, sglang-router sends the same request to the other engine, and the client sees 200.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" sglang-router==0.3.2
run - <<'PYTHON'
from importlib.metadata import version

from recorded import expect
from router import Router

with Router() as router:
    for worker in router.workers:
        worker.failures = 1
    status = router.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
    count = len(router.received())
print("sglang-router", version("sglang-router"))
print(f"one request, whose first engine answers 500: {count} requests reached the engines, status {status}")
expect("the request was sent more than once", count > 1)
expect("the client sees no failure", status == 200)
PYTHON
