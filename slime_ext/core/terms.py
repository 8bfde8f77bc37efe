"""Defines ``terms``: losses that are added at every response token, rejected tokens included.

Unlike a weight, a term has a gradient: it pulls the target policy towards the behavior policy. With l = log
target - log behavior, every term and its gradient are 0 on-policy (l = 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_ext.core.fields import check_fields
from slime_ext.core.losses import LossInputs
from slime_ext.core.state import Step
from slime_ext.core.steps import EssTruncate
from slime_ext.errors import expect
from slime_ext.ops.divergences import k3

if TYPE_CHECKING:
    from torch import Tensor

FAR = 20.0  # nats; if target is further below behavior, the penalty is a constant without gradient


class Term:
    """The interface of a term."""

    coefficient: float
    reads_ess: bool = False

    def __call__(self, inputs: LossInputs, numbers: Mapping[Step, Tensor]) -> Tensor:
        """Computes the term of each token.

        Returns:
            [T] nats, with the target's gradient; 0 where ``inputs`` is not valid.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SquaredLogRatio(Term):
    """Adds coefficient times l^2.

    Source: Kimi K2.5, https://arxiv.org/abs/2602.02276; prime-rl PR 1930 and 2798, kl_tau. The default is
    that of kl_tau.
    """

    coefficient: float = 1e-3

    def __post_init__(self) -> None:
        check_fields("squared_log_ratio.", self, SquaredLogRatio)
        _check(self, "squared_log_ratio")

    def __call__(self, inputs: LossInputs, numbers: Mapping[Step, Tensor]) -> Tensor:
        return self.coefficient * inputs.log_ratio("behavior").square()


@dataclass(frozen=True)
class ReverseK3(Term):
    """Adds coefficient times (e^-l - 1 + l), which penalises distance to the behavior policy.

    ``times_one_minus_ess`` multiplies it by 1 - ESS of the optimizer step, where the ESS is the cap of the
    step ``ess_truncate``. Under the target, the mean of the penalty is KL(target || behavior), because e^-l -
    1 has mean 0 there. Over sampled tokens it is a penalty, not an estimate of that KL.

    Source: P3O, https://arxiv.org/abs/2605.12380, equation 12, as Relax PR 234 writes it for one sampled
    token; the paper uses the KL over the whole vocabulary.
    """

    coefficient: float = 1.0
    times_one_minus_ess: bool = False

    def __post_init__(self) -> None:
        check_fields("reverse_k3.", self, ReverseK3)
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
    why = "otherwise it would not pull towards the behavior policy"
    expect(term.coefficient > 0, f"{name}.coefficient", "a number > 0", term.coefficient, why)
