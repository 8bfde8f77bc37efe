"""Answers written down: a text of inputs, each with what is said to it, indented, below.

To write them anew set ``REGENERATE=1`` in the environment and read the diff.
"""

from __future__ import annotations

import os


def golden(path, text):
    if os.environ.get("REGENERATE"):
        path.write_text(text)
    assert text == path.read_text()


def pairs(path, answer):
    """Asks every input of the text again. ``answer``: a line -> lines. Returns all answers."""
    asked = [block.splitlines()[0] for block in path.read_text().strip().split("\n\n")]
    answers = [answer(line) for line in asked]
    assert not any("\n" in line for lines in answers for line in lines)
    said = ("\n    ".join((line, *lines)) for line, lines in zip(asked, answers, strict=True))
    golden(path, "\n\n".join(said) + "\n")
    return answers
