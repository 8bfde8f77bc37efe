"""Checks that a hook call makes on its tensors, and warnings that are said once. The only host syncs, on CPU
alone."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor

from slime_ext.errors import NonFiniteError
from slime_ext.host.packing import locate
from slime_ext.host.summary import double_count
from slime_ext.ops.segments import Segments

log = logging.getLogger("slime_ext")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning the first time this process has it to say."""
    log.warning(message)


def require_finite(name: str, values: Tensor, segments: Segments, consequence: str) -> None:
    """Stops at the first response token whose value is not finite. On CPU at once; on CUDA it would be a
    sync.

    Args:
        name: the host's keyword, for the message.
        values: [T].
        consequence: what it has done or what to do about it.

    Raises:
        NonFiniteError: naming sample and position.
    """
    if values.device.type != "cpu":
        return
    bad = segments.mask & ~values.detach().isfinite()
    if not bad.any():
        return
    index = int(bad.int().argmax())
    sequence, position = locate(index, segments)
    raise NonFiniteError(
        f"{name}, sequence {sequence} of {segments.count}, response token {position}: expected a finite "
        f"log-prob, "
        f"got {float(values[index])}: {consequence}"
    )


def warn_of_double_count(args: Any) -> None:
    """Says that off_policy_is_function counts target / proximal twice, where the arguments make it so."""
    if line := double_count(args):
        warn_once(line)
