"""The lag panel's reward under the name that its frozen settings give, and as a real host calls it."""

from __future__ import annotations

from argparse import Namespace

from slime_ext.launcher.task.rewards import tokens_in_place

__all__ = ["of_host", "tokens_in_place"]


async def of_host(args: Namespace, sample: object, **kwargs: object) -> float:
    """``tokens_in_place`` as slime and miles call it at --custom-rm-path."""
    return tokens_in_place(args, sample)
