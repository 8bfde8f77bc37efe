"""A correction: which ratio, which loss, which steps. The only loop over steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.objectives import Bounds, Host, Surrogate, gather
from slime_ext.ops.ratios import selected
from slime_ext.ops.segments import Segments
from slime_ext.ops.statistics import Need, tabulate
from slime_ext.steps import Facts, Reweight, State, Step

Numerator = Literal["proximal", "target"]

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
        anchor = getattr(self.surrogate, "anchor", None)
        weighted = any(isinstance(step, Reweight) for step in self.steps)
        if weighted and anchor == "behavior":
            raise ConfigError(
                "surrogate.anchor: expected proximal beside a reweight step, got behavior: this "
                "surrogate already "
                "divides by the behavior policy; drop the reweight step"
            )
        if weighted and anchor == "proximal" and self.numerator == "target":
            raise ConfigError(
                "numerator: expected proximal with this surrogate, got target: target / proximal would "
                "be counted "
                "twice; use numerator: proximal, or surrogate: reinforce"
            )

    @property
    def is_identity(self) -> bool:
        """Whether it leaves the host's loss alone (metrics only)."""
        return not self.steps and isinstance(self.surrogate, Host)

    @property
    def needs_target(self) -> bool:
        """Whether the target policy's log-probs must be there."""
        return self.numerator == "target" or not isinstance(self.surrogate, Host)

    @property
    def needs_advantages(self) -> bool:
        """Whether the advantages must be there."""
        return not isinstance(self.surrogate, Host) or any(step.reads_advantages for step in self.steps)

    def __call__(self, tokens: Tokens, *, observe: bool = False) -> Outcome:
        """Weights and keep for packed tokens, all detached.

        Args:
            observe: also record where bounds acted (for metrics).
        """
        segments = tokens.segments
        source = tokens.target if self.numerator == "target" else tokens.proximal
        numerator, behavior, finite = selected(source, tokens.behavior, segments.mask)
        advantages = None if tokens.advantages is None else tokens.advantages.detach()
        facts = Facts(segments, numerator - behavior, numerator, behavior, finite, advantages)
        facts = replace(facts, table=tabulate(self._needs, facts.value_of, segments))
        keep = finite
        for need in self._nonfinite_needs:
            keep = keep & facts.spread(need.unit, facts.table[need] == 0)
        state = State(torch.ones_like(facts.log_ratio), keep, torch.zeros_like(keep) if observe else None)
        for step in self.steps:
            state = step(state, facts)
        weights = torch.where(state.keep, state.weights, 0)
        return Outcome(weights, state.keep, finite, facts.log_ratio, state.clipped)

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
    def _nonfinite_needs(self) -> tuple[Need, ...]:
        units = dict.fromkeys(step.unit for step in self.steps if step.unit != "token")
        return tuple(Need("sum", unit, "nonfinite") for unit in units)

    @cached_property
    def _needs(self) -> tuple[Need, ...]:
        return tuple(self._every_need())

    def _every_need(self) -> Iterator[Need]:
        yield from self._nonfinite_needs
        for step in self.steps:
            yield from step.needs
