"""verl's rollout correction, transcribed: PR 3984 to 0.7.0, and 0.7.1 and later."""

import math

from tests.tools.convert.oracle_common import (
    band,
    clamped,
    log_ratio,
    masked_mean,
    masked_sum,
    safe_exp,
    veto,
)


def weights_of(row, mask, level, cap):
    if level is None:
        return [1.0] * len(row)
    return [min(safe_exp(x), cap) * m for x, m in zip(log_ratio(level, row, mask), mask, strict=True)]


def split(done):
    return [w for w, _ in done], [m for _, m in done]


# ---- PR 3984 to 0.7.0 ----


def by_level(
    rows, *, rollout_is=None, rollout_is_threshold=2.0, rollout_rs=None, rollout_is_batch_normalize=False, **c
):
    done = []
    for row, mask in rows:
        kept = mask
        if rollout_rs is not None:
            high = c["rollout_rs_threshold"]
            low = c.get("rollout_rs_threshold_lower")
            ratios = [safe_exp(x) for x in log_ratio(rollout_rs, row, mask)]
            kept = band(ratios, mask, 1 / high if low is None else low, high)
        if (threshold := c.get("rollout_token_veto_threshold")) is not None and any(mask):
            kept = kept if any(veto(row, mask, threshold)) else [0] * len(mask)
        done.append((weights_of(row, mask, rollout_is, rollout_is_threshold), kept))
    weights, kept = split(done)
    if rollout_is_batch_normalize:  # over all sequences with response tokens, as 0.7.0
        weights = normalized(weights, [mask for _, mask in rows], rollout_is)
    return weights, kept


# ---- 0.7.1 and later ----


def head(rows, *, rollout_is=None, rollout_is_threshold=2.0, rollout_is_batch_normalize=False, **c):
    weights = [head_weights(row, mask, rollout_is, rollout_is_threshold) for row, mask in rows]
    masks = [mask for _, mask in rows]
    if rollout_is_batch_normalize:
        weights = normalized(weights, masks, rollout_is)
    kept = [head_mask(row, mask, c) for row, mask in rows]
    return weights, kept


def head_weights(row, mask, level, threshold):
    if level is None or "_" not in str(threshold):
        return weights_of(row, mask, level, float(threshold))
    low, high = (float(x) for x in threshold.split("_"))
    raw = [safe_exp(x) * m for x, m in zip(log_ratio(level, row, mask), mask, strict=True)]
    return [w if low <= w <= high else 0.0 for w in raw]


def normalized(weights, masks, level):
    if level == "token":
        mean = masked_mean([w for row in weights for w in row], [m for row in masks for m in row])
    else:
        means = [masked_mean(w, m) for w, m in zip(weights, masks, strict=True) if sum(m)]
        mean = sum(means) / max(len(means), 1)
    return [[w / mean for w in row] for row in weights] if mean > 1e-8 else weights


def head_mask(row, mask, c):
    options = [x.strip() for x in (c.get("rollout_rs") or "").split(",") if x.strip()]
    specs = [x.strip() for x in str(c.get("rollout_rs_threshold")).split(",")]
    specs = specs * len(options) if len(specs) == 1 else specs
    kept = mask
    for option, spec in zip(options, specs, strict=True) if options else ():
        left = option_mask(row, mask, option, spec)  # every option sees the response mask
        kept = [int(a and b) for a, b in zip(kept, left, strict=True)]
    return kept


def option_mask(row, mask, option, spec):
    """The mask that one option leaves. k1 is -log ratio, so its bounds speak of rollout / train."""
    scope, statistic = option.rsplit("_", 1)
    x = clamped(row)
    per_token = {
        "k1": [-v for v in x],
        "k2": [v * v / 2 for v in x],
        "k3": [math.exp(v) - 1 - v for v in x],
    }[statistic]
    if statistic == "k1":
        low, high = spec.split("_") if "_" in spec else (1 / float(spec), spec)
        low, high = math.log(float(low)), math.log(float(high))
    else:
        low, high = -math.inf, float(spec)
    return band(spread(scope, per_token, mask), mask, low, high)


def spread(scope, values, mask):
    if scope == "token":
        return values
    how = {"seq_sum": masked_sum, "seq_mean": masked_mean, "seq_max": highest}[scope]
    return [how(values, mask)] * len(values)


def highest(values, mask):
    return max((v for v, m in zip(values, mask, strict=True) if m), default=0.0)
