"""Moved: `tests.ranks`."""

from tests.ranks import each, run_ranks

__all__ = ["each", "run_ranks"]
