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


def open_instruct(s, numerator="proximal", clamp=None, cap=None, metric="ratio", level="token", **more):
    low, high, increase_only = (more.get(key, 0.0) for key in ("low", "high", "increase_only"))
    logs, q, p = read(s, numerator)
    stat = statistic(metric, level == "sequence", logs, q, p, s["mask"])
    found = []
    for log, x, a in zip(logs, stat, s["advantage"], strict=True):
        dropped = (low > 0 and x < low) or (high > 0 and x > high)
        dropped = dropped and (not increase_only or log * a > 0)
        ratio = math.exp(min(log, 700.0))
        weight = (
            1.0 if clamp is None and cap is None else min(max(ratio, (clamp or (0, 0))[0]), cap or clamp[1])
        )
        found.append(0.0 if dropped else weight)
    return found


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


def prime_rl(s, eps=None, cap=math.inf, low=0.0, high=math.inf, clip=None, ppo=None):
    logs, q, p = read(s, "target")
    if ppo is not None:
        return [ppo_slope(w, a, *ppo, cap) for w, a in zip(ratios(logs), s["advantage"], strict=True)]
    if clip is not None:
        return [min(max(w, clip[0]), clip[1]) for w in ratios(logs)]
    far = [
        abs(a - b) > eps if eps is not None else not low <= w <= high
        for a, b, w in zip(q, p, ratios(logs), strict=True)
    ]
    return [0.0 if drop else min(w, cap) for drop, w in zip(far, ratios(logs), strict=True)]


def ppo_slope(ratio, advantage, low, high, cap):
    """What multiplies -A grad log p: the capped ratio, or 0 where PPOLoss takes its clipped side."""
    capped = min(ratio, cap)
    if advantage == 0 and ratio > high:
        return 0.0  # any number would do
    clipped = min(max(capped, low), high)
    return capped if advantage * capped <= advantage * clipped else 0.0


def runs(mask):
    """The runs of 1 in a mask, each a list of positions."""
    found, open_run = [], False
    for i, m in enumerate(mask):
        if m and not open_run:
            found.append([])
        if m:
            found[-1].append(i)
        open_run = bool(m)
    return found


def at_level(level, values, mask):
    """Per token: its own value, the sequence's sum or mean, or the mean of its run of response tokens."""
    if level == "token":
        return values
    if level in ("sequence", "geometric"):
        total = sum(v * m for v, m in zip(values, mask, strict=True))
        return [total / (1 if level == "sequence" else max(sum(mask), 1))] * len(mask)
    means = [0.0] * len(mask)
    for run in runs(mask):
        for i in run:
            means[i] = sum(values[j] for j in run) / len(run)
    return means


def roll(s, weight=None, bound=math.inf, filters=()):
    """``filters``: (level, "ratio" or "diff", low, high)."""
    logs, q, p = read(s, "proximal")
    found = [min(w, bound) for w in ratios(at_level(weight, logs, s["mask"]))] if weight else [1.0] * len(q)
    for level, kind, low, high in filters:
        values = logs if kind == "ratio" else [b - a for a, b in zip(q, p, strict=True)]
        values = at_level(level, values, s["mask"])
        values = ratios(values) if kind == "ratio" else values
        found = [w * (low <= x <= high) for w, x in zip(found, values, strict=True)]
    return found


def trl(s, mode, low=None, high=3.0):
    level, how = mode.split("_")
    found = ratios(at_level(level, read(s, "proximal")[0], s["mask"]))
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if how == "truncate":
        return [max(low, min(w, high)) for w in found]
    return [w if low <= w <= high else 0.0 for w in found]
