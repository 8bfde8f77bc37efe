"""Imports the fork server's packages, and changes multiprocessing for all of its forks.

Ray is not among them, because it reads the environment while it is imported.
"""

import multiprocessing
import os
import sys
import tempfile
from importlib import import_module
from multiprocessing import context, forkserver, resource_tracker, spawn
from pathlib import Path

from slime_ext.tools.collection import importing
from slime_ext_cpu import fork_server, processes

with importing("torch"):  # otherwise each garbage collection in a fork visits these objects, for a second
    import megatron.training
    import numpy as np
    import pandas
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import transformers

__all__ = ["megatron", "pandas", "sglang", "transformers"]
_choose, _prepare = multiprocessing.set_start_method, spawn.prepare
_mark, _installed = os.environ.get(processes.MARK), os.environ.get("SLIME_EXT_INSTALL", "").split()


def set_start_method(method: str | None, force: bool = False) -> None:
    """Forks where SGLang asks for "spawn". SGLang does so that children do not inherit CUDA.

    A failing scheduler signals its parent. So while SGLang's server has a single thread, the scheduler is
    forked from it directly and not from the fork server.
    """
    is_alone = len(list(Path("/proc/self/task").iterdir())) == 1
    _choose(("fork" if is_alone else "forkserver") if method == "spawn" else method, force=force)


def prepare(data: dict) -> None:
    """Gives a new fork the environment that it was sent, and a new random seed."""
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    if os.environ.get(processes.MARK) != _mark:  # a run that did not start this server
        _join_run(data)
    np.random.seed()  # Python draws a new seed after a fork; numpy does not
    _prepare(data)


def _join_run(data: dict) -> None:
    """Does for the fork of a shared server what its run's own server did before it imported anything."""
    processes.show_environment()
    fork_server.write_to_log()
    tempfile.tempdir = None  # the run has another TMPDIR
    sys.path = list(data["sys_path"])
    for name in os.environ.get("SLIME_EXT_INSTALL", "").split():
        if name not in _installed:
            import_module(name).install()


multiprocessing.set_start_method, spawn.prepare = set_start_method, prepare
context._concrete_contexts["spawn"] = context._concrete_contexts["forkserver"]  # Megatron-LM asks for it
forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # forks ask the same server
fork_server.send_environment()
