"""What slime_ext remembers between two calls in one process of a run, in one place.

Two things are not here: what ``errors.warn_once`` said, because code below ``host`` warns too, and
``sys.excepthook``, which is Python's own.
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
    """The memory of one process. It uses the parts that it needs: it trains, or samples, or both."""

    step: OptimizerStep | None = None
    """The optimizer step that is being trained; None between two."""

    leaves_loss_alone: bool = False
    """Whether a guard asked for metrics only."""

    reporters: list[tuple[Any, Reporter]] = field(default_factory=list)
    """A host's args, and what is done with the metrics of the steps that it trains with them."""

    corrections: dict[str, tuple[Any, list[Any], Correction]] = field(default_factory=dict)
    """Function of slime_ext.tis -> the args of its last call, the values read there, the correction made."""

    pushes: PushRecord | None = None
    """What is known of the pushes of this process's weights; None until somebody asks."""

    loss_inputs: ContextVar[dict[str, Any] | None] = field(
        default_factory=lambda: ContextVar("slime_ext_loss_inputs", default=None)
    )
    """What the policy loss that is running has at hand and does not pass to the hook; ``startup`` notes it. A
    context variable, because a loss that is computed again may run in another thread."""

    published: dict[bytes, bytes] = field(default_factory=dict)
    """What the rollout leaves for the trainer, where there is no Ray."""

    heads: dict[int, dict[Any, Any]] = field(default_factory=dict)
    """Rollout -> sample index -> the sampler's head at each token, or Ray's reference to it."""

    scored: ScoredRollout | None = None
    """The rollout that is scored and trained, with what the host's log-prob pass said of its heads."""

    asked: ContextVar[Asked | None] = field(
        default_factory=lambda: ContextVar("slime_ext_asked", default=None)
    )
    """What is asked of the engine for the sample that is generated. A context variable, because samples are
    generated at the same time."""

    def reset(self) -> None:
        """Forgets everything, as a new process knows nothing; for tests."""
        vars(self).update(vars(Session()))
        warn_once.cache_clear()


session = Session()
