"""Defines the policy losses that weights multiply.

Each loss is a frozen dataclass whose fields are its configuration. ``host`` uses the host's loss. All others
compute a loss from the target log-probs and the advantages. An ``eps`` of None means the host's
``--eps-clip`` (``--eps-clip-high``, ``--eps-clip-c``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from slime_ext.core.fields import check_fields
from slime_ext.core.tokens import Tokens
from slime_ext.errors import expect
from slime_ext.ops import surrogates
from slime_ext.ops.divergences import wide
from slime_ext.ops.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor

Anchor = Literal["proximal", "behavior"]
EPS_C = 3.0  # as in the paper, and the default of verl's clip_ratio_c
TAU = (1e-6, 1e6)  # outside this range, SAPO's gate in float32 is a constant or a step function


@dataclass(frozen=True)
class Bounds:
    """The host's clip range, for surrogates that do not name their own.

    Args:
        low, high, c: --eps-clip, --eps-clip-high and --eps-clip-c.
        has_ratio: whether the host's loss is PPO's. If not, it is -A log pi_target, which clips nothing.
    """

    low: float = 0.2
    high: float = 0.2
    c: float | None = None
    has_ratio: bool = True


@dataclass(frozen=True)
class LossInputs:
    """What a surrogate or a term reads, [T] each.

    Every number is finite, even if masked positions of the host's tensors hold NaN.

    Args:
        tokens: the host's tensors.
        valid: [T] bool, the tokens whose loss counts; elsewhere log-probs, their differences and advantages
            read 0.
    """

    tokens: Tokens
    valid: Tensor

    @cached_property
    def target(self) -> Tensor:
        """Log-probs of the sampled tokens under the policy that is being trained, with grad."""
        return torch.where(self.valid, self._wide("target"), 0)

    @cached_property
    def advantages(self) -> Tensor:
        """The host's advantages, detached."""
        return torch.where(self.valid, self._wide("advantages").detach(), 0)

    def log_ratio(self, anchor: Anchor) -> Tensor:
        """Computes log target - log anchor, [T], with the target's gradient."""
        return torch.where(self.valid, self._wide("target") - self._wide(anchor).detach(), 0)

    def _wide(self, name: str) -> Tensor:
        """Converts a tensor of the host to float32 or wider.

        In bfloat16 the loss would be coarser than the correction.
        """
        values: Tensor = getattr(self.tokens, name)
        return values.to(wide(values.dtype))


@dataclass(frozen=True)
class HostLoss:
    """Uses the loss that the host computed."""


@dataclass(frozen=True)
class Reinforce:
    """Computes -A log pi_target.

    With weights it is pure importance sampling (verl). With a clipped token weight it is CISPO.
    """

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        return surrogates.reinforce(inputs.target, inputs.advantages)


@dataclass(frozen=True)
class PpoClip:
    """Computes PPO's clipped loss around ``anchor``.

    With proximal it is decoupled PPO, with behavior it is bypass.

    Source: Hilton et al. 2021, https://arxiv.org/abs/2110.00641 (decoupled); verl PR 3984 (bypass, there with
    the cap of ``DualClip``).
    """

    anchor: Anchor = "proximal"
    eps_low: float | None = None
    eps_high: float | None = None

    def __post_init__(self) -> None:
        check_fields("ppo_clip.", self, PpoClip)
        _check_range(self, "ppo_clip")

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        low, high = _range(self, bounds)
        return surrogates.ppo_clip(inputs.log_ratio(self.anchor), inputs.advantages, low, high)


@dataclass(frozen=True)
class DualClip:
    """Computes ``PpoClip`` with a cap: where A < 0, the loss is at most -eps_c A.

    If neither ``eps_c`` nor the host's --eps-clip-c is set, eps_c is 3.
    """

    anchor: Anchor = "proximal"
    eps_low: float | None = None
    eps_high: float | None = None
    eps_c: float | None = None

    def __post_init__(self) -> None:
        check_fields("dual_clip.", self, DualClip)
        _check_range(self, "dual_clip")
        is_cap = self.eps_c is None or self.eps_c > 1
        expect(is_cap, "dual_clip.eps_c", "a number > 1", self.eps_c, "1 or less clips on-policy tokens")

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        low, high = _range(self, bounds)
        ratio = inputs.log_ratio(self.anchor)
        cap = bounds.c or EPS_C if self.eps_c is None else self.eps_c
        return surrogates.dual_clip(ratio, inputs.advantages, low, high, cap)


@dataclass(frozen=True)
class Sapo:
    """Computes SAPO's softly gated loss around ``anchor``."""

    anchor: Anchor = "proximal"
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __post_init__(self) -> None:
        check_fields("sapo.", self, Sapo)
        for name, tau in {"tau_pos": self.tau_pos, "tau_neg": self.tau_neg}.items():
            wanted = f"a number from {TAU[0]:g} to {TAU[1]:g}"
            expect(TAU[0] <= tau <= TAU[1], f"sapo.{name}", wanted, tau, "tau is a temperature")

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        ratio = inputs.log_ratio(self.anchor)
        return surrogates.sapo(ratio, inputs.advantages, self.tau_pos, self.tau_neg)


@dataclass(frozen=True)
class Delightful:
    """Computes REINFORCE times the gate of Delightful Policy Gradient, sigma(-A log pi / eta)."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        check_fields("delightful.", self, Delightful)
        wanted = f"a number from {TAU[0]:g} to {TAU[1]:g}"
        expect(TAU[0] <= self.eta <= TAU[1], "delightful.eta", wanted, self.eta, "eta is a temperature")

    def __call__(self, inputs: LossInputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        return surrogates.delightful(inputs.target, inputs.advantages, self.eta)


Surrogate = HostLoss | Reinforce | PpoClip | DualClip | Sapo | Delightful
SURROGATES: dict[str, Any] = {
    "host": HostLoss,
    "reinforce": Reinforce,
    "ppo_clip": PpoClip,
    "dual_clip": DualClip,
    "sapo": Sapo,
    "delightful": Delightful,
}


def written_out(surrogate: Surrogate, bounds: Bounds) -> Surrogate:
    """Returns a surrogate that can be evaluated at other tokens than the sampled ones.

    For the host's loss this is our surrogate with the same equation. Any other surrogate is returned as it
    is.
    """
    if not isinstance(surrogate, HostLoss):
        return surrogate
    if not bounds.has_ratio:
        return Reinforce()
    return PpoClip() if bounds.c is None else DualClip()


def reads_proximal(surrogate: Surrogate) -> bool:
    """Tells whether a surrogate reads the proximal policy's log-probs.

    The host's loss counts as PPO's, which reads them.
    """
    return isinstance(surrogate, HostLoss) or getattr(surrogate, "anchor", None) == "proximal"


def score_factor(
    surrogate: Surrogate,
    bounds: Bounds,
    target: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
) -> Tensor:
    """Computes g, the factor of a token's score in the gradient of a surrogate, [N].

    The gradient is -A g grad log pi_target. A surrogate is |A| times its value at the sign of A, so g depends
    only on the sign of A, and exists for A = 0, too. ``Delightful`` does not have this property and is
    refused.

    Args:
        target, proximal, behavior: [N] log-probs, nats.
        advantages: [N]; NaN counts as positive.

    >>> p, o = torch.tensor([0.55, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    >>> score_factor(PpoClip(), Bounds(), p, o, o, torch.tensor([2.0, -2.0]))  # the second is clipped
    tensor([1.1000, 0.0000])
    """
    if isinstance(surrogate, HostLoss | Delightful):
        raise TypeError(
            f"surrogate: expected a surrogate that is linear in |A|, got {type(surrogate).__name__}"
        )
    signs = torch.where(advantages < 0, -1.0, 1.0).to(target.dtype)
    there = torch.ones_like(signs, dtype=torch.bool)
    with torch.enable_grad():
        free = target.detach().requires_grad_()
        tokens = Tokens(Segments.whole([len(free)], there), proximal, behavior, free, signs)
        loss, _ = surrogate(LossInputs(tokens, there), bounds)
        (slope,) = torch.autograd.grad(loss.sum(), free)
    return -signs * slope


def _check_range(surrogate: PpoClip | DualClip, name: str) -> None:
    """Raises ConfigError unless 1 and some other ratios are not clipped."""
    ends = {"eps_low": surrogate.eps_low, "eps_high": surrogate.eps_high}
    for key, eps in ends.items():
        wide = eps is None or eps >= 0
        expect(wide, f"{name}.{key}", "a number >= 0", eps, "on-policy tokens must not be clipped")
    wide = set(ends.values()) != {0}
    why = "every ratio except 1 would be clipped"
    expect(wide, f"{name}.eps_low", "eps_low or eps_high above 0", "0 for both", why)


def _range(surrogate: PpoClip | DualClip, bounds: Bounds) -> tuple[float, float]:
    low = bounds.low if surrogate.eps_low is None else surrogate.eps_low
    high = bounds.high if surrogate.eps_high is None else surrogate.eps_high
    return low, high
