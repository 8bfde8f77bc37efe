"""verl's rollout correction at PR 3984, which no wheel has, transcribed."""

from tests.tools.convert.oracle_common import band, log_ratio, masked_mean, safe_exp, veto


def weights_of(row, mask, level, cap):
    if level is None:
        return [1.0] * len(row)
    return [min(safe_exp(x), cap) * m for x, m in zip(log_ratio(level, row, mask), mask, strict=True)]


def split(done):
    return [w for w, _ in done], [m for _, m in done]


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


def normalized(weights, masks, level):
    if level == "token":
        mean = masked_mean([w for row in weights for w in row], [m for row in masks for m in row])
    else:
        means = [masked_mean(w, m) for w, m in zip(weights, masks, strict=True) if sum(m)]
        mean = sum(means) / max(len(means), 1)
    return [[w / mean for w in row] for row in weights] if mean > 1e-8 else weights
