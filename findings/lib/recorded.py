"""Compares what a script sees with what was seen when the script was written."""

import sys


def expect(sentence: str, is_true: bool) -> None:
    """Prints the sentence if it is still true, and otherwise ends the script with status 1."""
    if not is_true:
        sys.exit(f"CHANGED, no longer true: {sentence}")
    print(f"as recorded: {sentence}")
