"""Shows how far a run is: a bar that is redrawn in a terminal, one line per rollout in a file."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """Progress of `total` rollouts, of which `done` were done before, by an earlier run."""

    def __init__(self, total: int, done: int = 0, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console(highlight=False, soft_wrap=True)
        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=24), text, TimeRemainingColumn(compact=True))
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task(f"rollout {done}/{total}", total=total, completed=done)
        self._bar.start()

    def update(self, done: int, reward: float | None, tokens_per_s: float) -> None:
        """Shows that `done` rollouts are finished, with the last one's mean reward and speed."""
        shown = "" if reward is None else f"reward {reward:.3f}  "
        text = f"rollout {done}/{self.total}  {shown}{tokens_per_s:,.0f} tokens/s"
        if self._bar.disable:
            self.note(text)
        self._bar.update(self._task, completed=done, description=text)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.stop()
