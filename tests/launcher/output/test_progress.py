"""Progress: a bar that is redrawn in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from slime_ext.launcher.output.progress import RunProgress


def printed(is_terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=30, soft_wrap=True, highlight=False)
    shown = RunProgress(4, console=console)
    shown.update(1, reward=None, tokens_per_s=10.0)
    shown.update(2, reward=0.25, tokens_per_s=1500.0)
    shown.note("[engine] restarted, which is longer than the terminal is wide")
    shown.close()
    return stream.getvalue()


def test_a_file_gets_one_plain_line_per_rollout():
    assert printed(is_terminal=False).splitlines() == [
        "rollout 1/4  10 tokens/s",
        "rollout 2/4  reward 0.250  1,500 tokens/s",
        "[engine] restarted, which is longer than the terminal is wide",
    ]


@pytest.mark.parametrize("said", ["rollout 2/4", "[engine] restarted"])
def test_a_terminal_shows_the_same(said):
    assert said in printed(is_terminal=True)
