"""Computes log-ratios and divergences per token, from the sampled token alone.

With l = log numerator - log behavior, k1, k2 and k3 estimate KL(behavior || numerator). tv and binary_kl
reduce the vocabulary to two outcomes: the sampled token, and any other token. All functions take and return
[T].
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from slime_ext.ops.segments import detached, select_

if TYPE_CHECKING:
    from torch import Tensor

EDGE = 1e-6  # KPop clamps probabilities to [1e-6, 1 - 1e-6]
HIGHEST = 0.01  # nats; rounding error lifts no log-prob above this
LOWEST = -1e3  # nats; servers write a number below it in place of minus infinity (vLLM: -9999.0)


def is_log_prob(values: Tensor) -> Tensor:
    """Tells whether a value can be a sampled token's log-prob: -1000 < value <= 0.01 nats.

    This is the only definition: the hook, ``slime_ext.correct``, the adapters, the heads and the analysis use
    it. They reject and count all other values: NaN, infinities, probabilities above 1, and the finite numbers
    that servers write in place of minus infinity. No true log-prob is lost, because a token of probability
    e^-1000 is practically never drawn.

    Args:
        values: any shape, nats.

    Returns:
        bool, the same shape.

    >>> is_log_prob(torch.tensor([-3.0, 0.0, 1e-4, 0.7, -9999.0, torch.nan, -torch.inf])).tolist()
    [True, True, True, False, False, False, False]
    """
    # A number at or below LOWEST becomes 1, which is no log-prob. NaN stays NaN and fails the comparison. On
    # a CPU this takes half as long as two comparisons that write bool, which PyTorch does not vectorise.
    return torch.threshold(values, LOWEST, 1.0).le_(HIGHEST).bool()


@functools.cache  # because PyTorch dispatches each promote_types like an operation
def wide(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the widest of the dtypes, at least float32."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def compared(numerator: Tensor, behavior: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares both log-probs of each token.

    Returns:
        The log-ratio [T]; [T] bool, the response tokens with a behavior log-prob (``is_log_prob``); and both
        log-probs [T]. The log-probs and the log-ratio are detached, in float32 or wider.
    """
    dtype = wide(numerator.dtype, behavior.dtype)
    numerator, behavior = detached(numerator).to(dtype), detached(behavior).to(dtype)
    finite = mask & is_log_prob(behavior)
    # Selected, not multiplied by the mask: a masked token may hold NaN, and NaN times 0 is NaN.
    return select_(numerator - behavior, finite), finite, numerator, behavior


def widened(values: Tensor) -> Tensor:
    """Detaches a tensor and converts it to float32 or wider, for sums."""
    return values.detach().to(wide(values.dtype))


def log_ratio(numerator: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """Computes l = log numerator - log behavior at response tokens.

    Args:
        numerator: [T] log-probs of the sampled tokens, nats.
        behavior: [T] log-probs under the policy that sampled them, nats.
        mask: [T] bool response mask.

    Returns:
        [T] nats, detached, in float32 or the wider dtype of the inputs; 0 at masked tokens and where behavior
        is not a log-prob (``is_log_prob``).
    """
    return compared(numerator, behavior, mask)[0]


def k1(log_ratio: Tensor) -> Tensor:
    """Estimates KL as k1 = -l: unbiased, but it may be negative.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Estimates KL as k2 = l^2 / 2: biased, never negative, equal for both directions.

    Source: as k1.
    """
    return log_ratio.square() / 2


def k3(log_ratio: Tensor, ratio_minus_one: Tensor | None = None) -> Tensor:
    """Estimates KL as k3 = e^l - 1 - l: unbiased and never negative.

    Args:
        ratio_minus_one: e^l - 1, if the caller has it already.

    Source: as k1.
    """
    ratio_minus_one = torch.expm1(log_ratio) if ratio_minus_one is None else ratio_minus_one
    # expm1 keeps the digits that e^l - 1 would lose near l = 0. Rounding can still give a number below 0.
    return (ratio_minus_one - log_ratio).clamp_min(0)


def chi2(log_ratio: Tensor) -> Tensor:
    """Computes e^2l - 1, whose mean under the behavior policy is a chi-square divergence.

    It is the divergence of the numerator from the behavior policy. If l is the log-ratio of a token, it
    compares tokens; if l is the sum over a sequence, it compares whole sequences.
    """
    return torch.expm1(2 * log_ratio)


def tv(numerator: Tensor, behavior: Tensor) -> Tensor:
    """Computes |p - q|, the total variation over two outcomes: this token, or another one.

    p is the numerator's probability of the token, q the behavior policy's.

    Source: DPPO, https://arxiv.org/abs/2602.04879.
    """
    return (numerator.exp() - behavior.exp()).abs()


def _clamped(log_probs: Tensor) -> Tensor:
    return log_probs.double().exp().clamp(EDGE, 1 - EDGE)


def _log_ratios(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes log((1-a)/(1-b)) and log(a/b).

    With weights 1-a and a, their mean is D_B(a || b).
    """
    return ((1 - a) / (1 - b)).log(), (a / b).log()


def binary_kl(numerator: Tensor, behavior: Tensor) -> Tensor:
    """Computes D_B(q || p), with D_B(a || b) = a log(a/b) + (1-a) log((1-a)/(1-b)).

    p is the numerator's probability of the token, q the behavior policy's. Both are clamped to [1e-6, 1 -
    1e-6], in float64 because float32 loses the digits of 1 - p near p = 1.
    """
    p, q = _clamped(numerator), _clamped(behavior)
    return torch.lerp(*_log_ratios(q, p), q)  # lerp takes the mean with weights 1 - q and q at once


def binary_kl_max(numerator: Tensor, behavior: Tensor) -> Tensor:
    """Computes max(D_B(p || q), D_B(q || p)), which is symmetric in p and q.

    A bound on it is strict where the model is confident and lenient on rare tokens.

    Source: KPop, https://ringtech.notion.site/kpop; Ring-2.6, https://arxiv.org/abs/2606.15079.
    """
    p, q = _clamped(numerator), _clamped(behavior)
    logs = _log_ratios(p, q)
    return torch.maximum(torch.lerp(*logs, p), -torch.lerp(*logs, q))


OF_RATIO = {"k1": k1, "k2": k2, "k3": k3}
OF_BOTH = {"tv": tv, "binary_kl": binary_kl, "binary_kl_max": binary_kl_max}
_EDGE_TO_EDGE = (1 - 2 * EDGE) * math.log((1 - EDGE) / EDGE)  # D_B between the two ends of the clamp
# The largest value that a divergence can have at one token.
LARGEST_AT_TOKEN = {"tv": 1.0, "binary_kl": _EDGE_TO_EDGE, "binary_kl_max": _EDGE_TO_EDGE}
