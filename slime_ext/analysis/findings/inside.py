"""Where inside the model the two sides part: after which layer, at which position, in which experts."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from slime_ext.analysis.curves import BLOCK
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, factor, nats, share
from slime_ext.analysis.findings.log_probs import SPOILT
from slime_ext.analysis.findings.push import PUSHES
from slime_ext.analysis.findings.sampling import OTHER_POLICY
from slime_ext.analysis.findings.turns import prefix_mismatch

BEFORE = (*SPOILT, *OTHER_POLICY, prefix_mismatch)
ROUNDINGS = 16.0  # unit roundoffs of a layer's dtype, times the root of the number of layers
FEWEST = 100  # tokens of a block
STEP, FLAT, MATTERS, SURE = 1.5, 1.3, 5e-3, 8.0  # after over before; within before; nats; standard errors
APART_TOKENS, APART_TIMES, APART_HOLD = 30, 2.0, 0.2  # tokens, mean |l| over that of others, share of sum l^2
NOISY = 0.025  # nats; two engines in bfloat16 stay below


def _layers(d: Diagnosis) -> str:
    lacks = "layer outputs of both sides in layers/trainer and layers/sampler of the run's folder"
    return "" if d.layers else lacks


@detector(
    "error",
    after=(*BEFORE, *PUSHES),
    needs=_layers,
    threshold=(
        f"{ROUNDINGS:g} unit roundoffs of the coarser side's dtype, times the root of the number of layers "
        "so far"
    ),
    ruled_out="Rounding: it adds up as the root of the number of layers, in units of the dtype.",
)
def layer(d: Diagnosis) -> Detected | None:
    """Finds the first layer after which |trainer - sampler| / |trainer| is above what rounding makes."""
    for found in d.layers:
        limit = ROUNDINGS * found.roundoff * math.sqrt(found.layer + 1)
        if found.distance > limit:
            before = [other.distance for other in d.layers if other.layer < found.layer]
            clean = f"{before[-1]:.2g} after the layer before it" if before else "it is the first of the dump"
            return Detected(
                title=f"Layer {found.layer} is the first whose output differs.",
                evidence=(
                    f"Median relative distance {found.distance:.2g} after layer {found.layer}, {clean}; "
                    f"rounding would make {limit:.2g} at most."
                ),
                fix=(
                    f"Compare layer {found.layer} on both sides: its weights after a push, norm epsilon "
                    "and dtype, rotary settings, attention backend, quantisation of this layer. Layers "
                    "behind it only carry on."
                ),
            )
    return None


class _Step(NamedTuple):
    """A step of mean |l| at an absolute position: over the tokens before and after, in standard errors."""

    position: int
    before: float
    after: float
    z: float


def _blocks(d: Diagnosis) -> list[tuple[int, list[float]]]:
    table = d.curves.tables["block"].tolist()
    return [(i, row) for i, row in enumerate(table[:-1]) if row[0] >= FEWEST]


def _long_enough(d: Diagnosis) -> str:
    return "" if len(_blocks(d)) >= 4 else f"4 blocks of {BLOCK} positions with {FEWEST} tokens each"


def _steps(blocks: list[tuple[int, list[float]]]) -> list[_Step]:
    found = []
    sums = list(
        accumulate((row for _, row in blocks), lambda x, y: [p + q for p, q in zip(x, y, strict=True)])
    )
    for cut in range(2, len(blocks) - 1):
        n, a, s, *_ = sums[cut - 1]
        m, b, t, *_ = (whole - before for whole, before in zip(sums[-1], sums[cut - 1], strict=True))
        error = math.sqrt(max(s / n - (a / n) ** 2, 0) / n + max(t / m - (b / m) ** 2, 0) / m)
        found.append(_Step(blocks[cut][0] * BLOCK, a / n, b / m, (b / m - a / n) / error if error else 0.0))
    return found


@detector(
    "warning",
    after=(*BEFORE, *PUSHES, layer),
    needs=_long_enough,
    threshold=(
        f"mean |l| {STEP:g} times that before the position, by {SURE:g} standard errors, and level before it"
    ),
    ruled_out="",
)
def kv_precision(d: Diagnosis) -> Detected | None:
    """Finds an absolute position up to which the distance is level, and at which it steps up."""
    blocks = _blocks(d)
    best = max(_steps(blocks), key=lambda step: step.z, default=None)
    if best is None or best.z < SURE or best.after < max(STEP * best.before, best.before + MATTERS):
        return None
    means = {i * BLOCK: row[1] / row[0] for i, row in blocks}
    level = [mean for at, mean in means.items() if at < best.position]
    jump = means[best.position] / max(level[-1], 1e-12)
    if max(level) > FLAT * min(level) or jump < FLAT:
        return None
    return Detected(
        title=f"From absolute position {best.position} on the engine's attention is less precise.",
        evidence=(
            f"Mean |log-ratio| {nats(best.before)} at tokens before position {best.position} (prompt "
            f"included), {nats(best.after)} from there on ({factor(best.after / best.before)}, "
            f"{best.z:.0f} standard errors), to the {BLOCK} positions of a block."
        ),
        fix=(
            "A KV cache in fp8 whose kernel changes its block at this length (--kv-cache-dtype auto), a "
            "sliding window or rotary scaling that begins here, a prefix that another kernel wrote."
        ),
        ruled_out=(
            "Errors that add up along the response: before the position the blocks differ by no more than "
            f"a factor of {max(level) / min(level):.2f}, at it by {jump:.2f}."
        ),
    )


def _routes(d: Diagnosis) -> str:
    lacks = (
        "the experts of both sides: rollout_routed_experts (slime, miles: --use-rollout-routing-replay) "
        "and routed_experts in the train dump"
    )
    return "" if len(d.statistics.routes) else lacks


@detector(
    "warning",
    after=(*BEFORE, *PUSHES),
    needs=_routes,
    threshold=(
        f"{APART_TOKENS} tokens with other experts, {APART_TIMES:g} times as far off as the others, that "
        f"hold {share(APART_HOLD, 1)} of the squared log-ratio"
    ),
    ruled_out="",
)
def expert_routing(d: Diagnosis) -> Detected | None:
    """Finds that tokens for which the two sides chose other experts are a multiple as far off as the rest."""
    routes, experts = d.statistics.routes, d.statistics.experts
    (m, b, t, *_), (n, a, s, *_) = d.curves.tables["overlap"].tolist()
    if m < APART_TOKENS or not n or b / m < APART_TIMES * a / n or t < APART_HOLD * (s + t):
        return None
    overlap = (routes[:, 0] / routes[:, 1].clamp_min(1)).tolist()
    worst = min(range(len(overlap)), key=overlap.__getitem__)
    apart = experts[:, 1] / experts[:, 0].clamp_min(1)
    weights = (
        f" Tokens with the same experts are {nats(a / n)} off, too far for bfloat16: the experts' weights "
        "or their shares part too, and replaying ids alone will not mend it."
        if a / n >= NOISY
        else ""
    )
    return Detected(
        title=f"The two sides route tokens to other experts, most in layer {worst}.",
        evidence=(
            f"{share(m, n + m)} of the tokens have another expert in some layer: mean |log-ratio| "
            f"{nats(b / m)} there, {nats(a / n)} where all are the same. Overlap {share(min(overlap), 1)} "
            f"in layer {worst}, {share(sum(overlap) / len(overlap), 1)} over all; expert "
            f"{int(apart.argmax())} is missed most ({share(float(apart.max()), 1)} of its tokens).{weights}"
        ),
        fix=(
            "Replay the sampler's experts in the trainer (slime, miles: --use-rollout-routing-replay), "
            "compute the router in float32 on both sides (--moe-router-dtype fp32), or drop these tokens "
            "(icepop)."
        ),
        ruled_out=f"Noise of all tokens: where the experts agree the distance is {nats(a / n)}.",
    )


INSIDE = (layer, kv_precision, expert_routing)
