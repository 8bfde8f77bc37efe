"""Reads one launch script in a separate process: stdin has a ``Request``, stdout the ``Launch``."""

from __future__ import annotations

import pickle
import resource
import sys

from slime_ext.errors import SlimeExtError
from slime_ext.tools.launch.script_run import launch_of

MOST_BYTES = 4 << 30  # of memory
MOST_S = 60  # of processor time; it ends a reader whose parent was killed


def main() -> None:
    """Reads the request, and writes the launch or the error."""
    for what, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_CPU, MOST_S)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        answer: object = launch_of(pickle.load(sys.stdin.buffer))
    except SlimeExtError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))
