"""What slime_ext remembers between two calls in one process of a run, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what they define is held here, and they hold it
    from slime_ext.host.step_metrics import OptimizerStep


@dataclass
class Session:
    """The memory of one process. It uses the parts that it needs: it trains, or samples, or both."""

    step: OptimizerStep | None = None  # the one that is being trained; None between two
    leaves_loss_alone: bool = False  # a guard asked for metrics only

    def reset(self) -> None:
        """Forgets everything, as a new process would know nothing."""
        vars(self).update(vars(Session()))


session = Session()
