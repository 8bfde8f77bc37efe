"""What every one of these systems does alike, in plain floats."""

import math


def safe_exp(x):
    """exp of x clamped to [-20, 20]."""
    return math.exp(min(max(x, -20.0), 20.0))


def clamped(values):
    return [min(max(x, -20.0), 20.0) for x in values]


def masked_sum(values, mask):
    return math.fsum(x for x, m in zip(values, mask, strict=True) if m)


def masked_mean(values, mask):
    return masked_sum(values, mask) / max(sum(mask), 1)


def log_ratio(level, row, mask):
    """One number per token."""
    if level == "token":
        return row
    return [(masked_sum if level in ("sequence", "product") else masked_mean)(row, mask)] * len(row)


def band(values, mask, low, high):
    """The mask without the tokens whose value lies outside."""
    return [m if low <= v <= high else 0 for v, m in zip(values, mask, strict=True)]


def veto(row, mask, low, high=math.inf):
    """The mask, or nothing of it when one of its log-ratios lies outside."""
    bad = any(m and not math.log(low) <= x <= high for x, m in zip(row, mask, strict=True))
    return [0] * len(mask) if bad else mask
