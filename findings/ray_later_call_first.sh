#!/usr/bin/env bash
# An asynchronous or threaded actor of Ray runs a later call first if an argument of the earlier one is not
# ready. So `generate` can overtake the `update_weights` that was submitted before it.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" ray==2.60.0
run - <<'PYTHON'
import time

import ray
from recorded import expect

ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)


@ray.remote
def weights():
    time.sleep(2)
    return "new weights"


class Engine:
    def __init__(self):
        self.calls = []

    def update_weights(self, weights):
        self.calls.append("update_weights")

    def generate(self):
        self.calls.append("generate")

    def seen(self):
        return self.calls


class AsyncEngine:
    def __init__(self):
        self.calls = []

    async def update_weights(self, weights):
        self.calls.append("update_weights")

    async def generate(self):
        self.calls.append("generate")

    async def seen(self):
        return self.calls


def order(engine):
    ray.get([engine.update_weights.remote(weights.remote()), engine.generate.remote()])
    return ray.get(engine.seen.remote())


print("ray", ray.__version__, "update_weights is submitted first, with an argument that takes 2 s:")
orders = {
    "plain": order(ray.remote(Engine).remote()),
    "threaded": order(ray.remote(Engine).options(max_concurrency=2).remote()),
    "async": order(ray.remote(AsyncEngine).remote()),
}
for name, calls in orders.items():
    print(f"  {name:8} actor ran {', then '.join(calls)}")
expect("a plain actor keeps the order", orders["plain"] == ["update_weights", "generate"])
expect("threaded and async actors do not", orders["threaded"] == orders["async"] == ["generate", "update_weights"])
ray.shutdown()
PYTHON
