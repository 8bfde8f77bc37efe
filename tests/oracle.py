"""The definitions once more, in plain Python floats and loops: what every tensor implementation is compared
with.

A batch is a list of sequences; a sequence is a dict of equally long lists: proximal, behavior, target
(log-probs in nats), advantage, host_loss, mask (0 or 1). Specifications are written down here by hand from
the sources, never read from the package, which this file does not import.
"""

from __future__ import annotations

import functools
import math
import random
from itertools import groupby

INF = math.inf


def exp(x):
    return INF if x > 709.78 else math.exp(x)


def is_log_prob(value):
    """Of a sampled token: NaN, infinities, probabilities above 1 and servers' numbers for -inf are none."""
    return -1000 < value <= 0.01


def spec(*steps, numerator="proximal", loss=("host",), terms=(), center=None):
    """``center``: f, the weight of a token of the head by its ratio."""
    return {"steps": steps, "numerator": numerator, "loss": loss, "terms": terms, "center": center}


CAP2 = ("truncate", 2.0)
TOKEN, SEQ = ("reweight", "token"), ("reweight", "sequence")
GEO = ("reject", "sequence", "ratio", "mean", 0.999, 1.001, "always")
K3 = ("reject", "sequence", "k3", "mean", -INF, 0.01, "always")
BAND = ("reject", "token", "ratio", "-", 0.5, 5.0, "always")
PURE = {"numerator": "target", "loss": ("reinforce",)}
BYPASS = {"numerator": "target", "loss": ("ppo_clip", "behavior")}


def product(low, high):
    return ("reject", "sequence", "ratio", "sum", low, high, "always")


SPECS = {
    "metrics_only": spec(),
    "token_tis": spec(TOKEN, CAP2),
    "seq_is": spec(SEQ, CAP2),
    "seq_is_rs": spec(SEQ, CAP2, product(0.5, 2.0)),
    "seq_mis": spec(SEQ, CAP2, product(0.0, 2.0)),
    "geo_rs": spec(("reject", "sequence", "ratio", "mean", 1 / 1.001, 1.001, "always"), ("veto", 1e-4, INF)),
    "geo_mis": spec(GEO, ("veto", 1e-4, INF)),
    "ppo_is_bypass": spec(**BYPASS),
    "pure_is": spec(SEQ, CAP2, **PURE),
    "off_policy_is": spec(TOKEN, ("clip", 0.8, 1.2), **PURE),
    "off_policy_is_one_sided": spec(TOKEN, ("truncate", 1.2), **PURE),
    "importance_sampling": spec(TOKEN, **PURE),
    "fireworks_token": spec(TOKEN, ("truncate", 5.0)),
    "fireworks_geometric": spec(("reweight", "geometric"), ("truncate", 5.0)),
    "skyrl_seq_tis": spec(SEQ, ("truncate", 5.0)),
    "skyrl_geo_mask": spec(("reject", "sequence", "ratio", "mean", 0.99, 1.01, "always")),
    "skyrl_product_mask": spec(product(0.5, 2.0)),
    "skyrl_outlier_mask": spec(("veto", 1e-4, 100.0)),
    "decoupled_geo_rs": spec(GEO),
    "decoupled_geo_rs_seq_tis": spec(SEQ, CAP2, GEO),
    "decoupled_geo_rs_token_tis": spec(TOKEN, CAP2, GEO),
    "decoupled_k3_rs": spec(K3),
    "decoupled_k3_rs_seq_tis": spec(SEQ, CAP2, K3),
    "decoupled_k3_rs_token_tis": spec(TOKEN, CAP2, K3),
    "bypass_ppo_clip_geo_rs": spec(GEO, **BYPASS),
    "bypass_ppo_clip_k3_rs": spec(K3, **BYPASS),
    "bypass_pg_geo_rs": spec(GEO, **PURE),
    "bypass_pg_geo_rs_seq_tis": spec(SEQ, CAP2, GEO, **PURE),
    "bypass_pg_geo_rs_token_tis": spec(TOKEN, CAP2, GEO, **PURE),
    "bypass_pg_token_icepop": spec(TOKEN, BAND, **PURE),
    "icepop": spec(TOKEN, BAND),
    "kpop": spec(TOKEN, ("reject", "token", "binary_kl_max", "-", -INF, 0.1, "always")),
    "trm": spec(("reject", "sequence", "k2", "max", -INF, 0.5, "always"), K3),
    "min_prefix": spec(("min_prefix",), CAP2),
    "turn_tis": spec(("reweight", "turn"), CAP2),
    "m2": spec(("second_moment", 0.04)),
    "cispo": spec(TOKEN, ("truncate", 5.0), **PURE),
    "opsm": spec(
        ("reject", "sequence", "k1", "mean", -INF, 1e-4, "negative_advantage"),
        numerator="target",
        loss=("host",),
    ),
    "topr": spec(("signed_clip", "sequence", (1.0, 1.0), (0.0, 1.0)), **PURE),
    "dppo_tv": spec(TOKEN, ("truncate", 20.0), ("reject", "token", "tv", "-", -INF, 0.2, "outward"), **PURE),
    "glm5": spec(TOKEN, ("reject", "token", "ratio", "-", 0.5, 2.0, "always"), **PURE),
    "flash_reinforce": spec(TOKEN, ("reject", "sequence", "binary_kl", "mean", -INF, 5e-3, "always"), **PURE),
    "sao_math": spec(TOKEN, ("reject", "token", "ratio", "-", 0.7, 6.0, "always"), **PURE),
    "sao_code": spec(TOKEN, ("reject", "token", "ratio", "-", 0.2, 4.0, "always"), **PURE),
    "score_centering": spec(TOKEN, CAP2, center=lambda ratio: min(ratio, 2.0), **PURE),
    "ipo": spec(
        TOKEN,
        ("reject", "token", "tv", "-", -INF, 0.1, "always"),
        terms=(("squared", 1e-3),),
        **PURE,
    ),
    "cppo": spec(TOKEN, ("prefix_budget", "tv", 0.2, 0.02, 0.8, "outward"), **PURE),
    "ctpo": spec(
        ("prefix_reweight", "sum"),
        ("prefix_reject", "ratio", "sum", 0.0, math.exp(0.05), "sqrt", "always"),
        ("prefix_reject", "ratio", "sum", math.exp(-0.025), INF, "sqrt", "negative_advantage"),
        **PURE,
    ),
    "p3o": spec(TOKEN, ("ess_truncate",), loss=("reinforce",), terms=(("reverse_k3", 1.0, True),)),
    "delightful": spec(numerator="target", loss=("delightful", 1.0)),
    "seq_mask_tis": spec(TOKEN, ("reject", "sequence", "ratio", "mean", 0.999, 1.002, "always")),
}


# ---- units ----


def turns(mask):
    """Index lists of the maximal runs of 1."""
    runs = [(bit, [i for i, _ in run]) for bit, run in groupby(enumerate(mask), key=lambda pair: pair[1])]
    return [indices for bit, indices in runs if bit]


def units(unit, mask):
    tokens = [i for i, bit in enumerate(mask) if bit]
    return {"token": [[i] for i in tokens], "turn": turns(mask), "sequence": [tokens] if tokens else []}[unit]


def unit_of(step):
    if step[0] in ("reweight", "signed_clip"):
        return "sequence" if step[1] == "geometric" else step[1]
    if step[0] == "reject":
        return step[1]
    of_sequences = ("veto", "min_prefix", "prefix_reweight", "prefix_reject", "prefix_budget")
    return "sequence" if step[0] in of_sequences else "token"


# ---- per-token quantities ----


def bernoulli_kl(a, b):
    return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))


def probability(log_prob):
    return min(max(exp(log_prob), 1e-6), 1 - 1e-6)


def statistic(name, numerator, behavior):
    log_ratio = numerator - behavior
    if name == "ratio":
        return log_ratio
    if name in ("k1", "k2", "k3"):
        return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": exp(log_ratio) - 1 - log_ratio}[name]
    if name == "tv":
        return abs(exp(numerator) - exp(behavior))
    p, q = probability(numerator), probability(behavior)
    return bernoulli_kl(q, p) if name == "binary_kl" else max(bernoulli_kl(p, q), bernoulli_kl(q, p))


def aggregate(how, values):
    if how == "max":
        return max(values)
    return math.fsum(values) / (len(values) if how == "mean" else 1)


# ---- the correction ----


def correct(specification, batch):
    """Per sequence: weights, keep, loss. Steps that couple samples take the batch as the whole optimizer
    step."""
    seqs = [prepare(s, specification) for s in batch]
    for step in specification["steps"]:
        apply(step, seqs)
    for s in seqs:
        s["weights"] = [w if k else 0.0 for w, k in zip(s["weights"], s["keep"], strict=True)]
        s["loss"] = [token_loss(specification, s, i) if k else 0.0 for i, k in enumerate(s["keep"])]
        for i, finite in enumerate(s["finite"]):
            s["loss"][i] += (
                math.fsum(term_loss(term, s, i) for term in specification.get("terms", ())) if finite else 0
            )
            if finite and (f := specification.get("center")):
                s["loss"][i] += s["advantage"][i] * centering(*heads(len(s["mask"]))[i], f)
    return seqs


def prepare(sequence, specification):
    s = dict(sequence)
    n = len(s["mask"])
    s["numerator"] = s[specification["numerator"]]
    s["finite"] = [bool(m) and is_log_prob(b) for m, b in zip(s["mask"], s["behavior"], strict=True)]
    s["usable"] = list(s["finite"])
    for step in specification["steps"]:
        for unit in units(unit_of(step), s["mask"]):
            if not all(s["finite"][i] for i in unit):
                for i in unit:
                    s["usable"][i] = False
    # A token without a behavior log-prob counts as on-policy in the statistics of others.
    s["behavior_read"] = [
        b if f else p for b, f, p in zip(s["behavior"], s["finite"], s["numerator"], strict=True)
    ]
    s["l"] = [
        p - b if m else 0.0 for p, b, m in zip(s["numerator"], s["behavior_read"], s["mask"], strict=True)
    ]
    s["weights"], s["keep"] = [1.0] * n, list(s["usable"])
    return s


def apply(step, seqs):
    coupled = {"second_moment": second_moment, "normalize": normalize, "ess_truncate": ess_truncate}
    if step[0] in coupled:
        return coupled[step[0]](seqs, step)
    for s in seqs:
        {
            "reweight": reweight,
            "min_prefix": min_prefix,
            "signed_clip": signed_clip,
            "reject": reject,
            "veto": veto,
            "prefix_reweight": prefix_reweight,
            "prefix_reject": prefix_reject,
            "prefix_budget": prefix_budget,
        }.get(step[0], bound)(s, step)


def bound(s, step):
    low, high = (0.0, step[1]) if step[0] == "truncate" else step[1:]
    s["weights"] = [min(max(w, low), high) for w in s["weights"]]


def level_ratio(s, level):
    ratio = [1.0] * len(s["l"])
    for unit in units({"geometric": "sequence"}.get(level, level), s["mask"]):
        value = aggregate("mean" if level == "geometric" else "sum", [s["l"][i] for i in unit])
        for i in unit:
            ratio[i] = exp(value)
    return ratio


def reweight(s, step):
    s["weights"] = level_ratio(s, step[1])


def min_prefix(s, step):
    lowest = INF
    for i, bit in enumerate(s["mask"]):
        if bit:
            s["weights"][i] = exp(s["l"][i] + (0.0 if lowest == INF else lowest))
            lowest = min(lowest, s["l"][i])


def signed_clip(s, step):
    _, level, positive, negative = step
    for i, ratio in enumerate(level_ratio(s, level)):
        low, high = negative if s["advantage"][i] < 0 else positive
        s["weights"][i] = min(max(ratio, low), high)


def reject(s, step):
    _, unit, name, how, low, high, when = step
    if name == "ratio":
        low, high = math.log(low) if low else -INF, math.log(high)
    for tokens in units(unit, s["mask"]):
        values = [statistic(name, s["numerator"][i], s["behavior_read"][i]) for i in tokens]
        value = values[0] if unit == "token" else aggregate(how, values)
        advantage = math.fsum(s["advantage"][i] for i in tokens)
        drift = math.fsum(s["l"][i] for i in tokens)
        if applies(when, advantage, drift) and not low <= value <= high:
            for i in tokens:
                s["keep"][i] = False


def applies(when, advantage, drift):
    return {
        "always": True,
        "negative_advantage": advantage < 0,
        "positive_advantage": advantage >= 0,
        "outward": advantage * drift > 0,
        "outward_positive": advantage > 0 and drift > 0,
        "outward_negative": advantage < 0 and drift < 0,
    }[when]


def response(s):
    return [i for i, bit in enumerate(s["mask"]) if bit]


def prefix_reweight(s, step):
    done = []
    for i in response(s):
        done.append(s["l"][i])
        s["weights"][i] = exp(aggregate(step[1], done))


def prefix_reject(s, step):
    _, name, how, low, high, growth, when = step
    if name == "ratio":
        low, high = math.log(low) if low else -INF, math.log(high) if high < INF else INF
    done = []
    for i in response(s):
        done.append(statistic(name, s["numerator"][i], s["behavior_read"][i]))
        scale = math.sqrt(len(done)) if growth == "sqrt" else 1.0
        inside = low * scale <= aggregate(how, done) <= high * scale
        if applies(when, s["advantage"][i], s["l"][i]) and not inside:
            s["keep"][i] = False


def prefix_budget(s, step):
    _, name, high, budget, last, when = step
    tokens, spent, granted = response(s), 0.0, 0.0
    for t, i in enumerate(tokens):
        v = 1 - (1 - last) * t / max(len(tokens) - 1, 1)
        own = v * statistic(name, s["numerator"][i], s["behavior_read"][i])
        inside = own <= high and spent + own <= high + budget * granted
        if applies(when, s["advantage"][i], s["l"][i]) and not inside:
            s["keep"][i] = False
        spent, granted = spent + own, granted + v


def veto(s, step):
    _, low, high = step
    tokens = [i for i, bit in enumerate(s["mask"]) if bit]
    if any(exp(s["l"][i]) < low or exp(s["l"][i]) > high for i in tokens):
        s["keep"] = [False] * len(s["keep"])


def second_moment(seqs, step):
    values = sorted(s["l"][i] ** 2 for s in seqs for i, u in enumerate(s["usable"]) if u)
    while len(values) > 1 and math.fsum(values) / len(values) >= step[1]:
        dropped = values[-1]
        rest = [v for v in values if v < dropped]
        if not rest:
            break
        values = rest
    cut = values[-1] if values else INF
    for s in seqs:
        s["keep"] = [k and x**2 <= cut for k, x in zip(s["keep"], s["l"], strict=True)]


def normalize(seqs, step):
    total = count = 0.0
    for s in seqs:
        share = 1 if step[1] == "token" else 1 / max(sum(s["mask"]), 1)
        total += math.fsum(w * share for w, u in zip(s["weights"], s["usable"], strict=True) if u)
        count += share * sum(s["usable"])
    mean = total / count if total else 1.0
    for s in seqs:
        s["weights"] = [w / mean for w in s["weights"]]


def ess_truncate(seqs, step):
    usable = [(s, i) for s in seqs for i, u in enumerate(s["usable"]) if u]
    cap = ess([s["weights"][i] for s, i in usable]) if usable else 1.0
    for s in seqs:
        s["ess"], s["weights"] = cap, [min(w, cap) for w in s["weights"]]


def term_loss(term, s, i):
    log_ratio = s["target"][i] - s["behavior"][i]
    if term[0] == "squared":
        return term[1] * log_ratio**2
    factor, log_ratio = term[1] * ((1 - s["ess"]) if term[2] else 1), max(log_ratio, -20)
    return factor * (exp(-log_ratio) - 1 + log_ratio)


def token_loss(specification, s, i, eps=0.2):
    kind = specification["loss"]
    if kind[0] == "delightful":
        surprise = -s["target"][i]
        gate = 1 / (1 + exp(-s["advantage"][i] * surprise / kind[1]))
        return gate * s["advantage"][i] * surprise * s["weights"][i]
    if kind[0] == "host":
        return s["host_loss"][i] * s["weights"][i]
    if kind[0] == "reinforce":
        return -s["advantage"][i] * s["target"][i] * s["weights"][i]
    ratio = exp(s["target"][i] - s[kind[1]][i])
    return ppo(ratio, s["advantage"][i], eps) * s["weights"][i]


def ppo(ratio, advantage, eps):
    return max(-ratio * advantage, -min(max(ratio, 1 - eps), 1 + eps) * advantage)


# ---- score centering ----


@functools.cache
def heads(length, k=5, rest=3):
    """Log-probs of sampler and trainer of k tokens out of k + rest, at each token of a sequence."""
    rng = random.Random(length)
    found = []
    for _ in range(length):
        logits = [rng.gauss(0, 1) for _ in range(k + rest)]
        other = [x + rng.gauss(0, 0.5) for x in logits]
        totals = [math.log(math.fsum(map(math.exp, row))) for row in (logits, other)]
        found.append([[x - z for x in row[:k]] for row, z in zip((logits, other), totals, strict=True)])
    return found


def centering_coefficients(sampler, trainer, f):
    """stopgrad(q_v f(p_v / q_v) - alpha p_v) of every token of a head, in probabilities."""
    q, p = [exp(x) for x in sampler], [exp(x) for x in trainer]
    q_tail, p_tail = (max(1 - math.fsum(values), 1e-6) for values in (q, p))
    rho = q_tail / p_tail
    alpha = rho * f(1 / rho)
    return [b * f(a / b) - alpha * a for a, b in zip(p, q, strict=True)]


def centering(sampler, trainer, f):
    """C_t of one token."""
    coefficients = centering_coefficients(sampler, trainer, f)
    return math.fsum(c * x for c, x in zip(coefficients, trainer, strict=True))


def log_softmax(row, within=None):
    """Log-probs of a row of logits, over some of its ids alone or all; {id: log-prob}."""
    ids = range(len(row)) if within is None else within
    if not ids:
        return {}
    top = max(row[v] for v in ids)
    total = top + math.log(math.fsum(exp(row[v] - top) for v in ids))
    return {v: row[v] - total for v in ids}


def score_factor(loss, advantage, log_p, log_o, log_q):
    """The factor of a loss whose gradient is -A x factor x grad log p: 1 of -A log p; of PPO's the ratio, and
    0 where the clip acts. ("ppo", anchor, eps_low, eps_high[, eps_c])"""
    if loss[0] == "reinforce":
        return 1.0
    _, anchor, low, high, *ceiling = loss
    ratio = exp(log_p - {"proximal": log_o, "behavior": log_q}[anchor])
    if advantage > 0:
        return 0.0 if ratio > 1 + high else ratio
    is_floored = bool(ceiling) and ratio > ceiling[0]
    return 0.0 if ratio < 1 - low or is_floored else ratio


def surrogate(loss, advantage, log_p, log_o, log_q):
    """The loss itself."""
    if loss[0] == "reinforce":
        return -advantage * log_p
    _, anchor, low, high, *ceiling = loss
    ratio = exp(log_p - {"proximal": log_o, "behavior": log_q}[anchor])
    found = max(-ratio * advantage, -min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(found, -ceiling[0] * advantage) if ceiling and advantage < 0 else found


def weight_alone(specification, advantage, log_p, log_o, log_q):
    """The weight of a token that is a sequence of its own, 0 where it is rejected."""
    s = {"mask": [1], "target": [log_p], "behavior": [log_q], "proximal": [log_o]}
    (found,) = correct(specification, [s | {"advantage": [advantage], "host_loss": [0.0]}])
    return found["weights"][0]


def candidate_coefficients(head, factor, *, has_tail):
    """stopgrad(q_v g_v - alpha p_v) of each candidate.

    Args:
        head: (log_p, log_o, log_q) of each.
        factor: g of such a triple.
        has_tail: whether there are tokens beside them, which q is rho p of; alpha = rho g(tail).
    """
    alpha = 0.0
    if has_tail:
        p, o, q = (max(1 - math.fsum(map(exp, side)), 1e-6) for side in zip(*head, strict=True))
        alpha = q / p * factor(math.log(p), math.log(o), math.log(q))
    return [exp(q) * factor(p, o, q) - alpha * exp(p) for p, o, q in head]


def centered(of_tokens, of_units, loss, batch, heads, *, has_tail):
    """m (f surrogate + A C) of every token, and its gradient in the log-probs: of the sampled token, and of
    each candidate.

    Args:
        of_tokens, of_units: specifications of the steps that give f, and of those that give m.
        heads: for each token of the batch, (log_p, log_o, log_q) of each candidate.
    """
    out, each = [], iter(heads)
    for s, found in zip(batch, correct(of_units, batch), strict=True):
        for i, m in enumerate(found["weights"]):
            head, a = next(each), s["advantage"][i]
            if not m:
                out.append((0.0, 0.0, [0.0] * len(head)))
                continue
            own = s["target"][i], s["proximal"][i], s["behavior"][i]

            def g(p, o, q, a=a):
                return weight_alone(of_tokens, a, p, o, q) * score_factor(loss, a, p, o, q)

            held = [a * m * c for c in candidate_coefficients(head, g, has_tail=has_tail)]
            added = math.fsum(c * log_p for c, (log_p, _, _) in zip(held, head, strict=True))
            value = m * weight_alone(of_tokens, a, *own) * surrogate(loss, a, *own) + added
            out.append((value, -a * m * g(*own), held))
    return out


# ---- metrics ----


def metrics(batch, weights, keep, numerator):
    """What docs/metrics.md says, from the weights and keep of every token."""
    rows = [
        (p - b if is_log_prob(b) else None, p, b, w, k)
        for s, ws, ks in zip(batch, weights, keep, strict=True)
        for p, b, m, w, k in zip(s[numerator], s["behavior"], s["mask"], ws, ks, strict=True)
        if m
    ]
    l = [row[0] for row in rows if row[0] is not None]  # noqa: E741 - the letter of the definitions
    ratio, n, response = [exp(x) for x in l], max(len(l), 1), max(len(rows), 1)
    kept = [row[3] if row[4] else 0.0 for row in rows]
    return {
        "tokens": len(rows),
        "sequences": sum(any(s["mask"]) for s in batch),
        "k1_kl": math.fsum(-x for x in l) / n,
        "k3_kl": math.fsum(math.expm1(x) - x for x in l) / n,
        "ratio_mean": math.fsum(ratio) / n,
        "ratio_min": min(ratio, default=0.0),
        "ratio_max": max(ratio, default=0.0),
        "log_ratio_max": max(map(abs, l), default=0.0),
        "chi2_token": math.fsum(r * r - 1 for r in ratio) / n,
        "ess_ratio": ess(ratio),
        "ess_weight": ess(kept),
        "weight_mean": math.fsum(kept) / response,
        "weight_max": max(kept, default=0.0),
        "kept_fraction": sum(row[4] for row in rows) / response,
        "nonfinite_fraction": (len(rows) - len(l)) / response,
        "perplexity_behavior": exp(math.fsum(-row[2] for row in rows if row[0] is not None) / n)
        if l
        else 0.0,
        "perplexity_numerator": exp(math.fsum(-row[1] for row in rows if row[0] is not None) / n)
        if l
        else 0.0,
        **sequence_metrics(batch, numerator),
    }


def sequence_metrics(batch, numerator):
    """The same over whole sequences; a token without a behavior log-prob has ratio 1 in its product."""
    sums = [
        math.fsum(
            p - b
            for p, b, m in zip(s[numerator], s["behavior"], s["mask"], strict=True)
            if m and is_log_prob(b)
        )
        for s in batch
        if any(s["mask"])
    ]
    if not sums:
        return {"chi2_sequence": 0.0, "log1p_chi2_sequence": 0.0, "ess_sequence": 0.0}
    top = max(sums)
    log_second = 2 * top + math.log(math.fsum(exp(2 * (x - top)) for x in sums) / len(sums))
    return {
        "chi2_sequence": exp(log_second) - 1,
        "log1p_chi2_sequence": log_second,
        "ess_sequence": ess([exp(x - top) for x in sums]),
    }


def curve(batch, weights, keep, of, numerator="proximal"):
    """bin -> [tokens, mean k3, mean ratio, mean weight, share kept] over the finite tokens that
    ``of(sequence, position)`` puts there."""
    bins = {}
    for s, ws, ks in zip(batch, weights, keep, strict=True):
        for t, (p, b, m, w, k) in enumerate(zip(s[numerator], s["behavior"], s["mask"], ws, ks, strict=True)):
            if m and is_log_prob(b):
                bins.setdefault(of(s, t), []).append(
                    (math.expm1(p - b) - (p - b), exp(p - b), w if k else 0.0, k)
                )
    return {
        key: [len(rows), *(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))]
        for key, rows in bins.items()
    }


def ess(values):
    square = math.fsum(v * v for v in values)
    return math.fsum(values) ** 2 / (len(values) * square) if square else 0.0


# ---- batches ----


def random_batch(seed, *, wild=True):
    """1 to 6 ragged sequences: several turns, one fully masked, one of length 1, some extreme or broken
    tokens."""
    rng = random.Random(seed)
    lengths = [rng.randint(0, 40) for _ in range(rng.randint(1, 4))] + [1, rng.randint(1, 8)]
    batch = [
        random_sequence(rng, n, rng.choice([0.001, 0.05, 0.5]), wild=wild and rng.random() < 0.5)
        for n in lengths
    ]
    batch[-1]["mask"] = [0] * lengths[-1]
    rng.shuffle(batch)
    return batch


def random_sequence(rng, n, scale, *, wild):
    advantage = rng.choice([-1.3, 0.0, 0.7, 2.0])
    s = {
        "proximal": [-rng.expovariate(1.0) for _ in range(n)],
        "advantage": [advantage + (rng.gauss(0, 0.3) if wild else 0.0) for _ in range(n)],
        "host_loss": [rng.gauss(0, 1) for _ in range(n)],
        "mask": random_mask(rng, n),
    }
    s["behavior"] = [min(p + rng.gauss(0, scale), 0.0) for p in s["proximal"]]  # a log-prob is none above 0
    s["target"] = [p + rng.gauss(0, scale) for p in s["proximal"]]
    for i in range(n):
        if wild and rng.random() < 0.08:
            s["behavior"][i] = s["proximal"][i] + rng.choice([-50.0, INF, -INF, math.nan])
            if math.isnan(s["behavior"][i]):
                s["behavior"][i] = (math.nan, -9999.0, 0.7)[i % 3]
        elif wild and rng.random() < 0.02:
            s["proximal"][i] -= 50.0
        if not s["mask"][i] and rng.random() < 0.3:
            for key in ("behavior", "proximal", "target", "advantage", "host_loss"):
                s[key][i] = rng.choice([math.nan, INF, -INF, 1e30])
    return s


def random_mask(rng, n):
    mask, bit = [], rng.random() < 0.8
    while len(mask) < n:
        mask += [int(bit)] * rng.randint(1, 9)
        bit = not bit
    return mask[:n]
