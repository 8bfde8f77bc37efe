"""A correction: which ratio, which loss, which steps. The only loop over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from slime_ext.coupled import Normalize
from slime_ext.facts import Facts, State, Step, expect
from slime_ext.objectives import Bounds, Host, Surrogate, gather
from slime_ext.ops.ratios import finite_tokens, in_common
from slime_ext.ops.segments import AllSum, Segments, as_numbers, identity
from slime_ext.ops.statistics import Need, tabulate
from slime_ext.steps import MinPrefixReweight, Reweight, Taper

Numerator = Literal["proximal", "target"]
Plan = Mapping[Step, Tensor]  # coupled step -> the number it settled over the whole optimizer step
WEIGHTS = (Reweight, MinPrefixReweight, Taper)

HOST = Host()


@dataclass(frozen=True)
class Tokens:
    """The packed response tokens [T] that a correction looks at; masked positions may hold anything."""

    segments: Segments
    proximal: Tensor  # log-probs under the trainer's frozen policy, nats
    behavior: Tensor  # log-probs under the policy that sampled the tokens, nats
    target: Tensor | None = None  # log-probs under the policy that is being trained, nats, with grad
    advantages: Tensor | None = None


@dataclass(frozen=True)
class Outcome:
    """What a correction decided, [T] each, detached."""

    weights: Tensor  # 0 at rejected and masked tokens
    keep: Tensor  # bool, response tokens that stay in the policy loss
    finite: Tensor  # bool, response tokens whose behavior log-prob is finite
    log_ratio: Tensor  # 0 at tokens that are not finite
    clipped: Tensor | None = None  # bool, where a bound changed a weight


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

    Raises:
        ConfigError: the combination would count a ratio twice.
    """

    numerator: Numerator = "proximal"
    surrogate: Surrogate = HOST
    steps: tuple[Step, ...] = ()
    mask_scope: Literal["policy", "all"] = "policy"
    on_nonfinite: Literal["reject", "raise"] = "reject"

    def __post_init__(self) -> None:
        self._forbid_double_count()
        for i, step in enumerate(self.steps):
            if not step.is_coupled:
                continue
            expect(
                step not in self.steps[:i],
                f"steps[{i}]",
                "a coupled step once",
                step,
                "it settles one number",
            )
            expect(
                self.numerator == "proximal",
                "numerator",
                f"proximal with {step}",
                self.numerator,
                "a number for the whole optimizer step must be known before it begins",
            )
            bounded = any(before.is_bound for before in self.steps[:i])
            expect(
                bounded or not isinstance(step, Normalize),
                f"steps[{i}].normalize",
                "a truncate or clip step before it",
                "none",
                "an unbounded weight would decide the mean alone",
            )

    def _forbid_double_count(self) -> None:
        anchor = getattr(self.surrogate, "anchor", None)
        if anchor is None or not self.sets_weights:
            return
        expect(
            anchor != "behavior",
            "surrogate.anchor",
            "proximal beside a step that sets weights",
            anchor,
            "this surrogate divides by the behavior policy already; drop the step, or surrogate: reinforce",
        )
        expect(
            self.numerator != "target",
            "numerator",
            "proximal with this surrogate",
            self.numerator,
            "target / proximal would be counted twice; use numerator: proximal, or surrogate: reinforce",
        )

    @property
    def is_identity(self) -> bool:
        """Whether it leaves the host's loss alone (metrics only)."""
        return not self.steps and isinstance(self.surrogate, Host)

    @property
    def is_coupled(self) -> bool:
        """Whether a step settles a number over the whole optimizer step."""
        return any(step.is_coupled for step in self.steps)

    @property
    def needs_target(self) -> bool:
        """Whether the target policy's log-probs must be there."""
        return self.numerator == "target" or not isinstance(self.surrogate, Host)

    @property
    def needs_advantages(self) -> bool:
        """Whether the advantages must be there."""
        return not isinstance(self.surrogate, Host) or any(step.reads_advantages for step in self.steps)

    def __call__(self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False) -> Outcome:
        """Weights and keep for packed tokens, all detached.

        Args:
            plan: what ``plan_step`` settled; None makes these tokens an optimizer step of their own.
            observe: also record where bounds acted (for metrics).
        """
        if plan is None and self.is_coupled:
            plan = plan_step(self, [tokens], tokens.segments.all_sum)
        facts = replace(self.facts(tokens), plan=plan or {})
        state = self.run(facts, self.steps, observe=observe)
        keep, weights = facts.kept(state), facts.spread(state.unit, state.weights)
        clipped = facts.spread(state.unit, state.clipped) if observe else None
        return Outcome(self._final(weights, keep), keep, facts.finite, facts.log_ratio, clipped)

    def facts(self, tokens: Tokens) -> Facts:
        """Everything the steps may look at, with one all-reduce at most."""
        source = tokens.target if self.numerator == "target" else tokens.proximal
        numerator, behavior = in_common(source, tokens.behavior)
        finite = finite_tokens(behavior, tokens.segments.mask)
        advantages = None if tokens.advantages is None else tokens.advantages.detach()
        log_ratio = torch.where(finite, numerator - behavior, 0)
        facts = Facts(tokens.segments, log_ratio, finite, numerator, behavior, advantages)
        return replace(facts, table=tabulate(self._needs, facts.value_of, tokens.segments))

    def run(self, facts: Facts, steps: Sequence[Step], *, observe: bool = False) -> State:
        """The state after ``steps``: the only loop over them."""
        state = facts.untouched
        if observe:
            state = replace(state, clipped=torch.zeros_like(facts.finite))
        for step in steps:
            state = step(state, facts)
        return state

    def _final(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Weights, 0 at tokens that are not kept. Only an unbounded weight can be infinite there."""
        return (
            weights * as_numbers(keep, weights.dtype) if self._is_bounded else torch.where(keep, weights, 0)
        )

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
            return torch.where(outcome.keep, host_loss * outcome.weights.to(host_loss.dtype), 0), None
        evidence = gather(tokens.target, tokens.proximal, tokens.behavior, tokens.advantages, outcome.finite)
        loss, clipped = self.surrogate(evidence, bounds)
        return torch.where(outcome.keep, loss * outcome.weights.to(loss.dtype), 0), clipped & outcome.keep

    @cached_property
    def sets_weights(self) -> bool:
        """Whether a step makes weights other than 1 out of ratios."""
        return any(isinstance(step, WEIGHTS) for step in self.steps)

    @cached_property
    def _is_bounded(self) -> bool:
        """Whether a bound comes after the last step that sets weights, or none does."""
        last = [step for step in self.steps if step.is_bound or isinstance(step, WEIGHTS)]
        return not last or last[-1].is_bound

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
        step -> [] float64. Steps settle in their order, each seeing what those before it did.
    """
    plan: dict[Step, Tensor] = {}
    seen = [correction.facts(tokens) for tokens in batches]
    for i, step in enumerate(correction.steps):
        if step.is_coupled:
            now = [replace(facts, plan=plan) for facts in seen]
            plan[step] = step.settle(
                [(correction.run(facts, correction.steps[:i]), facts) for facts in now], all_sum
            )
    return plan
