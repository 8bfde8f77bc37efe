"""A correction: which ratio, which loss, which steps. The only loop over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from slime_ext.coherence import check
from slime_ext.facts import Facts, State, Step
from slime_ext.objectives import Bounds, Evidence, Host, Surrogate
from slime_ext.ops.ratios import finite_tokens, in_common, widened
from slime_ext.ops.segments import AllSum, identity, selected, selected_
from slime_ext.ops.statistics import Need, tabulate
from slime_ext.ops.weighted import weighted
from slime_ext.outcome import NO_PLAN, Outcome, Plan, Sequences, Tokens, largest_factor
from slime_ext.steps import MinPrefixReweight, Reweight, Taper

Numerator = Literal["proximal", "target"]
Denominator = Literal["host", "kept"]
Grouping = Literal["ignore", "rebaseline", "atomic"]
WEIGHTS = (Reweight, MinPrefixReweight, Taper)

OBSERVED = (Need("sum", "sequence", "ratio"), Need("sum", "sequence", "count"))
HOST = Host()


@dataclass(frozen=True)
class Correction:
    """numerator + surrogate + steps, applied to packed tokens.

    Args:
        numerator: the policy whose ratio to the behavior policy is corrected for: ``proximal`` (what happened
            before the optimizer step) or ``target`` (also what happens within the rollout; needs the target's
            log-probs).
        surrogate: the loss that the weights multiply.
        steps: applied in order.
        mask_scope: ``policy`` takes rejected tokens out of the policy loss only; ``all`` returns reduced
            masks, so that entropy and reference-KL terms lose them too.
        on_nonfinite: a NaN or infinite behavior log-prob rejects its token or unit, or raises.
        denominator: ``host`` leaves the loss divided by what the host's release divides by; ``kept`` divides
            by the kept tokens instead: of the rollout, or of the optimizer step where the host's loss is per
            token.
        group: what a rejected sample means for the samples of the same prompt: ``ignore`` nothing,
            ``rebaseline`` their advantages are computed without it, ``atomic`` they are rejected too.

    Raises:
        ConfigError: the combination would count a ratio twice, or could not act.
    """

    numerator: Numerator = "proximal"
    surrogate: Surrogate = HOST
    steps: tuple[Step, ...] = ()
    mask_scope: Literal["policy", "all"] = "policy"
    on_nonfinite: Literal["reject", "raise"] = "reject"
    denominator: Denominator = "host"
    group: Grouping = "ignore"

    def __post_init__(self) -> None:
        check(self)

    @property
    def is_identity(self) -> bool:
        """Whether it leaves the host's loss alone (metrics only)."""
        return not self.steps and isinstance(self.surrogate, Host)

    @property
    def is_coupled(self) -> bool:
        """Whether a step settles a number over the whole optimizer step."""
        return any(step.is_coupled for step in self.steps)

    @property
    def needs_plan(self) -> bool:
        """Whether something is to be settled over the whole optimizer step before it begins."""
        return self.is_coupled or self.denominator != "host" or self.group != "ignore"

    @property
    def needs_target(self) -> bool:
        """Whether the target policy's log-probs must be there."""
        return self.numerator == "target" or not isinstance(self.surrogate, Host)

    @property
    def needs_ages(self) -> bool:
        """Whether the samples' ages must be there."""
        return any(step.reads_ages for step in self.steps)

    @property
    def needs_advantages(self) -> bool:
        """Whether the advantages must be there."""
        return not isinstance(self.surrogate, Host) or any(step.reads_advantages for step in self.steps)

    def __call__(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """Weights and keep for packed tokens, all detached.

        Args:
            plan: what was settled for the optimizer step; None makes these tokens a step of their own, in
                which ``denominator`` and ``group`` are the host's.
            observe: also record what each step did, and the sequences' log-ratios (for metrics).
            bounds: record no more than where a bound changed a weight.
        """
        outcome = self.outcome(tokens, plan, observe=observe, bounds=bounds)
        return outcome.in_full() if observe else outcome

    def outcome(
        self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False, bounds: bool = False
    ) -> Outcome:
        """As a call, but what acted in as few bytes as hold it."""
        if plan is None:
            plan = plan_step(self, [tokens], tokens.segments.all_sum) if self.is_coupled else NO_PLAN
        return self.decide(self.facts(tokens, observe=observe), plan, observe=observe, bounds=bounds)

    def decide(self, facts: Facts, plan: Plan, *, observe: bool = False, bounds: bool = False) -> Outcome:
        """The second half of a call: from the facts with their table to weights and keep."""
        facts = replace(facts, plan=plan.numbers) if plan.numbers else facts
        state = self.run(facts, self.steps, observe=observe, bounds=bounds)
        if plan.keep is not None:
            state = state.but(step=len(self.steps) + 1).reject("sequence", plan.keep)
        seen = self._seen(facts, state) if observe else {}
        keep = facts.kept(state, seen.get("acted"))
        of_tokens = facts.spread(state.unit, state.weights)
        weights = (selected if of_tokens is state.weights else selected_)(keep, of_tokens)
        if bounds and not observe:
            seen = {"clipped": facts.clipped(state)}
        scale = None if plan.scale is None else facts.spread("sequence", plan.scale)
        return Outcome(weights, keep, facts.finite, facts.log_ratio, scale=scale, **seen)

    def _seen(self, facts: Facts, state: State) -> dict[str, Any]:
        keep = state.units.get("sequence")
        log_ratio, count = (facts.table[need] for need in OBSERVED)
        return {
            "acted": facts.acted(facts.codes(state)),
            "bounds": sum(1 << step for step, _ in state.clipped),
            "sequences": Sequences(log_ratio, count, count >= 0 if keep is None else keep),
        }

    def facts(self, tokens: Tokens, *, observe: bool = False) -> Facts:
        """Everything the steps may look at, with one all-reduce at most."""
        facts = self.look(tokens)
        return replace(facts, table=tabulate(self.needs(observe=observe), facts.value_of, tokens.segments))

    def needs(self, *, observe: bool = False) -> tuple[Need, ...]:
        """The statistics over units that a call reads."""
        return tuple(dict.fromkeys(self._needs + OBSERVED if observe else self._needs))

    def look(self, tokens: Tokens) -> Facts:
        """What there is to know token by token, without a table."""
        numerator, behavior = in_common(self.numerator_of(tokens), tokens.behavior)
        finite = finite_tokens(behavior, tokens.segments.mask)
        advantages = None if tokens.advantages is None else widened(tokens.advantages)
        log_ratio = selected_(finite, numerator - behavior)
        return Facts(tokens.segments, log_ratio, finite, numerator, behavior, advantages, tokens.ages)

    def numerator_of(self, tokens: Tokens) -> Tensor:
        """[T] the log-probs of the policy in the ratio's numerator, nats."""
        return tokens.target if self.numerator == "target" else tokens.proximal

    def run(
        self, facts: Facts, steps: Sequence[Step], *, observe: bool = False, bounds: bool = False
    ) -> State:
        """The state after ``steps``: the only loop over them."""
        state = facts.untouched
        if observe or bounds:
            state = state.but(clipped=(), acts=() if observe else None)
        for number, step in enumerate(steps, 1):
            state = state.but(step=number) if observe else state
            state = step(state, facts)
        return state

    def loss(
        self, outcome: Outcome, tokens: Tokens, host_loss: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor | None]:
        """The corrected policy loss per token, and where the surrogate clipped (None for the host's own).

        Args:
            host_loss: [T] the host's policy loss, with grad.
            bounds: the host's clip range.

        Returns:
            [T] with grad, 0 at rejected and masked tokens; [T] bool or None.
        """
        if self.is_identity:
            return host_loss, None
        if isinstance(self.surrogate, Host):
            return weighted(host_loss, self.factor(outcome, host_loss.dtype), outcome.keep), None
        # A token that is not kept must not reach the graph: 0 times an infinite slope is NaN. Its log-ratio
        # and advantage read 0, so that it is not clipped either.
        loss, clipped = self.surrogate(Evidence(vars(tokens), outcome.keep), bounds)
        return weighted(loss, self.factor(outcome, loss.dtype), outcome.keep), clipped

    def factor(self, outcome: Outcome, dtype: torch.dtype) -> Tensor:
        """[T] what multiplies the loss, finite where log-ratios are: infinity times a loss of 0 is NaN."""
        factor = outcome.factor.to(dtype)
        return factor if self.bounds_weights else factor.clamp(max=largest_factor(dtype))

    @cached_property
    def sets_weights(self) -> bool:
        """Whether a step makes weights other than 1 out of ratios."""
        return any(isinstance(step, WEIGHTS) for step in self.steps)

    @cached_property
    def bounds_weights(self) -> bool:
        """Whether a step bounds the last weights."""
        bounded = True
        for step in self.steps:
            bounded = step.is_bound or (bounded and not isinstance(step, WEIGHTS))
        return bounded

    @cached_property
    def _soundness(self) -> tuple[Need, ...]:
        units = dict.fromkeys(step.unit for step in self.steps if step.unit != "token")
        return tuple(Need("sum", unit, "sound") for unit in units)

    @cached_property
    def _needs(self) -> tuple[Need, ...]:
        return tuple(self._every_need())

    def _every_need(self) -> Iterator[Need]:
        yield from self._soundness
        for step in self.steps:
            yield from step.needs


def plan_step(correction: Correction, batches: Sequence[Tokens], all_sum: AllSum = identity) -> Plan:
    """Settles the numbers of the coupled steps over all micro-batches of an optimizer step, on all ranks.

    Args:
        batches: the step's micro-batches on this rank; every rank must have at least one.
        all_sum: SUM over all ranks that train the step, each token once (data x context parallel).

    Returns:
        The numbers. Steps settle in their order, each seeing what those before it did.
    """
    numbers: dict[Step, Tensor] = {}
    seen = [correction.facts(tokens) for tokens in batches]
    for i, step in enumerate(correction.steps):
        if step.is_coupled:
            now = [replace(facts, plan=numbers) for facts in seen]
            numbers[step] = step.settle(
                [(correction.run(facts, correction.steps[:i]), facts) for facts in now], all_sum
            )
    return Plan(numbers)
