"""Where inside the model the two sides part: after which layer, at which position, in which experts."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from slime_ext.tools.analysis.findings.detector import Figures, need
from slime_ext.tools.analysis.measures.curves import BLOCK, beyond_certainty
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

ROUNDINGS = 16.0  # unit roundoffs of a layer's dtype, times the root of the number of layers
FEWEST = 100  # tokens of a block
STEP, FLAT, MATTERS, SURE = 1.5, 1.3, 5e-3, 8.0  # after over before; within before; nats; standard errors
EVENED = 1.3  # after over before, of tokens of which the sampler was as sure
APART_TOKENS, APART_TIMES, APART_HOLD = 30, 2.0, 0.2  # tokens, mean |l| over that of others, share of sum l^2
# nats between the two passes; share of the distance between trainer and sampler. The same batch gives 0.
TWICE_MATTERS, TWICE_SHARE = 1e-3, 0.2
NOISY = 0.025  # nats; two engines in bfloat16 stay below


def layer(d: Diagnosis) -> Figures | None:
    """Finds the first layer after which |trainer - sampler| / |trainer| is above what rounding makes."""
    need(d.layers, "layer outputs of both sides in layers/trainer and layers/sampler of the run's folder")
    before = None
    for found in d.layers:
        limit = ROUNDINGS * found.roundoff * math.sqrt(found.layer + 1)
        if found.distance > limit:
            return {"layer": found.layer, "distance": found.distance, "limit": limit, "before": before}
        before = found.distance
    return None


def batch_shape(d: Diagnosis) -> Figures | None:
    """Finds that the same weights score the same tokens otherwise in training than in the log-prob pass."""
    lacks = "the first call of policy_loss_debug/ in the run's folder (miles: --dump-details)"
    need(d.calls, lacks)
    (call,) = d.calls
    need(call.tokens >= FEWEST, f"{FEWEST} response tokens in the first call of policy_loss_debug/")
    is_apart = call.trained >= max(TWICE_MATTERS, TWICE_SHARE * call.sampled)
    return call._asdict() if is_apart else None


class _Step(NamedTuple):
    """A step of mean |l| at an absolute position: over the tokens before and after, in standard errors."""

    position: int
    before: float
    after: float
    z: float
    explained: float  # sum of squares that two means explain beyond one; below 0 for a step down


def _steps(positions: list[int], sums: Tensor) -> list[_Step]:
    """The step at the begin of each block but the first two and the last.

    Args:
        positions: of the blocks.
        sums: [blocks, COLUMNS] of their tokens.
    """
    found, until = [], sums.cumsum(0)
    for cut in range(2, len(positions) - 1):
        n, a, s, *_ = until[cut - 1].tolist()
        m, b, t, *_ = (until[-1] - until[cut - 1]).tolist()
        error = math.sqrt(max(s / n - (a / n) ** 2, 0) / n + max(t / m - (b / m) ** 2, 0) / m)
        rise = b / m - a / n
        explained = n * m / (n + m) * rise * abs(rise)
        found.append(_Step(positions[cut], a / n, b / m, rise / error if error else 0.0, explained))
    return found


def kv_precision(d: Diagnosis) -> Figures | None:
    """Finds an absolute position up to which the distance is level, and at which it steps up."""
    by_surprise = d.curves.by_surprise("block")[:-1]
    table = by_surprise.sum(1)
    blocks = (table[:, 0] >= FEWEST).nonzero()[:, 0]
    need(len(blocks) >= 4, f"4 blocks of {BLOCK} positions with {FEWEST} tokens each")
    positions, sums = (blocks * BLOCK).tolist(), table[blocks]
    best = max(_steps(positions, sums), key=lambda step: step.explained, default=None)
    if best is None or best.z < SURE or best.after < max(STEP * best.before, best.before + MATTERS):
        return None
    usual = by_surprise[blocks].sum(0)
    expected = by_surprise[blocks, :, 0] @ (usual[:, 1] / usual[:, 0].clamp_min(1))
    means = dict(zip(positions, (sums[:, 1] / expected.clamp_min(1e-30)).tolist(), strict=True))
    level = [mean for at, mean in means.items() if at < best.position]
    jump, spread = means[best.position] / max(level[-1], 1e-12), max(level) / max(min(level), 1e-12)
    if jump < FLAT * max(1.0, spread / FLAT):
        return None
    cut = best.position // BLOCK
    if beyond_certainty(by_surprise[cut:].sum(0), by_surprise[:cut].sum(0)) < EVENED:
        return None  # tokens that are less certain from there on
    return {**best._asdict(), "block": BLOCK, "jump": jump, "spread": spread}


def expert_routing(d: Diagnosis) -> Figures | None:
    """Finds that tokens for which the two sides chose other experts are a multiple as far off as the rest."""
    routes, experts = d.statistics.routes, d.statistics.experts
    lacks = (
        "the experts of both sides: rollout_routed_experts (slime, miles: --use-rollout-routing-replay) "
        "and routed_experts in the train dump"
    )
    need(len(routes), lacks)
    (m, b, t, *_), (n, a, s, *_) = d.curves.tables["overlap"].tolist()
    if m < APART_TOKENS or not n or b / m < APART_TIMES * a / n or t < APART_HOLD * (s + t):
        return None
    overlap = (routes[:, 0] / routes[:, 1].clamp_min(1)).tolist()
    missed = experts[:, 1] / experts[:, 0].clamp_min(1)
    return {
        "tokens": m,
        "of": n + m,
        "apart": b / m,
        "same": a / n,
        "is_noisy": a / n >= NOISY,
        "layer": min(range(len(overlap)), key=overlap.__getitem__),
        "lowest": min(overlap),
        "overlap": sum(overlap) / len(overlap),
        "expert": int(missed.argmax()),
        "missed": float(missed.max()),
    }
