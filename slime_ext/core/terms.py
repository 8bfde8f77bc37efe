"""``terms``: losses added at every response token, rejected ones too.

Unlike a weight, a term has a gradient: it pulls the target policy towards the one that sampled. With l = log
target - log behavior, on-policy (l = 0) every term and its gradient are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from slime_ext.core.losses import LossInputs
from slime_ext.core.state import Step, expect
from slime_ext.core.steps import EssTruncate
from slime_ext.ops.divergences import k3

FAR = 20.0  # nats; a token that far below the policy that sampled it adds a constant, without a gradient


class Term:
    """Interface of a term."""

    coefficient: float
    reads_ess: bool = False

    def __call__(self, inputs: LossInputs, numbers: Mapping[Step, Tensor]) -> Tensor:
        """[T] nats, with the target's gradient; 0 where ``inputs`` is not valid."""
        raise NotImplementedError


@dataclass(frozen=True)
class SquaredLogRatio(Term):
    """coefficient l^2.

    Source: Kimi K2.5, https://arxiv.org/abs/2602.02276; prime-rl PR 1930 and 2798, kl_tau, whose default is
    the one here.
    """

    coefficient: float = 1e-3

    def __post_init__(self) -> None:
        _check(self, "squared_log_ratio")

    def __call__(self, inputs: LossInputs, numbers: Mapping[Step, Tensor]) -> Tensor:
        return self.coefficient * inputs.log_ratio("behavior").square()


@dataclass(frozen=True)
class ReverseK3(Term):
    """coefficient (e^-l - 1 + l); ``times_one_minus_ess`` multiplies it by 1 - ESS of the optimizer step.

    Its mean under the target is KL(target || behavior) plus a mean of e^-l - 1 that is 0; over sampled tokens
    it is a penalty, not an estimate. The ESS is the cap of the step ``ess_truncate``.

    Source: P3O, https://arxiv.org/abs/2605.12380, equation 12, as Relax PR 234 writes it for one sampled
    token; the paper has the KL over the whole vocabulary.
    """

    coefficient: float = 1.0
    times_one_minus_ess: bool = False

    def __post_init__(self) -> None:
        _check(self, "reverse_k3")

    @property
    def reads_ess(self) -> bool:  # type: ignore[override]
        return self.times_one_minus_ess

    def __call__(self, inputs: LossInputs, numbers: Mapping[Step, Tensor]) -> Tensor:
        penalty = self.coefficient * k3(-inputs.log_ratio("behavior").clamp(min=-FAR))
        if not self.times_one_minus_ess:
            return penalty
        ess = next(number for step, number in numbers.items() if isinstance(step, EssTruncate))
        return (1 - ess).to(penalty.dtype) * penalty


TERMS: dict[str, type[Term]] = {"squared_log_ratio": SquaredLogRatio, "reverse_k3": ReverseK3}


def _check(term: Term, name: str) -> None:
    why = "it would push away from the policy that sampled"
    expect(term.coefficient > 0, f"{name}.coefficient", "a number > 0", term.coefficient, why)
