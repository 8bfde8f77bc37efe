"""Holds everything that slime_ext remembers of a run between two calls in one process.

There are two exceptions: the messages that ``errors.warn_once`` has given, because code below ``host`` warns
too; and ``sys.excepthook``, because it is Python's. Caches of functions whose result never changes, and the
wrapped functions of the host, are where they are used.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_ext.errors import warn_once

if TYPE_CHECKING:  # these modules import this one
    from slime_ext.core.correction import Correction
    from slime_ext.host.certify import PushRecord
    from slime_ext.host.proximal_heads import ScoredRollout
    from slime_ext.host.rollout_heads import Asked
    from slime_ext.host.step_metrics import OptimizerStep
    from slime_ext.host.train_step import Reporter


@dataclass
class Session:
    """Holds the memory of one process, which trains, or samples, or both."""

    step: OptimizerStep | None = None
    """The optimizer step that is being trained; None between steps."""

    leaves_loss_alone: bool = False
    """Whether a guard has taken the action ``metrics_only``."""

    reporters: list[tuple[Any, Reporter]] = field(default_factory=list)
    """A host's args, and the reporter of the steps that it trains with them."""

    corrections: dict[str, tuple[Any, list[Any], Correction]] = field(default_factory=dict)
    """Function name -> the args of its last call, the values read, and the correction."""

    loss_has_ratio: tuple[Any, bool] | None = None
    """The args of the last call that centers the host's loss, and whether that loss is PPO's."""

    pushes: PushRecord | None = None
    """The record of this process's weight pushes; None until it is first used."""

    loss_inputs: ContextVar[dict[str, Any] | None] = field(
        default_factory=lambda: ContextVar("slime_ext_loss_inputs", default=None)
    )
    """Inputs of the running policy loss that it does not pass to the hook. ``startup`` collects them. This is
    a context variable, because a loss may be computed again in another thread."""

    published: dict[bytes, bytes] = field(default_factory=dict)
    """The data that the rollout publishes for the trainer, if there is no Ray."""

    heads: dict[int, dict[Any, Any]] = field(default_factory=dict)
    """Rollout -> sample index -> the sample's heads, or Ray's reference to them."""

    scored: ScoredRollout | None = None
    """The rollout that is scored and trained, with the proximal policy's log-probs at its heads."""

    asked: ContextVar[Asked | None] = field(
        default_factory=lambda: ContextVar("slime_ext_asked", default=None)
    )
    """The request for the sample that is being generated. This is a context variable, because several samples
    are generated at the same time."""

    def reset(self) -> None:
        """Forgets everything, as in a new process; for tests."""
        vars(self).update(vars(Session()))
        warn_once.cache_clear()


session = Session()
