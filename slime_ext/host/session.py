"""What slime_ext remembers between two calls in one process of a run, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these modules import this one
    from slime_ext.core.correction import Correction
    from slime_ext.host.certify import PushRecord
    from slime_ext.host.step_metrics import OptimizerStep
    from slime_ext.host.train_step import Reporter


@dataclass
class Session:
    """The memory of one process. It uses the parts that it needs: it trains, or samples, or both."""

    step: OptimizerStep | None = None  # the one that is being trained; None between two
    leaves_loss_alone: bool = False  # a guard asked for metrics only
    # A host's args, and what is done with the metrics of the steps that it trains with them.
    reporters: list[tuple[Any, Reporter]] = field(default_factory=list)
    pushes: PushRecord | None = None  # of the weights of this process; None until the first question
    # Function of slime_ext.tis -> the args of its last call, the values that it read there, its correction.
    corrections: dict[str, tuple[Any, list[Any], Correction]] = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets everything, as a new process would know nothing."""
        vars(self).update(vars(Session()))


session = Session()
