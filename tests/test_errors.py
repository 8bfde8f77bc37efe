"""An error that another process raised: what it is here, and where its line is printed."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from slime_ext.errors import ConfigError, GuardError

DRIVER = """
import pickle, sys, types
from slime_ext import errors

class RayTaskError(Exception):
    def __init__(self, cause):
        self.cause = cause

ray = sys.modules["ray"] = types.ModuleType("ray")
ray.exceptions = types.SimpleNamespace(RayTaskError=RayTaskError)
ray.shutdown = lambda: print("what a worker wrote", file=sys.stderr)
received = pickle.loads(bytes.fromhex(sys.argv[1]))
raise {raised}
"""


def test_an_error_survives_the_way_between_processes(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)  # another test may have imported it
    hook = sys.excepthook
    for kind in (ConfigError, GuardError):
        found = pickle.loads(pickle.dumps(kind("a: expected b")))
        assert type(found) is kind and str(found) == "a: expected b"
    assert sys.excepthook is hook  # no driver of Ray


@pytest.mark.parametrize(
    ("raised", "lines"),
    [
        (
            "RayTaskError(RayTaskError(received))",
            ["what a worker wrote", "", "slime_ext: --x: expected 1, got 2"],
        ),
        (
            "type('Dual', (RayTaskError, errors.ConfigError), {})(received)",
            ["", "slime_ext: --x: expected 1, got 2"],
        ),
        ("KeyError('another')", ["KeyError: 'another'"]),
    ],
)
def test_an_actors_error_is_the_last_line_of_rays_driver(raised, lines):
    sent = pickle.dumps(ConfigError("--x: expected 1, got 2")).hex()
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER.format(raised=raised), sent],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and "Traceback" in ended.stderr
    assert ended.stderr.splitlines()[-len(lines) :] == lines, ended.stderr
