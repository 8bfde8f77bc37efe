"""Tests the pause of the search for reference cycles."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from slime_ext.tools.collection import importing, paused

COMMAND = """
import gc, sys
from slime_ext.tools.commands import cli
cli.main(["analyze", sys.argv[1]])
assert "torch" in sys.modules
print(gc.get_freeze_count(), gc.isenabled())
"""


@pytest.mark.parametrize("was_on", [True, False])
def test_pause_ends_as_it_began(was_on):
    before = gc.isenabled()
    try:
        gc.enable() if was_on else gc.disable()
        with pytest.raises(KeyError), paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was_on
    finally:
        gc.enable() if before else gc.disable()


def test_modules_loaded_before_exempt_nothing():
    before = gc.get_freeze_count()
    with importing("sys"):
        assert not gc.isenabled()
    assert gc.get_freeze_count() == before


def test_analyze_exempts_what_torch_made(tmp_path):
    line = '{"rollout_log_probs": [-1.0, -2.0], "log_probs": [-1.0, -2.1]}\n'
    (tmp_path / "run.jsonl").write_text(line)
    words = [sys.executable, "-c", COMMAND, str(tmp_path / "run.jsonl")]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    count, is_on = run.stdout.split()[-2:]
    assert int(count) > 100_000
    assert is_on == "True"
