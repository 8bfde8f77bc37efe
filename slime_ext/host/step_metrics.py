"""The metrics of the optimizer step that is under way on this rank.

A step is opened before the host trains it and closed when the optimizer has stepped; hook calls in between
add to it. Without an open step nothing is measured. Nothing survives the step but the guards' counts: slime
takes the device's memory and the process groups away between rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime_ext import metrics
from slime_ext.host import samples
from slime_ext.host.configured import correction_of_flags
from slime_ext.host.contract import HookCall
from slime_ext.host.nonfinite import NonFiniteTracker
from slime_ext.host.ranks import Ranks, pipeline_group, ranks
from slime_ext.host.rollout_data import numbers
from slime_ext.metrics import Accumulator, Measured, MetricsLayout
from slime_ext.ops.segments import Segments

LONGEST = 2000  # bytes of an error that stages share


@dataclass
class OptimizerStep:
    """One optimizer step on this rank."""

    layout: MetricsLayout
    accumulator: Accumulator
    tracker: NonFiniteTracker
    # One mask of each micro-batch, by its identity: a loss that is recomputed calls the hook again with the
    # same objects. Held until the step ends, so that no other tensor gets the same identity.
    seen: dict[int, Tensor] = field(default_factory=dict)

    def is_new(self, call: HookCall, *, count: bool = True) -> bool:
        """Whether this micro-batch has not been counted; from now on it has, if it is to ``count``."""
        mask = call.loss_masks[0] if len(call.loss_masks) else call.pg_loss
        if id(mask) in self.seen:
            return False
        if count:
            self.seen[id(mask)] = mask
        return True

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Scalars and curves over all ranks that train the step; one SUM, the only wait for the device.

        Raises:
            NonFiniteError: a rank met a non-finite proximal or target log-prob.
        """
        here = ranks()
        rank, size = place_of(here)
        measured = self.accumulator.measured
        device = self.tracker.device = _device() if measured is None else measured.sums.device
        totals, extra = self.accumulator.reduce(
            here.all_sum, rank, size, device=device, extra=self.tracker.vector()
        )
        self.tracker.check(extra, rank)
        return metrics.scalars(totals), metrics.curves(totals)

    def explain(self) -> None:
        """Names what this rank found when the step broke off.

        Raises:
            NonFiniteError: it met a non-finite log-prob.
        """
        if self.tracker.looks:
            self.tracker.check([numbers(self.tracker.vector())], 0)


_open: OptimizerStep | None = None
_leaves_loss_alone = False


@contextmanager
def under_way(layout: MetricsLayout) -> Iterator[OptimizerStep]:
    """Opens an optimizer step for the hook calls inside."""
    global _open
    step = _open = OptimizerStep(layout, Accumulator(layout), NonFiniteTracker())
    try:
        yield step
    finally:
        _open = None


def is_under_way() -> bool:
    """Whether a step is open: what a hook call leaves behind will be read."""
    return _open is not None


def layout_of(args: Any, *, curves: bool) -> MetricsLayout | None:
    """What the hook that the flags name will measure; None where it is not one of ours."""
    correction = correction_of_flags(args)
    return None if correction is None else MetricsLayout.of(correction, curves=curves)


def layout_for(call: HookCall) -> MetricsLayout | None:
    """What this hook call has to measure; None: nothing, or it has been measured already."""
    return _open.layout if _open is not None and _open.is_new(call) else None


def add(measured: Measured) -> None:
    """Adds a micro-batch to the open step."""
    known = _open.accumulator.measured
    _open.accumulator.measured = measured if known is None else known + measured


def note_nonfinite(call: HookCall, values: Mapping[str, Tensor | None], segments: Segments) -> None:
    """Leaves a mark where log-probs are not finite, to be read when the step is reduced; before the call is
    measured."""
    if _open is not None and _open.is_new(call, count=False):
        _open.tracker.look(values, segments, samples.of(call.loss_masks))


def leave_loss_alone() -> None:
    """From now on the hook hands the host's loss back: a guard asked for it."""
    global _leaves_loss_alone
    _leaves_loss_alone = True


def leaves_loss_alone() -> bool:
    """Whether a guard has made the correction metrics only."""
    return _leaves_loss_alone


def reset() -> None:
    """As in a new process; for tests."""
    global _open, _leaves_loss_alone
    _open, _leaves_loss_alone = None, False


def place_of(here: Ranks) -> tuple[int, int]:
    """Rank and size among the data x context parallel ranks."""
    size = here.context.size
    return here.dp_rank * size + here.context.rank, here.dp_size * size


def share_error_across_stages(reason: str) -> str:
    """The error of one of the pipeline's stages, on all of them; empty where none has one.

    Every stage asks, once per optimizer step; one of them at most gives a reason, empty for none.
    """
    stages = pipeline_group()
    if stages is None or stages.size() == 1:
        return reason

    def over_stages(values: Sequence[int]) -> list[float]:
        said = torch.tensor(values, dtype=torch.float32, device=_device())
        torch.distributed.all_reduce(said, group=stages)
        return numbers(said)

    if not any(over_stages([int(bool(reason))])):
        return ""
    text = over_stages(list(reason.encode()[:LONGEST].ljust(LONGEST, b"\0")))
    return bytes(map(int, text)).rstrip(b"\0").decode(errors="ignore")


def _device() -> str:
    dist = torch.distributed
    on_cuda = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
    return "cuda" if on_cuda else "cpu"
