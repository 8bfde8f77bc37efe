"""fw-ai cookbook, transcribed: active tokens only, clamp of +-20 per token, geometric "sequence"."""

from tests.tools.convert.oracle_common import clamped, masked_mean, safe_exp


def weights(rows, cap=5.0, level="token", icepop=None):
    """(weights, masks) per sequence; a weight outside IcePop's band is 0, its token stays."""
    return [one(row, mask, cap, level, icepop) for row, mask in rows], [mask for _, mask in rows]


def one(row, mask, cap, level, icepop):
    if level == "sequence":
        raw = [safe_exp(masked_mean(clamped(row), mask))] * len(row)
    else:
        raw = [safe_exp(x) for x in row]
    kept = [icepop is None or 1 / icepop <= r <= icepop for r in raw]
    return [min(r, cap) if k else 0.0 for r, k in zip(raw, kept, strict=True)]
