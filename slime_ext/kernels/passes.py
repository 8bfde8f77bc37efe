"""What the backends with passes of their own share: which arrays a call has, and what becomes of them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from slime_ext.correction import OBSERVED, Correction, Outcome, Plan, Sequences, Tokens
from slime_ext.kernels.apply import Applied, Backend, Channel, Eager, Work, finish, settled
from slime_ext.metrics.layout import COLUMNS, HIGHEST, LOG_SUMS, Layout
from slime_ext.metrics.measure import Measured
from slime_ext.objectives import Host
from slime_ext.ops.statistics import Need
from slime_ext.ops.weighted import Weighted

Named = dict[str, Tensor]
CHANNEL = ("ratios", "bounded_ones", "rejected_ones")


@dataclass(frozen=True)
class Parts:
    """What the second pass hands out; what is false is not in its machine code.

    Args:
        outcome: weights, keep, finite.
        loss: the weighted loss of the host, its factor, keep, the host's metrics.
        bounds: with the outcome, where a bound changed a weight, and the log-ratios.
        observe: with the outcome, what each step did; what became of the sequences.
        layout: of the metrics to measure.
    """

    outcome: bool = False
    loss: bool = False
    bounds: bool = False
    observe: bool = False
    layout: Layout | None = None


@dataclass(frozen=True, eq=False)
class TwoPasses(abc.ABC):
    """Statistics of sequences in a first pass over the tokens, everything else in a second."""

    correction: Correction

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As ``Correction.__call__``."""
        parts = Parts(outcome=True, bounds=bounds or observe, observe=observe)
        if not self._serves(tokens, parts):
            return self._otherwise.outcome(tokens, plan, observe=observe, bounds=bounds)
        plan = settled(self.correction, tokens, plan)
        return self._outcome(tokens, plan, self._run(Work(tokens, tokens.behavior, plan), parts), parts)

    def apply(self, work: Work) -> Applied:
        """As ``Eager.apply``; the second pass weights the host's loss and measures."""
        parts = self._parts(work)
        if not self._serves(work.tokens, parts):
            return self._otherwise.apply(work)
        work = replace(work, plan=settled(self.correction, work.tokens, work.plan))
        found = self._run(work, parts)
        if parts.outcome:
            outcome = self._outcome(work.tokens, work.plan, found, parts)
            measured_by = functools.partial(with_surrogate, found)
            return finish(self.correction, outcome, work, measured_by, _channel(found))
        loss = Weighted.apply(work.host_loss, found["products"], found["factors"], found["keeps"])
        return Applied(
            loss, found["keeps"], _channel(found), None if work.layout is None else measured(found)
        )

    @cached_property
    def _otherwise(self) -> Backend:
        """What serves the tokens that this backend does not."""
        return Eager(self.correction)

    @abc.abstractmethod
    def _serves(self, tokens: Tokens, parts: Parts) -> bool:
        """Whether these tokens are not better off with the eager path."""

    @abc.abstractmethod
    def _weights(self, loss: Tensor) -> bool:
        """Whether the second pass can weight a loss of this dtype."""

    @abc.abstractmethod
    def _run(self, work: Work, parts: Parts) -> Named:
        """Both passes. Returns every array by its name."""

    def _needs(self, parts: Parts) -> tuple[Need, ...]:
        """The statistics of sequences that the first pass adds up."""
        return self.correction.needs(observe=parts.observe)

    def _parts(self, work: Work) -> Parts:
        """Losses that are not the host's are computed from the outcome, operation by operation."""
        weighs = work.acts and isinstance(self.correction.surrogate, Host) and not self.correction.is_identity
        loss = weighs and self._weights(work.host_loss)
        return Parts(not loss, loss, not loss, work.layout is not None, work.layout)

    def _outcome(self, tokens: Tokens, plan: Plan, found: Named, parts: Parts) -> Outcome:
        weights, keep = found["weights"], found["keeps"]
        scale = None if plan.scale is None else tokens.segments.spread(plan.scale)
        own = Outcome(weights, keep, found.get("finites", keep), found.get("log_ratios"), scale=scale)
        if not parts.bounds:
            return Unasked.of(own, lambda: self.correction.look(tokens).log_ratio)
        own = replace(own, clipped=found["clippeds"])
        if not parts.observe:
            return own
        rows = dict(zip(self._needs(parts), found["table"].unbind(), strict=True))
        seen = Sequences(*(rows[need] for need in OBSERVED), found["kepts"])
        return replace(own, acted=found.get("acteds"), sequences=seen)

    def _settled(self, tokens: Tokens, plan: Plan) -> Named:
        """What was decided for the optimizer step."""
        coupled = [plan.numbers[step] for step in self.correction.steps if step.is_coupled]
        settled = {"numbers": torch.stack(coupled)} if coupled else {}
        settled |= {} if tokens.ages is None else {"ages": tokens.ages.double().contiguous()}
        settled |= {} if plan.keep is None else {"groups": plan.keep.contiguous().view(torch.uint8)}
        return settled | ({} if plan.scale is None else {"scales": plan.scale.float().contiguous()})


class Unasked(Outcome):
    """An outcome without log-ratios until somebody asks for them: to write them takes as long as all else."""

    @classmethod
    def of(cls, outcome: Outcome, look: Callable[[], Tensor]) -> Unasked:
        """An outcome, and what computes its log-ratios."""
        made = cls(**vars(outcome))
        made.__dict__["_look"] = look
        del made.__dict__["log_ratio"]
        return made

    @cached_property
    def log_ratio(self) -> Tensor:
        """As ``Outcome.log_ratio``."""
        return self._look()


def room(work: Work, parts: Parts, wide: torch.dtype, *, finites: bool = True) -> Named:
    """Arrays for the second pass to write, every number of them.

    Args:
        wide: of weights and log-ratios.
        finites: whether what is finite differs from what is kept.
    """
    size, device = work.tokens.segments.size, work.tokens.segments.device
    names: dict[str, torch.dtype] = {"keeps": torch.bool}
    if parts.outcome:
        names |= {"weights": wide} | ({"finites": torch.bool} if finites else {})
        names |= {"log_ratios": wide, "clippeds": torch.bool} if parts.bounds else {}
        names |= {"acteds": torch.int32} if parts.observe else {}
    if parts.loss:
        names |= {"factors": wide, "products": work.host_loss.dtype}
        names |= dict.fromkeys(CHANNEL, torch.float32)
    made = {name: torch.empty(size, dtype=dtype, device=device) for name, dtype in names.items()}
    sizes = {} if parts.layout is None else sizes_of(parts.layout)
    made |= {name: torch.empty(n, dtype=torch.float64, device=device) for name, n in sizes.items()}
    return made | {"kepts": torch.empty(work.tokens.segments.count, dtype=torch.bool, device=device)}


def sizes_of(layout: Layout) -> dict[str, int]:
    """How many numbers each part of ``Measured`` has."""
    return {"sums": layout.size, "highest": len(HIGHEST), "log_sums": len(LOG_SUMS)}


def _channel(found: Named) -> Channel | None:
    """The host metrics where the second pass writes them."""
    return tuple(found[name] for name in CHANNEL) if CHANNEL[0] in found else None


def measured(found: Named) -> Measured:
    """What the second pass measured."""
    return Measured(found["sums"], found["highest"], found["log_sums"])


def with_surrogate(found: Named, work: Work, outcome: Outcome, clipped: Tensor | None) -> Measured:
    """Adds where the surrogate clipped, which is known only once the loss is."""
    if clipped is not None:
        place = len(COLUMNS) + len(work.layout.flags)
        found["sums"][place : place + 1] = clipped.sum(dtype=torch.float64)
    return measured(found)
