"""The reward of the long answers, for --custom-rm-path: how far the model counts."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

FULL = 16  # numbers that fill an answer of 104 tokens


async def counted(args: Namespace, sample: Any, **kwargs: object) -> float:
    """The share of 16 numbers that count on from the prompt's last one, up to the first wrong one."""
    (*_, last), numbers = (map(int, re.findall(r"\d+", text)) for text in (sample.prompt, sample.response))
    right = 0
    for number in numbers:
        if right == FULL or number != last + 1 + right:
            break
        right += 1
    return right / FULL
