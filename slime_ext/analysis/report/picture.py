"""What every picture of the page has, and what it says where there is nothing to draw."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slime_ext.analysis.report.svg import Canvas


@dataclass(frozen=True)
class Picture:
    """One picture with a sentence on how to read it, or the reason why it is missing."""

    name: str
    title: str
    how: str
    svg: str = ""
    missing: str = ""
    wide: bool = False

    def drawn(self, canvas: Canvas) -> Picture:
        """With its picture."""
        return replace(self, svg=canvas.text())

    def without(self, why: str) -> Picture:
        """With a reason instead of a picture."""
        return replace(self, missing=why)
