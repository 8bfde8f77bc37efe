"""Warnings that are said once."""

from __future__ import annotations

import functools
import logging
from typing import Any

from slime_ext.host.summary import double_count

log = logging.getLogger("slime_ext")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time this process has it to say."""
    log.warning(message)


def warn_of_double_count(args: Any) -> None:
    """Says that off_policy_is_function counts target / proximal twice, where the arguments make it so."""
    if line := double_count(args):
        warn_once(line)
