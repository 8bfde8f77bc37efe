"""token_tis in 25 lines of torch: what slime_ext.correct(..., "token_tis") does, on one process.

tests/test_plain_torch.py holds it against the real one: loss, gradient, kept tokens and these metrics.
"""

import torch


def token_tis(loss, behavior, proximal, mask, cap=2.0):
    """Multiplies a policy loss by w_t = min(proximal_t / behavior_t, cap). All are packed tensors [T].

    loss: per token, with grad. behavior, proximal: log-probs of the sampled tokens, nats. mask: 0 where the
    policy did not sample the token (prompt, tool output).
    """
    response = mask != 0
    keep = response & (behavior > -1000) & (behavior <= 0.01)  # else it is no log-prob: reject the token
    # Select with where: a masked token may hold NaN, and 0 * NaN is NaN. A weight carries no gradient.
    log_ratio = torch.where(keep, proximal - behavior, 0).detach()
    ratio = log_ratio.exp()
    weight = torch.where(keep, ratio.clamp(max=cap), 0)
    corrected = torch.where(keep, loss, 0) * weight
    tokens = response.sum().clamp(min=1)
    metrics = {
        "k3_kl": (ratio - 1 - log_ratio).sum() / keep.sum().clamp(min=1),
        "clipped_fraction": (ratio > cap).sum() / tokens,
        "kept_fraction": keep.sum() / tokens,
    }
    return corrected, keep, metrics
