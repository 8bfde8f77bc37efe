"""The version of the weights that this process has pushed to its engines, for tests."""

from __future__ import annotations

from slime_ext.host import certify
from slime_ext.host.certify import PUSHES


def pushed(version: int | None = None) -> None:
    """As in a process that has pushed this version, or none."""
    PUSHES.value = PUSHES.empty()
    if version is not None:
        certify.pushes().pushed(version)
