"""Markers, one thread for each of the workers that share the cores, and an interrupt that is heard."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which torch.compile does too

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it in its workers, and an analysis wraps at it

import pytest

gc.disable()  # until all tests are collected: imports leave no cycles to find

# A suite in the background of a script starts with SIGINT ignored, and so would the runs that it starts.
with contextlib.suppress(ValueError):  # not in the main thread
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Workers share the cores. Not at import, because xdist's controller needs no torch: 1.5 s."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_session():
    """Every test begins as a new process does."""
    from slime_ext.host import memory

    memory.forget()


def pytest_configure(config):
    for module in ("megatron", "transformers", "torch"):  # what they say of absent accelerators
        config.addinivalue_line("filterwarnings", f"ignore:::{module}")
    config.addinivalue_line("markers", "slow: takes more than five seconds")
    config.addinivalue_line("markers", "host: runs a real host, or much of it, in processes of its own")


def pytest_collection_modifyitems(items):
    """The long ones first, so that no worker ends with one of them alone."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("host", "slow")])


@pytest.hookimpl(optionalhook=True)  # xdist may be absent
def pytest_xdist_make_scheduler(config, log):
    """Gives the tests of a file to one worker, because they share imports, caches and fixtures.

    The files come in the order of their first test: xdist would begin with those that have most tests.
    """
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_finish():
    """Exempts modules and test items from garbage collections, which would visit them again and again."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)  # after 700 new objects, Python spends 4% of the time
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ends a worker, which has said that it finished, without Python's finalisation of all packages: 3 s."""
    if hasattr(config, "workerinput"):
        atexit._run_exitfuncs()  # temporary folders go
        os._exit(0)


@pytest.fixture
def in_process(monkeypatch):
    """Scripts are read in the test's own process; test_reader.py has what only the other process does."""
    from slime_ext.tools.launch import read, script_run

    monkeypatch.setattr(read, "in_reader", script_run.launch_of)
