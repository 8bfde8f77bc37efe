"""``check`` against the host's own parser and ``init`` on a script of a real tree (HOSTS).

Over every script of every tree it is a program, as it takes minutes: ``python -m tests.downstream.launches``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.downstream.launches import ADDED, PYTHON, compared, differing

TREES = sorted(Path(os.environ.get("HOSTS", "none")).glob("slime-*"))
pytestmark = pytest.mark.skipif(
    not TREES or not PYTHON.exists(), reason="HOSTS names no trees, or there is no .venv-host"
)


def test_check_says_of_every_mistake_what_start_up_says(tmp_path):
    tree = tmp_path / "slime-one"
    source = TREES[0] / "scripts"
    for path in (source / "run-qwen3-4B.sh", source / "models/qwen3-4B.sh"):
        target = tree / "scripts" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (tree / "slime").symlink_to(TREES[0] / "slime")
    rows = compared(tree, list(ADDED), set())
    assert len(rows) == len(ADDED) and differing(rows) == []
    assert sum(bool(said) for _, said, _, _ in rows) >= 12
