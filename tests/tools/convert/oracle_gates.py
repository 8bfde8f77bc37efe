"""Weights of OpenRLHF, open-instruct, ms-swift, prime-rl, ROLL and TRL on one sequence, in plain Python
floats; 0 for what they drop."""

from __future__ import annotations

import math


def kl(q, p):
    q, p = (min(max(x, 1e-6), 1 - 1e-6) for x in (q, p))
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


def mean(values, mask):
    return sum(v * m for v, m in zip(values, mask, strict=True)) / max(sum(mask), 1)


def read(s, numerator):
    """Log-ratios, and the probabilities of the sampled tokens under the sampler and the trainer."""
    ours, theirs = s[numerator], s["behavior"]
    logs = [a - b for a, b in zip(ours, theirs, strict=True)]
    return logs, [math.exp(x) for x in theirs], [math.exp(x) for x in ours]


def divergences(kind, q, p):
    of = {"binary_kl": kl, "kl": kl, "tv": lambda a, b: abs(a - b)}[kind]
    return [of(a, b) for a, b in zip(q, p, strict=True)]


def statistic(kind, per_sequence, logs, q, p, mask):
    """Per token, or the sequence's mean at each token: geometric for the ratio."""
    values = logs if kind == "ratio" else divergences(kind, q, p)
    values = [mean(values, mask)] * len(mask) if per_sequence else values
    return [math.exp(min(x, 700.0)) for x in values] if kind == "ratio" else values


def ratios(logs, bound=700.0):
    return [math.exp(max(-bound, min(x, bound))) for x in logs]


def openrlhf(s, level, mode="mask", gating="ratio", low=0.0, high=5.0):
    logs, q, p = read(s, "proximal")
    stat = statistic(gating, level == "seq", logs, q, p, s["mask"])
    if mode == "clip":
        return [min(max(x, low), high) for x in stat]
    return [w * (low <= x <= high) for w, x in zip(ratios(logs), stat, strict=True)]


def ms_swift(s, mode, threshold):
    logs = [max(-20.0, min(x, 20.0)) for x in read(s, "proximal")[0]]
    level, how = mode.split("_")
    of_sequence = math.exp(mean(logs, s["mask"]))
    if level == "sequence":
        return [
            min(of_sequence, threshold) if how == "truncate" else w * (of_sequence <= threshold)
            for w in ratios(logs)
        ]
    return [min(w, threshold) if how == "truncate" else w * (w <= threshold) for w in ratios(logs)]


def at_level(level, values, mask):
    """Per token: its own value, the sequence's sum or mean, or the mean of its run of response tokens."""
    if level == "token":
        return values
    return [sum(v * m for v, m in zip(values, mask, strict=True))] * len(mask)


def trl(s, mode, low=None, high=3.0):
    level, how = mode.split("_")
    found = ratios(at_level(level, read(s, "proximal")[0], s["mask"]))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if how == "truncate":
        return [max(low, min(w, high)) for w in found]
    return [w if low <= w <= high else 0.0 for w in found]
