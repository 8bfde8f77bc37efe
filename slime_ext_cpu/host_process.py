"""Starts Ray for this run alone, then the host's train.py. For the wheel, runs the same loop.

`driver.HostRun.run` starts this module as a process and sets the environment that it needs.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from slime_ext_cpu import fork_server
from slime_ext_cpu.machine import OBJECT_STORE_BYTES

WHEEL = "miles"
RAY_STARTS = 3  # on a busy machine the raylet gives up on a slow agent and dies


def main(argv: list[str]) -> None:
    """Runs the host that the command line describes.

    Args:
        argv: first a JSON object with `host`, `asynchronous` and `gpus`, then the host's flags.
    """
    fork_server.start()
    fork_server.run(run_host, SimpleNamespace(**json.loads(argv[0])), argv[1:])


def run_host(settings: SimpleNamespace, flags: list[str]) -> None:
    """Runs the checkout's train.py, or the same loop for the wheel."""
    (_run_wheel if settings.host == WHEEL else _run_script)(settings, flags)


def _run_script(settings: SimpleNamespace, flags: list[str]) -> None:
    """Runs train.py or train_async.py of the checkout."""
    script = Path(settings.host, "train_async.py" if settings.asynchronous else "train.py")
    sys.argv = [str(script), *flags]
    sys.path.insert(0, settings.host)
    start_ray(settings.gpus)
    runpy.run_path(str(script), run_name="__main__")


def _run_wheel(settings: SimpleNamespace, flags: list[str]) -> None:
    """Runs the loop of miles' train.py, because the wheel does not contain that file."""
    from miles.utils.arguments import parse_args

    from slime_ext_cpu import wheel_loop

    sys.argv = ["train_async.py" if settings.asynchronous else "train.py", *flags]
    args = parse_args()
    start_ray(settings.gpus)
    asyncio.run((wheel_loop.train_async if settings.asynchronous else wheel_loop.train)(args))


def start_ray(gpus: int) -> None:
    """Starts Ray on the loopback address. Ray only counts the GPUs; none has to exist."""
    import ray
    from ray._private.node import Node

    # Ray would also start its web server and the monitor of its autoscaler, which import for 1.3 s. Nothing
    # asks them in a run on one machine.
    Node.start_api_server = Node.start_monitor = lambda node, **options: None
    options = {"num_cpus": 16, "num_gpus": gpus, "object_store_memory": OBJECT_STORE_BYTES}
    for attempt in range(RAY_STARTS):
        try:
            ray.init("local", include_dashboard=False, logging_level="warning", **options)
            return
        except Exception:
            ray.shutdown()
            if attempt == RAY_STARTS - 1:
                raise


if __name__ == "__main__":
    main(sys.argv[1:])
