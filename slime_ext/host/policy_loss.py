"""Holds what the running policy loss has and does not pass to its hook.

``startup`` wraps the host's policy loss and fills a ``LossCall`` while it runs. A hook reads it once, with
``current``, and hands it down: no function below ``slime_ext.tis`` asks what runs around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime_ext.core.tokens import Head, Support
from slime_ext.host.step_metrics import OptimizerStep, current_step


@dataclass
class LossCall:
    """One call of the host's policy loss.

    Args:
        step: the optimizer step that it belongs to.
        batch: the micro-batch; None if ``init`` has not wrapped the loss.
        cur_log_probs: N x [L_i], the target's log-probs with gradient, once the loss has computed them.
        head: the head or support of the micro-batch, for ``center``.
    """

    step: OptimizerStep
    batch: Mapping[str, Any] | None = None
    cur_log_probs: list[Tensor] | None = None
    head: Head | Support | None = None

    def keywords(self) -> dict[str, Any]:
        """Returns what the host does not pass, by the names of ``HookCall``."""
        batch = self.batch or {}
        return {
            "cur_log_probs": self.cur_log_probs,
            "advantages": batch.get("advantages"),
            "max_seq_lens": batch.get("max_seq_lens"),
            "head": self.head,
            "batch": self.batch,
        }


# This is a context variable, because a loss may be computed again in another thread.
RUNNING: ContextVar[LossCall | None] = ContextVar("slime_ext_policy_loss", default=None)


def current() -> LossCall:
    """Returns the running call of the policy loss; without a batch if ``init`` has not wrapped it."""
    return RUNNING.get() or LossCall(current_step())
