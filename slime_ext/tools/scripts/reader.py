"""The process that reads a launch script: a ``Request`` comes in, a ``Launch`` goes out."""

from __future__ import annotations

import pickle
import resource
import sys

from slime_ext.errors import SlimeExtError
from slime_ext.tools.scripts.script_run import launch_of

MOST_BYTES = 4 << 30  # of memory
MOST_S = 60  # of a processor, for a reader whose parent was killed


def main() -> None:
    """Reads one script."""
    for what, most in ((resource.RLIMIT_AS, MOST_BYTES), (resource.RLIMIT_CPU, MOST_S)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        answer: object = launch_of(pickle.load(sys.stdin.buffer))
    except SlimeExtError as error:
        answer = error
    sys.stdout.buffer.write(pickle.dumps(answer))
