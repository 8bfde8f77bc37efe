"""SkyRL's compute_off_policy_correction, transcribed: each stage sees the mask that the one before left."""

import math

from tests.tools.convert.oracle_common import band, log_ratio, safe_exp

DEFAULTS = {
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
}


def correct(rows, **config):
    config = DEFAULTS | config
    done = [one(row, mask, config) for row, mask in rows]
    return [w for w, _ in done], [m for _, m in done]


def one(row, mask, c):
    mask = outliers(row, mask, c)
    mask = tokens(row, mask, c)
    weights = tis(row, mask, c)
    return weights, sequence(row, mask, c)


def outliers(row, mask, c):
    low, high = c.get("outlier_token_is_threshold_low"), c.get("outlier_token_is_threshold_high")
    ratios = [safe_exp(x) for x, m in zip(row, mask, strict=True) if m]
    over = high is not None and any(r > high for r in ratios)
    under = low is not None and any(r < low for r in ratios)
    return [0] * len(mask) if over or under else mask


def tokens(row, mask, c):
    low, high = c.get("token_mask_is_threshold_low"), c.get("token_mask_is_threshold_high")
    if low is None or high is None:
        return mask
    return band([safe_exp(x) for x in row], mask, low, high)


def tis(row, mask, c):
    level = c.get("tis_ratio_type")
    if level is None:
        return [1.0] * len(row)
    cap = c[f"{level}_tis_ratio_clip_high"]
    return [min(safe_exp(x), cap) for x in log_ratio(level, row, mask)]


def sequence(row, mask, c):
    metric = c.get("sequence_mask_metric")
    if metric is None:
        return mask
    stem = {"geometric": "geo", "product": "product"}[metric]
    ratios = [safe_exp(x) for x in log_ratio(metric, row, mask)]
    return band(ratios, mask, c[f"{stem}_mask_low"], c[f"{stem}_mask_high"])


def centered_loss(trainer, sampler, sampled, advantage, f, top_k, eps=1e-6):
    """One token's loss with score centering, as SkyRL PR 2244 has the paper's appendix A.3.

    Args:
        trainer, sampler: log-probs over the vocabulary; the head is the sampler's ``top_k`` largest.
    """
    head = sorted(range(len(sampler)), key=lambda v: -sampler[v])[:top_k]
    p, q = ([math.exp(row[v]) for v in head] for row in (trainer, sampler))
    rho = max(1 - math.fsum(q), eps) / max(1 - math.fsum(p), eps)
    residual = [b * f(a / b) - rho * f(1 / rho) * a for a, b in zip(p, q, strict=True)]
    correction = math.fsum(c * trainer[v] for c, v in zip(residual, head, strict=True))
    weight = f(math.exp(trainer[sampled] - sampler[sampled]))
    return -advantage * (weight * trainer[sampled] - correction)
