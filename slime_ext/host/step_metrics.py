"""Collects the metrics and the non-finite log-probs of the current optimizer step on this rank.

A step is opened before the host trains it, and closed when the optimizer has stepped. Hook calls in between
add to it, and without an open step nothing is measured. Only the guards' counts outlive the step, because
slime releases the device's memory and the process groups between rollouts.

On CUDA, a check for NaN in every hook call would make the host wait. So each call records on the device
whether there is one and where the first is. The error is raised when the step's statistics are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slime_ext.core.correction import Correction, HookResult
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.names import curves, scalars
from slime_ext.core.metrics.totals import reduce
from slime_ext.core.state import Plan
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError, NonFiniteError
from slime_ext.host.memory import Memory
from slime_ext.host.packing import CONSEQUENCES, locate, require_usable, usable, wanted
from slime_ext.host.ranks import Parallel, context_parallel, parallel_state, ranks
from slime_ext.host.rollout_data import Samples
from slime_ext.hosts.contract import INIT_FLAG, HookCall
from slime_ext.ops.segments import Segments


@dataclass
class NonFiniteTracker:
    """Records the first unusable log-prob of each kind in one optimizer step on this rank."""

    calls: list[tuple[Segments, Sequence[int | None]]] = field(default_factory=list)
    # [2, kinds] float64: the number of the hook call, and the token's index in that call. Both are infinite
    # if all log-probs of the kind are usable.
    first: Tensor | None = None

    def look(
        self, values: Mapping[str, Tensor | None], segments: Segments, samples: Sequence[int | None] = ()
    ) -> None:
        """Records the first response token whose log-prob is not usable.

        It does not wait for the device.

        Args:
            values: kind -> [T] log-probs, or None.
            samples: the indices of the call's samples, if they are known.
        """
        mask = segments.mask
        bad = [
            torch.zeros_like(mask) if (v := values.get(kind)) is None else mask & ~usable(kind, v.detach())
            for kind in CONSEQUENCES
        ]
        rows = pad(
            torch.stack(bad).to(torch.uint8), (0, 1)
        )  # one more column, because this rank may hold no token
        is_any, index = rows.max(1)  # max returns the first of equal values
        place = torch.stack([torch.full_like(index, len(self.calls)), index])
        place = torch.where(is_any > 0, place.double(), torch.inf)
        # Calls come in order, so an earlier record is kept.
        self.first = place if self.first is None else torch.where(self.first < torch.inf, self.first, place)
        self.calls.append((segments, samples))

    def vector(self, device: torch.device | str = "cpu") -> Tensor:
        """Flattens ``first`` to [2 kinds] float64, to be sent to every rank."""
        none = torch.full((2 * len(CONSEQUENCES),), torch.inf, dtype=torch.float64, device=device)
        return none if self.first is None else self.first.view(-1)

    def check(self, per_rank: Sequence[Sequence[float]], rank: int) -> None:
        """Raises NonFiniteError on every rank if any rank recorded an unusable log-prob.

        Args:
            per_rank: the ``vector`` of every rank.
            rank: this rank's index.
        """
        for other in sorted(range(len(per_rank)), key=lambda r: r != rank):
            calls, tokens = per_rank[other][: len(CONSEQUENCES)], per_rank[other][len(CONSEQUENCES) :]
            for (kind, consequence), call, token in zip(CONSEQUENCES.items(), calls, tokens, strict=True):
                if call < math.inf:
                    where = f"data rank {other}, micro-batch {int(call)}, token {int(token)} of it"
                    where = self._place(int(call), int(token)) if other == rank else where
                    raise NonFiniteError(
                        f"{kind}, {where}: expected {wanted(kind)}, got another value: {consequence}"
                    )

    def _place(self, call: int, index: int) -> str:
        segments, samples = self.calls[call]
        sequence, position = locate(index, segments)
        known = samples[sequence] if samples else None
        name = "" if known is None else f"sample {known}, "
        return (
            f"{name}sequence {sequence} of {segments.count} in micro-batch {call}, response token {position}"
        )


@dataclass
class OptimizerStep:
    """Holds the state of one optimizer step on this rank.

    Args:
        layout: what hook calls measure; None: nothing.
        samples: the samples that the step trains, if they are known.
        plan: a correction and its plan for these samples, in their order and on the CPU.
        heads: each sample's head or support, for ``center``.
        proximal_heads: the proximal policy's log-probs at the heads; None if they are the target's.
        rollout: the host's data of the rollout, for ``center``.
        observes: whether to measure a policy loss that does not call our hook.
        leaves_loss_alone: whether a guard has taken the action ``metrics_only``.
        is_open: whether the host trains this step, so that its statistics are reduced. False: a hook call
            outside of a step.
        parallel: this rank's place among those that share its sequences, asked when the step opens, because
            slime rebuilds its groups between steps.
    """

    layout: MetricsLayout | None = None
    samples: Samples = field(default_factory=Samples)
    plan: tuple[Correction, Plan] | None = None
    heads: Sequence[tuple[Tensor, ...]] = ()
    proximal_heads: Sequence[Tensor] | None = None
    rollout: dict[str, Any] = field(default_factory=dict)
    observes: bool = False
    leaves_loss_alone: bool = False
    is_open: bool = True
    parallel: Parallel = field(default_factory=lambda: context_parallel())
    tracker: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    measured: Any = None  # the sums of all its micro-batches so far
    # The micro-batches that were looked at, because a recomputed loss calls the hook again with the same
    # objects. The key is the identity of the batch's list of masks, or of the call's masks and behavior
    # log-probs. The objects are held until the step ends, so that no other object gets the same identity. The
    # key () is that of all micro-batches without behavior log-probs.
    seen: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)

    def add(self, result: HookResult) -> None:
        """Adds a micro-batch, without waiting for the device."""
        if result.measured is not None:
            self.measured = result.measured if self.measured is None else self.measured + result.measured

    def count_once(self, call: HookCall) -> bool:
        """Remembers the micro-batch of a hook call, and tells whether this call is its first.

        Only the first call is counted. Outside of a step no call is.
        """
        if not self.is_open:
            return False
        # The list of masks identifies the batch; the batch itself would keep its images on the device.
        objects = [*call.loss_masks, call.rollout_log_probs]
        objects = objects if call.batch is None else [call.batch["loss_masks"]]
        identities = tuple(map(id, objects))
        is_new = identities not in self.seen
        self.seen.setdefault(identities, objects)
        return is_new

    def check_finite(self, tokens: Tokens, call: HookCall, *, behavior: bool, is_counted: bool) -> None:
        """Raises NonFiniteError if a log-prob makes the loss NaN.

        On the CPU it raises at once. On other devices it records the token, and ``reduce`` raises.

        Args:
            behavior: whether to check the behavior policy's log-probs too.
            is_counted: whether the step counts this call.
        """
        log_probs = {"train_log_probs": tokens.proximal, "cur_log_probs": tokens.target}
        if behavior:
            log_probs["rollout_log_probs"] = tokens.behavior
        if (device := tokens.segments.mask.device.type) != "cpu":
            if is_counted:
                places = self.samples.places(call.loss_masks) or ()
                indices = [self.samples.indices[place] for place in places]
                self.tracker.look(log_probs, tokens.segments, indices)
            elif behavior and not self.is_open:  # no step would read the record
                raise ConfigError(
                    f"slime_ext.on_nonfinite: expected {INIT_FLAG} beside raise, got a hook call without it: "
                    f"add the flag, because on {device} log-probs are checked at the end of a step, by a "
                    "wrapper that init installs"
                )
            return
        for name, values in log_probs.items():
            if values is not None:
                require_usable(name, values, tokens.segments, CONSEQUENCES[name])

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Reduces scalars and curves over all ranks that train the step.

        It needs one SUM, and waits for the device once.
        """
        assert self.layout is not None, "a step without a layout measures nothing"
        here = ranks()
        rank, size = here.place
        device = _device() if self.measured is None else self.measured.sums.device
        extra = self.tracker.vector(device)
        totals, per_rank = reduce(
            self.layout, self.measured, here.all_sum, rank, size, device=device, extra=extra
        )
        self.tracker.check(per_rank, rank)
        return scalars(totals), curves(totals)


STEP: Memory[OptimizerStep | None] = Memory(lambda: None)  # the step that is being trained


def current_step() -> OptimizerStep:
    """Returns the optimizer step that is being trained. Between steps it returns one that is not open."""
    return STEP.value or OptimizerStep(is_open=False)


@contextmanager
def under_way(step: OptimizerStep) -> Iterator[OptimizerStep]:
    """Opens an optimizer step for the hook calls inside."""
    STEP.value = step
    try:
        yield step
    finally:
        STEP.value = None


def share_error_across_stages(reason: str) -> str:
    """Returns the error of any pipeline stage on all stages; empty if there is none.

    Every stage calls it once per optimizer step. At most one stage passes a reason that is not empty.
    """
    state = parallel_state()
    if state is None or (stages := state.get_pipeline_model_parallel_group()).size() == 1:
        return reason
    reasons = [reason] * stages.size()
    torch.distributed.all_gather_object(reasons, reason, group=stages)
    return max(reasons)


def _device() -> str:
    dist = torch.distributed
    on_cuda = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
    return "cuda" if on_cuda else "cpu"
