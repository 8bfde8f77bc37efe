"""What the fork server imports, and what it changes in multiprocessing for all of its forks.

Not Ray, which reads its environment as it is imported.
"""

import gc
import multiprocessing
import os
from multiprocessing import context, forkserver, resource_tracker, spawn
from pathlib import Path

import megatron.training
import numpy as np
import pandas
import sglang.launch_server
import sglang.srt.entrypoints.http_server
import transformers

from slime_ext_cpu import fork_server

__all__ = ["megatron", "pandas", "sglang", "transformers"]
_choose, _prepare = multiprocessing.set_start_method, spawn.prepare


def set_start_method(method: str | None, force: bool = False) -> None:
    """A fork where SGLang asks for "spawn", which avoids that CUDA is inherited; here there is none.

    A scheduler that fails signals its parent, so it is a fork of its server while that has one thread.
    """
    is_alone = len(list(Path("/proc/self/task").iterdir())) == 1
    _choose(("fork" if is_alone else "forkserver") if method == "spawn" else method, force=force)


def prepare(data: dict) -> None:
    """Gives a new fork the environment that was sent, and a random seed of its own."""
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    np.random.seed()  # Python draws a new seed after a fork; numpy does not
    _prepare(data)


multiprocessing.set_start_method, spawn.prepare = set_start_method, prepare
context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # Megatron-LM asks for it
forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # a fork asks the same server
fork_server.send_environment()
gc.collect()
gc.freeze()  # or each collection in each fork goes through all of it, a second every time
