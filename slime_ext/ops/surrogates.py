"""Per-token policy losses, the one definition of each equation: detached weights multiply them, gradients
flow only through the target.

Every function takes packed tensors of shape [T] and returns ``(loss, clipped)``: the loss per token in nats
times advantage, and a bool that says where the surrogate bounded something. ``log_ratio`` is log target - log
anchor; the anchor is the proximal policy (decoupled) or the behavior policy (bypass).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HEADROOM = 5.0  # nats below the largest ratio of a dtype, so that an advantage of 100 times it is finite


def reinforce(target_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Score-function loss: -A log pi_target.

    Times a detached sequence weight it is the off-policy policy gradient; times a clipped token weight it is
    CISPO.

    Args:
        target_log_probs: [T] log-probs of the sampled tokens, nats, with grad.
        advantages: [T] advantages.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -advantages * target_log_probs, torch.zeros_like(advantages, dtype=torch.bool)


def ppo_clip(log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Pessimistic clipped surrogate: max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), r = e^log_ratio.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.
        advantages: [T] advantages.
        eps_low: width of the trust region below 1; 1 or more drops the lower bound.
        eps_high: width above 1.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; asymmetric bounds: DAPO,
    2503.14476.
    """
    ratio, negative = _ratio(log_ratio), -advantages
    plain = ratio * negative
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * negative
    # bounded > plain is false where both are equal, so a ratio at the bound counts as unclipped.
    return torch.maximum(plain, bounded), bounded > plain


def dual_clip(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, eps_c: float
) -> tuple[Tensor, Tensor]:
    """``ppo_clip`` with a floor for negative advantages: where A < 0, min(ppo_clip, -eps_c A).

    Bounds the loss of a very unlikely token with a negative advantage. ``clipped`` marks tokens that
    ``ppo_clip`` or the new bound clipped.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.
        advantages: [T] advantages.
        eps_low: as in ``ppo_clip``.
        eps_high: as in ``ppo_clip``.
        eps_c: largest ratio that multiplies a negative advantage, > 1.

    Source: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    loss, clipped = ppo_clip(log_ratio, advantages, eps_low, eps_high)
    ceiling = -eps_c * advantages
    over = (advantages < 0) & (loss > ceiling)  # only there: -eps_c A would cut most losses of A > 0
    return torch.where(over, ceiling, loss), clipped | over


def sapo(
    log_ratio: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, Tensor]:
    """Soft adaptive gate: -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg.

    The slope at r = 1 is 1, so on-policy tokens get the plain policy gradient. Far from 1 it fades smoothly,
    while ``ppo_clip`` would cut. Nothing is clipped.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.
        advantages: [T] advantages.
        tau_pos: temperature for positive advantages, > 0.
        tau_neg: temperature for the others, > 0.

    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347; defaults as in SkyRL's example.
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * (4.0 / tau)
    return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def delightful(target_log_probs: Tensor, advantages: Tensor, eta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Score-function loss behind a gate: -sigma(-A log pi / eta) A log pi, the gate detached.

    The gate opens for rare good tokens, closes for rare bad ones, and is 1/2 for expected ones. It changes
    the objective: even on-policy it is not the policy gradient.

    Args:
        target_log_probs: [T] log-probs of the sampled tokens, nats, with grad.
        advantages: [T] advantages.
        eta: temperature of the gate, > 0, in units of advantage times nats.

    Source: Osband 2026, https://arxiv.org/abs/2603.14608, with its eta of 1; miles PR 2348, open-instruct PR
    1628.
    """
    gate = torch.sigmoid(-advantages * target_log_probs.detach() / eta)
    return -gate * advantages * target_log_probs, torch.zeros_like(advantages, dtype=torch.bool)


def _ratio(log_ratio: Tensor) -> Tensor:
    """e^log_ratio; where it would overflow, finite and without gradient, because 0 times infinity is NaN."""
    most = math.log(torch.finfo(log_ratio.dtype).max) - HEADROOM
    return log_ratio.clamp(max=most).exp()
