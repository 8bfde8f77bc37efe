"""How far a run is: one line that is redrawn in a terminal, one line per rollout in a file."""

from __future__ import annotations

import sys
import time
from typing import TextIO


def line(done: int, total: int, reward: float | None, tokens_per_s: float | None, left: float | None) -> str:
    """The text of the line; `left` in seconds.

    >>> line(3, 60, 0.25, 1234.0, 95.0)
    'rollout 3/60  reward 0.250  1,234 tokens/s  1:35 left'
    """
    parts = [f"rollout {done}/{total}"]
    parts += [] if reward is None else [f"reward {reward:.3f}"]
    parts += [] if tokens_per_s is None else [f"{tokens_per_s:,.0f} tokens/s"]
    parts += [] if left is None else [f"{clock(left)} left"]
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds, hours where there are any.

    >>> clock(95), clock(3700)
    ('1:35', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Progress of `total` rollouts, of which `done` were done before, by an earlier run."""

    def __init__(self, total: int, done: int = 0, stream: TextIO | None = None):
        self.total, self.done = total, done
        self._first, self._started = done, time.monotonic()
        self._stream = stream or sys.stdout
        self._bar = _bar(self._stream, total, done) if self._stream.isatty() else None

    def update(self, done: int, reward: float | None = None, tokens_per_s: float | None = None) -> None:
        """Shows that `done` rollouts are finished."""
        self.done = done
        text = line(done, self.total, reward, tokens_per_s, self._left())
        if self._bar is None:
            self.note(text)
        else:
            self._bar.update(self._bar.task_ids[0], completed=done, description=text)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the progress line."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _left(self) -> float | None:
        here = self.done - self._first
        return (time.monotonic() - self._started) / here * (self.total - self.done) if here else None


def _bar(stream: TextIO, total: int, done: int):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=Console(file=stream))
    bar.add_task(line(done, total, None, None, None), total=total, completed=done)
    bar.start()
    return bar
