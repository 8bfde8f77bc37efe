"""AReaL's decoupled loss, transcribed in plain Python floats: the factor of each token's PPO loss."""

from __future__ import annotations

import math


def second_moment(rows, threshold):
    """M2: drops the largest squared log-ratios of a batch until the mean of the rest is below a threshold."""
    places = [(row[i] ** 2, r, i) for r, (row, mask) in enumerate(rows) for i, m in enumerate(mask) if m]
    places.sort(reverse=True)
    dropped = 0
    while len(places) - dropped > 1:
        rest = [value for value, _, _ in places[dropped:]]
        if sum(rest) / len(rest) < threshold:
            break
        dropped += 1
    kept = [[0] * len(mask) for _, mask in rows]
    for _, r, i in places[dropped:]:
        kept[r][i] = 1
    return kept


def factors(rows, rejection_sampling=None, m2_threshold=None):
    """Per sequence: weight times mask. M2 narrows the mask before the filter looks at it."""
    masks = [mask for _, mask in rows]
    if m2_threshold is not None:
        masks = second_moment(rows, m2_threshold)
    if rejection_sampling is None:
        return [[float(m) for m in mask] for mask in masks]
    return [filtered(row, mask, **rejection_sampling) for (row, _), mask in zip(rows, masks, strict=True)]


def filtered(row, mask, level="token", action="mask", metric="ratio", agg="mean", upper=5.0, lower=None):
    low = -math.inf if lower is None else lower
    weights = [exp(x) for x in row]
    values = [statistic(metric, x) for x in row]
    if level == "sequence":
        if metric == "ratio":
            weights = [exp(aggregate("mean", row, mask))] * len(row)
            values = [exp(aggregate(agg, row, mask))] * len(row)
        else:
            values = [aggregate(agg, values, mask)] * len(row)
    inside = [low <= v <= upper for v in values]
    if action == "mask":
        return [w * m * ok for w, m, ok in zip(weights, mask, inside, strict=True)]
    floor = 0.0 if lower is None else lower
    clamps = [level == "token" or not ok for ok in inside]
    bounded = [min(max(w, floor), upper) if c else w for w, c in zip(weights, clamps, strict=True)]
    return [w * m for w, m in zip(bounded, mask, strict=True)]


def exp(x):
    return math.exp(min(x, 700.0))


def statistic(metric, x):
    return {"ratio": exp(x), "kl_k1": x, "kl_k2": x * x / 2}[metric]


def aggregate(agg, values, mask):
    held = [v for v, m in zip(values, mask, strict=True) if m]
    if not held:
        return 0.0
    return {"sum": sum(held), "mean": sum(held) / len(held), "max": max(held)}[agg]
