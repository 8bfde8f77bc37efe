"""``check`` against the host's own parser and ``init`` on every script of a real tree (HOSTS).

Over all trees it is a program, a minute of CPU: ``python -m tests.downstream.launches nothing token_tis``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.downstream.launches import compared, differing, unread

TREES = sorted(Path(os.environ.get("HOSTS", "none")).glob("slime-*"))
pytestmark = pytest.mark.skipif(not TREES, reason="HOSTS names no trees")


# one lacks a backslash, one a value of --wandb-key
UNREAD = re.compile("are required: --rollout-batch-size|argument --wandb-key: expected one argument")


def test_check_says_of_every_script_and_mistake_what_start_up_says():
    """Of every script of the newest tree alone and with a correction, of one with every addition."""
    rows = compared(TREES[0], ["nothing", "token_tis"], set(), thorough="run-qwen3-4B.sh")
    assert differing(rows) == []
    assert len({row[0].script.name.partition("+")[0] for row in rows}) >= 20
    refused = [launch for launch, said, *_ in rows if said and launch.script.name.startswith("run-qwen3-4B+")]
    assert len(refused) == 11  # what the host refuses is left to it
    assert [row for row in unread(rows) if not UNREAD.search(row[3])] == []
