"""Rewards long answers by how far the model counts, for --custom-rm-path."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

FULL = 16  # numbers that fill an answer of 104 tokens


async def counted(args: Namespace, sample: Any, **kwargs: object) -> float:
    """Returns n / 16, if the answer's first n numbers continue the prompt's count."""
    (*_, last), numbers = (map(int, re.findall(r"\d+", text)) for text in (sample.prompt, sample.response))
    right = 0
    for number in numbers:
        if right == FULL or number != last + 1 + right:
            break
        right += 1
    return right / FULL
