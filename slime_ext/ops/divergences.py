"""Log-ratios, and per-token divergences between the behavior policy and the numerator, from the sampled token
only.

With l = log numerator - log behavior: k1, k2 and k3 estimate KL(behavior || numerator). tv and binary_kl look
at the probability of the sampled token against all others. All take and return [T].
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

EDGE = 1e-6  # KPop clamps probabilities to [1e-6, 1 - 1e-6]
HIGHEST = 0.01  # nats; rounding puts no log-prob further above 0
LOWEST = -1e3  # nats; servers write numbers below it for minus infinity (vLLM: -9999.0)


def is_log_prob(values: Tensor) -> Tensor:
    """-1000 < value <= 0.01 nats: whether a recorded value is the log-prob of a sampled token.

    The only definition: hook, ``slime_ext.correct``, adapters, heads and analysis reject and count all
    others. They are NaN, infinities, probabilities above 1, and the finite numbers that servers write in
    place of minus infinity. A real one that low would be a token that was drawn although its probability is
    e^-1000.

    Args:
        values: any shape, nats.

    Returns:
        bool, the same shape.

    >>> is_log_prob(torch.tensor([-3.0, 0.0, 1e-4, 0.7, -9999.0, torch.nan, -torch.inf])).tolist()
    [True, True, True, False, False, False, False]
    """
    return (values > LOWEST) & (values <= HIGHEST)  # both are false for NaN


@functools.cache  # because PyTorch dispatches promote_types as an operation
def wide(*dtypes: torch.dtype) -> torch.dtype:
    """The widest of the dtypes, float32 at least."""
    return functools.reduce(torch.promote_types, dtypes, torch.float32)


def compared(numerator: Tensor, behavior: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-ratio; [T] bool, the response tokens with a behavior log-prob (``is_log_prob``); and both
    log-probs [T], detached, in float32 or wider."""
    dtype = wide(numerator.dtype, behavior.dtype)
    numerator, behavior = numerator.detach().to(dtype), behavior.detach().to(dtype)
    finite = mask & is_log_prob(behavior)
    # Selected, not multiplied by the mask: a masked token may hold NaN, and NaN times 0 is NaN.
    return torch.where(finite, numerator - behavior, 0), finite, numerator, behavior


def widened(values: Tensor) -> Tensor:
    """Detached, in float32 or wider, for sums."""
    return values.detach().to(wide(values.dtype))


def log_ratio(numerator: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """log numerator - log behavior at response tokens, 0 elsewhere and where behavior is no log-prob.

    Args:
        numerator: [T] log-probs of the sampled tokens, nats.
        behavior: [T] log-probs under the policy that sampled them, nats.
        mask: [T] bool response mask.

    Returns:
        [T] nats, detached, float32 or the wider dtype of the inputs.
    """
    return compared(numerator, behavior, mask)[0]


def k1(log_ratio: Tensor) -> Tensor:
    """-l: unbiased, of either sign. Source: Schulman, http://joschu.net/blog/kl-approx.html."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """l^2 / 2: biased, never negative, the same for both directions. Source: as k1."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor, ratio_minus_one: Tensor | None = None) -> Tensor:
    """e^l - 1 - l: unbiased and never negative, also where rounding would make it so. Source: as k1.

    Args:
        ratio_minus_one: e^l - 1, where it is known.
    """
    ratio_minus_one = torch.expm1(log_ratio) if ratio_minus_one is None else ratio_minus_one
    # expm1 keeps the digits that e^l - 1 would cancel near l = 0; what rounding leaves below 0 is cut off.
    return (ratio_minus_one - log_ratio).clamp_min(0)


def chi2(log_ratio: Tensor) -> Tensor:
    """e^2l - 1: its mean under the behavior policy is the chi-square divergence of the numerator from it.

    Of tokens for per-token log-ratios, of whole sequences for their sums over each sequence.
    """
    return torch.expm1(2 * log_ratio)


def tv(numerator: Tensor, behavior: Tensor) -> Tensor:
    """|p - q|: total variation of the two-outcome distributions "this token" and "another one".

    Source: DPPO, https://arxiv.org/abs/2602.04879.
    """
    return (numerator.exp() - behavior.exp()).abs()


def _clamped(log_probs: Tensor) -> Tensor:
    return log_probs.double().exp().clamp(EDGE, 1 - EDGE)


def _log_ratios(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """log((1-a)/(1-b)), log(a/b): their mean with weights 1-a, a is D_B(a || b)."""
    return ((1 - a) / (1 - b)).log(), (a / b).log()


def binary_kl(numerator: Tensor, behavior: Tensor) -> Tensor:
    """D_B(q || p), D_B(a || b) = a log(a/b) + (1-a) log((1-a)/(1-b)), p numerator, q behavior probability.

    Probabilities are clamped to [1e-6, 1 - 1e-6] in float64, where 1 - p still tells them apart.
    """
    p, q = _clamped(numerator), _clamped(behavior)
    return torch.lerp(*_log_ratios(q, p), q)  # one operation for the mean with weights 1 - q and q


def binary_kl_max(numerator: Tensor, behavior: Tensor) -> Tensor:
    """max(D_B(p || q), D_B(q || p)), symmetric; strict where the model is confident, lenient on rare tokens.

    Source: KPop, https://ringtech.notion.site/kpop; Ring-2.6, https://arxiv.org/abs/2606.15079.
    """
    p, q = _clamped(numerator), _clamped(behavior)
    logs = _log_ratios(p, q)
    return torch.maximum(torch.lerp(*logs, p), -torch.lerp(*logs, q))


OF_RATIO = {"k1": k1, "k2": k2, "k3": k3}
OF_BOTH = {"tv": tv, "binary_kl": binary_kl, "binary_kl_max": binary_kl_max}
_EDGE_TO_EDGE = (1 - 2 * EDGE) * math.log((1 - EDGE) / EDGE)  # D_B between both ends of the clamp
LARGEST = {"tv": 1.0, "binary_kl": _EDGE_TO_EDGE, "binary_kl_max": _EDGE_TO_EDGE}  # of a token
