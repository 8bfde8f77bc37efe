"""The recorded values are not the log-probs of the sampled tokens: NaN, another token's, filled in with 0."""

from __future__ import annotations

from slime_ext.tools.analysis.findings.detector import Figures, need, need_tokens
from slime_ext.tools.analysis.measures.detector_statistics import DOUBTED
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.shifts import CLOSER, SHIFT_TOKENS, SHIFTS

MOVED, MOVED_SHARE = 3, 0.02  # turns of which the later part is shifted
SHIFTED_SEQUENCES, SHIFTED_SHARE = 2, 0.02  # sequences that are shifted when others are not, and their share
GREEDY_TOKENS = 100  # tokens
NEARLY_ALL = 0.95  # tokens with a behavior log-prob of 0
DOUBTED_SHARE = 0.05  # tokens of which the trainer is not sure; flipped experts and tool output are rarer
FILLED_TOKENS, FILLED_SHARE = 4, 5e-4  # tokens in runs, and their share
# Zeros that stand alone are filled in if they are this share of the tokens, and nearly all of the tokens of
# which the sampler is sure and the trainer is not: an engine that errs is mostly nearly sure, not exactly.
ALONE_SHARE, EXACT_SHARE = 5e-3, 0.9


def nan_log_probs(d: Diagnosis) -> Figures | None:
    """Finds tokens of a response without a log-prob of the sampler (NaN, infinite, or a number that stands
    for minus infinity), and any without a finite one of the trainer."""
    tokens, of_trainer = d.sums["tokens"], int(d.sums["no_proximal"])
    sequences = d.statistics.counts["partial"]
    if not sequences and not of_trainer:
        return None
    lacking = tokens - d.sums["finite"]
    return {
        "sequences": sequences,
        "of_trainer": of_trainer,
        "is_all": of_trainer == tokens,
        "lacking": lacking,
        "tokens": tokens,
        **_sentinels(d),
    }


def _sentinels(d: Diagnosis) -> Figures:
    """How many tokens have a number that stands for minus infinity, and the most frequent one."""
    known = d.statistics.sentinels
    return {"sentinels": known.total(), "sentinel": known.most_common(1)[0][0] if known else 0.0}


def missing_log_probs(d: Diagnosis) -> Figures | None:
    """Finds responses without any log-prob of the sampler."""
    silent = d.statistics.counts["silent"]
    return {"silent": silent, "sequences": int(d.sums["sequences"]), **_sentinels(d)} if silent else None


def positive_log_probs(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs above 0."""
    count = d.statistics.counts["positive"]
    return {"count": count, "tokens": d.sums["tokens"]} if count else None


def retokenised(d: Diagnosis) -> Figures | None:
    """Finds turns whose log-probs fit their tokens up to some place, and tokens one or two places away from
    there on; or samples whose tokens differ between the rollout dump and the train dump."""
    turns, moved, retold = (d.statistics.counts[name] for name in ("turns", "moved", "retold"))
    need(turns >= MOVED, f"{MOVED} turns of responses")
    if moved < max(MOVED, MOVED_SHARE * turns) and not retold:
        return None
    return {"turns": turns, "moved": moved, "retold": retold}


def off_by_one(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs that fit the token one or two places away better than their own, over all
    tokens or in some of the sequences."""
    need_tokens(d, SHIFT_TOKENS)
    found = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.statistics.shifts.tolist(), strict=True)
        if count >= SHIFT_TOKENS
    ]
    distance, here, best = min(found, default=(0.0, 0.0, 0))
    if distance < CLOSER * here:
        return {"sequences": 0, "shift": best, "here": here, "distance": distance}
    sequences, best = max(zip(d.statistics.shifted.tolist(), SHIFTS, strict=True))  # each looked at by itself
    every = d.sums["sequences"]
    if sequences < max(SHIFTED_SEQUENCES, SHIFTED_SHARE * every):
        return None
    return {"sequences": sequences, "shift": best, "every": every}


def greedy_sampling(d: Diagnosis) -> Figures | None:
    """Finds behavior log-probs that are nearly all exactly 0 where the trainer is often unsure."""
    need_tokens(d, GREEDY_TOKENS)
    count, zeros, doubted = d.sums["finite"], d.statistics.counts["zeros"], d.statistics.counts["doubted"]
    if zeros < NEARLY_ALL * count or doubted < DOUBTED_SHARE * count:
        return None
    proximal = d.sums.mean("proximal")
    return {"zeros": zeros, "doubted": doubted, "count": count, "limit": DOUBTED, "proximal": proximal}


def tool_tokens(d: Diagnosis) -> Figures | None:
    """Finds response tokens whose log-prob was filled in with 0: such zeros stand in runs, which sampling
    does not make, or alone but often, with hardly any log-probs that are nearly 0."""
    filled, padded, sure = (d.statistics.counts[name] for name in ("filled", "padded", "sure"))
    tokens = d.sums["tokens"]
    stand_in_runs = padded >= max(FILLED_TOKENS, FILLED_SHARE * tokens)
    stand_alone = filled >= max(FILLED_TOKENS, ALONE_SHARE * tokens, EXACT_SHARE * (filled + sure))
    return {"filled": filled, "tokens": tokens} if stand_in_runs or stand_alone else None
