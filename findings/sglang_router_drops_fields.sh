#!/usr/bin/env bash
# sglang-router passes on only those fields of /generate that it knows. return_routed_experts, which routing
# replay needs, and custom_params are not among them.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" sglang-router==0.3.2
run - <<'PYTHON'
import json
from importlib.metadata import version

from recorded import expect
from router import Router

params = {"temperature": 0.6, "max_new_tokens": 4, "sampling_seed": 5, "custom_params": {"key": 1}}
request = {"input_ids": [1, 2, 3], "sampling_params": params, "return_logprob": True,
           "return_routed_experts": True}
with Router() as router:
    status = router.generate(**request)
    [received] = router.received()
print("sglang-router", version("sglang-router"))
print("sent     ", json.dumps(request))
print("received ", json.dumps({name: value for name, value in received.items() if value}))
expect("the answer is 200", status == 200)
expect("return_routed_experts does not arrive", "return_routed_experts" not in received)
expect("custom_params does not arrive", "custom_params" not in received["sampling_params"])
expect("sampling_seed and return_logprob arrive",
       received["sampling_params"]["sampling_seed"] == 5 and received["return_logprob"])
PYTHON
