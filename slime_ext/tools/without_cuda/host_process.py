"""What runs in the host's environment: a Ray of its own, then the host's train.py, or its loop for the wheel.

Started by `driver.run_host`, which sets the environment that this needs.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from slime_ext.tools.without_cuda import fork_server
from slime_ext.tools.without_cuda.machine import OBJECT_STORE_BYTES

WHEEL = "miles"
PRELOADED = (
    "pandas",
    "transformers",
    "sglang.srt.entrypoints.http_server",
    "sglang.launch_server",
    "megatron.training",
)
RAY_STARTS = 3  # on a busy machine the raylet gives up on a slow agent and dies


def main(argv: list[str]) -> int:
    """Runs the host of the first word, JSON of `host`, `asynchronous`, `gpus` and `nodes`, with the others as
    its flags; returns the exit status."""
    given, flags = SimpleNamespace(**json.loads(argv[0])), argv[1:]
    preload()
    status = fork_server.start(f"{os.environ['RAY_TMPDIR']}/fork_server")
    if status is not None:
        return status
    if given.host == WHEEL:
        return _run_wheel(given, flags)
    _run_script(given, flags)
    return 0


def preload() -> None:
    """Imports what each process of the run would; not Ray, which reads its environment as it is imported."""
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each collection in each fork goes through all of it, a second every time


def _run_script(given: SimpleNamespace, flags: list[str]) -> None:
    """The checkout's own train.py or train_async.py."""
    script = Path(given.host, "train_async.py" if given.asynchronous else "train.py")
    sys.argv = [str(script), *flags]
    sys.path.insert(0, given.host)
    start_ray(given.gpus, given.nodes)
    runpy.run_path(str(script), run_name="__main__")


def _run_wheel(given: SimpleNamespace, flags: list[str]) -> int:
    """The loop of miles' train.py from the classes of its wheel, which does not hold the file."""
    from miles.utils.arguments import parse_args

    from slime_ext.tools.without_cuda import wheel_loop

    sys.argv = ["train_async.py" if given.asynchronous else "train.py", *flags]
    args = parse_args()
    start_ray(given.gpus, given.nodes)
    asyncio.run((wheel_loop.train_async if given.asynchronous else wheel_loop.train)(args))
    return 0


def start_ray(gpus: int, nodes: int = 1) -> None:
    """Starts Ray on the loopback address, with `gpus` GPUs per node, which are only numbers to it.

    More nodes than one are further raylets on this machine.
    """
    import ray

    options = {"num_cpus": 16, "num_gpus": gpus, "object_store_memory": OBJECT_STORE_BYTES}
    for attempt in range(RAY_STARTS):
        try:
            if nodes == 1:
                ray.init("local", include_dashboard=False, logging_level="warning", **options)
                return
            from ray.cluster_utils import Cluster

            cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
            for _ in range(nodes - 1):
                cluster.add_node(**options)
            cluster.wait_for_nodes()
            ray.init(cluster.address, logging_level="warning")
            return
        except Exception:
            ray.shutdown()
            if attempt == RAY_STARTS - 1:
                raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
