"""What docs/configuration.md says of a mapping under ``slime_ext:``, in plain Python floats and loops, over
one optimizer step. It imports nothing of the package, and reads the mapping itself, not what is made of it.

A sequence is a dict: lists proximal, behavior, target (log-probs, nats), advantage, host_loss, mask (0 or 1),
all of one length, and its two ages (NaN where unknown). What it gives per token is in the same order.
"""

from __future__ import annotations

import math

from tests import oracle
from tests.oracle import INF, exp

DEFAULTS = {
    "reweight": {"level": "token", "over": "response", "clamp": None},
    "min_prefix_reweight": {},
    "signed_clip": {
        "level": "sequence",
        "positive_low": 1.0,
        "positive_high": 1.0,
        "negative_low": 0.0,
        "negative_high": 1.0,
    },
    "truncate": {"high": 2.0},
    "clip": {"low": 0.5, "high": 2.0},
    "zero_outside": {"unit": "token", "aggregate": "sum", "low": 0.5, "high": 2.0},
    "reject": {
        "unit": "token",
        "statistic": "ratio",
        "aggregate": "mean",
        "low": None,
        "high": None,
        "when": "always",
        "max_staleness": None,
        "max_staleness_steps": None,
        "over": "response",
        "clamp": None,
    },
    "veto": {"low": None, "high": None},
    "second_moment": {"threshold": 0.04},
    "normalize": {"level": "token"},
}
SURROGATES = {
    "host": {},
    "reinforce": {},
    "ppo_clip": {"anchor": "proximal", "eps_low": 0.2, "eps_high": 0.2},
    "dual_clip": {"anchor": "proximal", "eps_low": 0.2, "eps_high": 0.2, "eps_c": 3.0},
    "sapo": {"anchor": "proximal", "tau_pos": 1.0, "tau_neg": 1.05},
}


def named(entry, defaults):
    """``name`` or ``{name: fields}`` -> the name, and its fields with the defaults."""
    name, fields = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
    return name, {**defaults[name], **(fields or {})}


def corrected(mapping, batch):
    """Adds to each sequence weight, keep, loss and slope: of the loss with respect to host_loss, or to target
    where the loss is made of it. Changes the sequences."""
    steps = [named(entry, DEFAULTS) for entry in mapping.get("steps", [])]
    for s in batch:
        begin(s, mapping.get("numerator", "proximal"), {unit_of(*step) for step in steps})
    for name, fields in steps:
        if name in ("normalize", "second_moment"):
            {"normalize": normalize, "second_moment": second_moment}[name](batch, **fields)
            continue
        for s in batch:
            STEPS[name](s, **fields)
    surrogate = named(mapping.get("surrogate", "host"), SURROGATES)
    for s in batch:
        s["weight"] = [w if k else 0.0 for w, k in zip(s["weight"], s["keep"], strict=True)]
        pairs = [token_loss(s, i, *surrogate) if k else (0.0, 0.0) for i, k in enumerate(s["keep"])]
        s["loss"], s["slope"] = ([pair[side] for pair in pairs] for side in (0, 1))
    return batch


def unit_of(name, fields):
    if name in ("min_prefix_reweight", "veto"):
        return "sequence"
    unit = fields.get("unit") or fields.get("level", "token")
    return {"geometric": "sequence"}.get(unit, unit) if name != "normalize" else "token"


def begin(s, numerator, units):
    """Log-ratios; what one log-prob that is not finite takes with it."""
    s["numerator"] = s[numerator]
    s["finite"] = [bool(m) and oracle.is_log_prob(b) for m, b in zip(s["mask"], s["behavior"], strict=True)]
    s["l"] = [p - b if f else 0.0 for p, b, f in zip(s["numerator"], s["behavior"], s["finite"], strict=True)]
    s["keep"] = list(s["finite"])
    for unit in units:
        for tokens in oracle.units(unit, s["mask"]):
            if not all(s["finite"][i] for i in tokens):
                drop(s, tokens)
    s["usable"] = list(s["keep"])
    s["weight"] = [1.0] * len(s["mask"])


def drop(s, tokens):
    for i in tokens:
        s["keep"][i] = False


def clamped(x, clamp):
    return x if clamp is None else min(max(x, -clamp), clamp)


def level_ratios(s, level, over="response", clamp=None):
    """One per token."""
    unit = {"geometric": "sequence"}.get(level, level)
    found = [1.0] * len(s["l"])
    for tokens in oracle.units(unit, s["mask"]):
        read = [i for i in tokens if over == "response" or s["keep"][i]]
        total = math.fsum(clamped(s["l"][i], clamp) for i in read)
        for i in tokens:
            found[i] = exp(total / max(len(read), 1) if level == "geometric" else total)
    return found


def reweight(s, level, over, clamp):
    s["weight"] = level_ratios(s, level, over, clamp)


def min_prefix_reweight(s):
    before = INF
    for i, m in enumerate(s["mask"]):
        if m:
            s["weight"][i] = exp(s["l"][i] + (0.0 if before == INF else before))
            before = min(before, s["l"][i])


def signed_clip(s, level, positive_low, positive_high, negative_low, negative_high):
    bounds = {True: (negative_low, negative_high), False: (positive_low, positive_high)}
    for i, ratio in enumerate(level_ratios(s, level)):
        low, high = bounds[s["advantage"][i] < 0]
        s["weight"][i] = min(max(ratio, low), high)


def truncate(s, high):
    s["weight"] = [min(w, high) for w in s["weight"]]


def clip(s, low, high):
    s["weight"] = [min(max(w, low), high) for w in s["weight"]]


def zero_outside(s, unit, aggregate, low, high):
    for tokens in oracle.units(unit, s["mask"]):
        total = math.fsum(s["l"][i] for i in tokens)
        value = total / len(tokens) if aggregate == "mean" else total
        if not log(low) <= value <= log(high):
            for i in tokens:
                s["weight"][i] = 0.0


def log(bound):
    return math.log(bound) if bound > 0 else -INF


def quantity(s, i, name, clamp):
    if name in ("ratio", "k1", "k2", "k3"):
        return oracle.statistic(name, clamped(s["l"][i], clamp), 0.0)
    return oracle.statistic(name, s["numerator"][i], s["behavior"][i]) if s["finite"][i] else 0.0


def reject(s, unit, statistic, aggregate, low, high, when, max_staleness, max_staleness_steps, over, clamp):
    read = [over == "response" or k for k in s["keep"]]
    doomed = []
    is_old = max_staleness is not None and s["age"] > max_staleness
    if is_old or (max_staleness_steps is not None and s["age_steps"] > max_staleness_steps):
        doomed += oracle.units("sequence", s["mask"])
    low, high = -INF if low is None else low, INF if high is None else high
    if statistic == "ratio":
        low, high = log(low) if low > -INF else low, log(high)
    for tokens in oracle.units(unit, s["mask"]) if (low, high) != (-INF, INF) else []:
        values = [quantity(s, i, statistic, clamp) for i in tokens if read[i]] or [0.0]
        value = max(values) if aggregate == "max" else math.fsum(values)
        value = value / len(values) if aggregate == "mean" else value
        advantage = math.fsum(s["advantage"][i] for i in tokens if read[i] or unit == "token")
        drift = math.fsum(clamped(s["l"][i], clamp) for i in tokens if read[i])
        applies = {"always": True, "negative_advantage": advantage < 0, "outward": advantage * drift > 0}
        if applies[when] and not low <= value <= high:
            doomed.append(tokens)
    for tokens in doomed:
        drop(s, tokens)


def veto(s, low, high):
    low, high = log(low or 0.0), INF if high is None else log(high)
    for tokens in oracle.units("sequence", s["mask"]):
        if any(not low <= s["l"][i] <= high for i in tokens):
            drop(s, tokens)


def second_moment(batch, threshold):
    squares = sorted(s["l"][i] ** 2 for s in batch for i, u in enumerate(s["usable"]) if u)
    kept = squares
    while kept and math.fsum(kept) / len(kept) >= threshold and kept[-1] > kept[0]:
        kept = [x for x in kept if x < kept[-1]]
    for s in batch:
        drop(s, [i for i, x in enumerate(s["l"]) if kept and x * x > kept[-1]])


def normalize(batch, level):
    total = count = 0.0
    for s in batch:
        share = 1 / max(sum(s["mask"]), 1) if level == "sequence" else 1.0
        total += math.fsum(w * share for w, u in zip(s["weight"], s["usable"], strict=True) if u)
        count += share * sum(s["usable"])
    mean = total / count if total > 0 else 1.0
    for s in batch:
        s["weight"] = [w / mean for w in s["weight"]]


STEPS = {
    "reweight": reweight,
    "min_prefix_reweight": min_prefix_reweight,
    "signed_clip": signed_clip,
    "truncate": truncate,
    "clip": clip,
    "zero_outside": zero_outside,
    "reject": reject,
    "veto": veto,
}


def token_loss(s, i, name, fields):
    """The weighted loss of a kept token, and its slope."""
    a, weight = s["advantage"][i], s["weight"][i]
    if name == "host":
        return s["host_loss"][i] * weight, weight
    if name == "reinforce":
        return -a * s["target"][i] * weight, -a * weight
    x = s["target"][i] - s[fields["anchor"]][i]
    r = exp(x)
    if name == "sapo":
        tau = fields["tau_pos"] if a > 0 else fields["tau_neg"]
        gate = 1 / (1 + exp(-tau * (r - 1)))
        return -a * gate * 4 / tau * weight, -a * gate * (1 - gate) * 4 * r * weight
    low, high = 1 - fields["eps_low"], 1 + fields["eps_high"]
    clipped = -a * min(max(r, low), high)
    loss, slope = (-a * r, -a * r) if -a * r >= clipped else (clipped, 0.0)
    if name == "dual_clip" and a < 0 and loss > -a * fields["eps_c"]:
        loss, slope = -a * fields["eps_c"], 0.0
    return loss * weight, slope * weight
