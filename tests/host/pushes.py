"""A host's object that pushes weights and counts the pushes, as ``staleness.install`` takes note of it."""

from __future__ import annotations

from slime_ext.host import staleness


class _Pusher:
    weight_version: int | None = None


_PUSHER = _Pusher()


def trainer_at(version: int | None) -> None:
    """The trainer has pushed ``version``; None: nobody says."""
    _PUSHER.weight_version = version
    staleness._noting(lambda self: None)(_PUSHER)
