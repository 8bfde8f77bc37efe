"""Computes policy losses per token. Each equation is defined only here.

Detached weights multiply these losses, so gradients flow only through the target. Every function takes packed
tensors of shape [T] and returns ``(loss, clipped)``: the loss per token, in units of advantage times nats,
and a bool that is true where the surrogate clipped the token. ``log_ratio`` is log target - log anchor. The
anchor is the proximal policy (decoupled) or the behavior policy (bypass).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

HEADROOM = 5.0  # nats below the log of a dtype's largest number, so that 100 times the ratio is finite


def reinforce(target_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the score-function loss: -A log pi_target.

    With a detached sequence weight it is the off-policy policy gradient; with a clipped token weight it is
    CISPO.

    Args:
        target_log_probs: [T] log-probs of the sampled tokens, nats, with grad.
        advantages: [T] advantages.

    Source: Williams 1992, https://doi.org/10.1007/BF00992696.
    """
    return -advantages * target_log_probs, torch.zeros_like(advantages, dtype=torch.bool)


def ppo_clip(log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Computes PPO's clipped loss: max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A), r = e^log_ratio.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.
        advantages: [T] advantages.
        eps_low: width of the trust region below 1; 1 or more removes the lower bound.
        eps_high: width of the trust region above 1.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; asymmetric bounds: DAPO,
    2503.14476.
    """
    ratio, negative = _ratio(log_ratio), -advantages
    plain = ratio * negative
    bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * negative
    # Where both are equal, bounded > plain is false, so a ratio exactly at the bound counts as unclipped.
    return torch.maximum(plain, bounded), bounded > plain


def dual_clip(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, eps_c: float
) -> tuple[Tensor, Tensor]:
    """Caps ``ppo_clip`` where the advantage is negative: if A < 0, min(ppo_clip, -eps_c A).

    The cap bounds the loss of a token with a negative advantage and a very large ratio. ``clipped`` marks the
    tokens that ``ppo_clip`` or the cap changed.

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
    over = (advantages < 0) & (loss > ceiling)  # only where A < 0, because for A > 0 -eps_c A is not a cap
    return torch.where(over, ceiling, loss), clipped | over


def sapo(
    log_ratio: Tensor, advantages: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, Tensor]:
    """Computes SAPO's softly gated loss: -A (4 / tau) sigmoid(tau (r - 1)).

    tau is tau_pos where A > 0, else tau_neg. The slope of the gate at r = 1 is 1, so on-policy tokens get the
    plain policy gradient. Far from r = 1 the slope fades smoothly, while ``ppo_clip`` cuts it to 0. No token
    is marked as clipped.

    Args:
        log_ratio: [T] log target - log anchor, nats, with grad.
        advantages: [T] advantages.
        tau_pos: temperature for positive advantages, > 0.
        tau_neg: temperature for all other advantages, > 0.

    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347; defaults as in SkyRL's example.
    """
    tau = torch.full_like(log_ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (_ratio(log_ratio) - 1)) * (4.0 / tau)
    return -gate * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def delightful(target_log_probs: Tensor, advantages: Tensor, eta: float = 1.0) -> tuple[Tensor, Tensor]:
    """Computes -sigma(-A log pi / eta) A log pi, where the gate sigma(...) is detached.

    The gate opens for rare tokens with a positive advantage, closes for rare tokens with a negative
    advantage, and is about 1/2 for likely tokens. It changes the objective: even on-policy, the gradient is
    not the policy gradient.

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
    """Computes e^log_ratio, capped before it overflows.

    An infinite ratio times 0 would be NaN. A capped ratio has no gradient.
    """
    most = math.log(torch.finfo(log_ratio.dtype).max) - HEADROOM
    return log_ratio.clamp(max=most).exp()
