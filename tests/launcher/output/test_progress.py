"""Progress: one redrawn line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from slime_ext.launcher.output import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_plain_line_per_rollout():
    stream = io.StringIO()
    shown = progress.Progress(4, stream=stream)
    shown.update(1, reward=0.25, tokens_per_s=1500.0)
    shown.note("[engine] restarted")
    shown.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("rollout 1/4  reward 0.250  1,500 tokens/s  0:0")
    assert second == "[engine] restarted"


def test_a_terminal_shows_the_same_text():
    stream = Terminal()
    shown = progress.Progress(4, stream=stream)
    shown.update(4, reward=0.25)
    shown.note("[engine] restarted")
    shown.close()
    assert "rollout 4/4  reward 0.250" in stream.getvalue()
    assert "[engine] restarted" in stream.getvalue()


def test_time_left_counts_only_this_runs_rollouts(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress.Progress(100, done=90, stream=stream).update(92)
    assert stream.getvalue() == "rollout 92/100  0:40 left\n"


def test_unknown_parts_are_left_out():
    assert progress.line(0, 5, None, None, None) == "rollout 0/5"
