"""``check`` against the host's own parser and ``init`` on every script of slime's real trees (HOSTS)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.downstream.launches import PYTHON, compared, differing, unread

TREES = sorted(Path(os.environ.get("HOSTS", "none")).glob("slime-*"))
pytestmark = pytest.mark.skipif(
    not TREES or not PYTHON.exists(), reason="HOSTS names no trees, or there is no .venv-host"
)


# v0.2.0's scripts have flags of an older SGLang; two of slime's have lost a backslash
UNREAD = re.compile(
    "ambiguous option: --sglang|unrecognized arguments: --|are required: --rollout-batch-size"
)


def test_check_says_of_every_script_and_mistake_what_start_up_says():
    """Of every script alone and with a correction, of one of the newest tree with every addition."""
    known, rows = set(), []
    for tree in TREES:
        thorough = "run-qwen3-4B.sh" if tree is TREES[0] else ""  # older hosts refuse what `check` cannot see
        rows += compared(tree, ["nothing", "token_tis"], known, thorough)
    assert differing(rows) == []
    assert len(known) >= 20
    refused = [launch for launch, said, *_ in rows if said and launch.script.name.startswith("run-qwen3-4B+")]
    assert len(refused) >= 12
    assert [row for row in unread(rows) if not UNREAD.search(row[3])] == []
