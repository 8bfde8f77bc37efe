"""What runs in the host's environment: a Ray of its own, then the host's train.py, or its loop for the wheel.

Started by `driver.run_host`, which sets the environment that this needs.
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
    """Runs the host of the first word, JSON of `host`, `asynchronous` and `gpus`, with the others as its
    flags."""
    fork_server.start()
    fork_server.run(run_host, SimpleNamespace(**json.loads(argv[0])), argv[1:])


def run_host(given: SimpleNamespace, flags: list[str]) -> None:
    """Runs train.py, or its loop for the wheel."""
    (_run_wheel if given.host == WHEEL else _run_script)(given, flags)


def _run_script(given: SimpleNamespace, flags: list[str]) -> None:
    """The checkout's own train.py or train_async.py."""
    script = Path(given.host, "train_async.py" if given.asynchronous else "train.py")
    sys.argv = [str(script), *flags]
    sys.path.insert(0, given.host)
    start_ray(given.gpus)
    runpy.run_path(str(script), run_name="__main__")


def _run_wheel(given: SimpleNamespace, flags: list[str]) -> None:
    """The loop of miles' train.py from the classes of its wheel, which does not hold the file."""
    from miles.utils.arguments import parse_args

    from slime_ext_cpu import wheel_loop

    sys.argv = ["train_async.py" if given.asynchronous else "train.py", *flags]
    args = parse_args()
    start_ray(given.gpus)
    asyncio.run((wheel_loop.train_async if given.asynchronous else wheel_loop.train)(args))


def start_ray(gpus: int) -> None:
    """Starts Ray on the loopback address, with GPUs that are only numbers to it."""
    import ray

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
