"""The finding ``expert_routing``."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.experts import Routing
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import bins_of, tabulated, zeros


class SameExperts(Measure):
    """Number, sum |l|, sum l^2 and sum k3 of tokens with other experts, and with the same, [2, 4]."""

    version: ClassVar[int] = 2

    table: Tensor = field(default_factory=lambda: zeros(2, 4))

    def add(self, part: DumpedRollout) -> None:
        if part.overlap is not None:
            self.table += tabulated(bins_of(part.overlap.float(), 2), part.columns[[0, 1, 2, 5]], 2)


DETECTOR = Detector(
    severity="warning",
    side="honest",
    after=("spoilt", "other_policy", "prefixes", "pushes", "layer", "parts", "experts"),
    what="the sides route tokens to different experts",
    asks="both sides' experts",
    title="The two sides route tokens to different experts, most often in layer {{ layer }}.",
    evidence="""
        {{ tokens | share(of) }} of the tokens have another expert in some layer: their mean
        |log-ratio| is {{ apart | nats }}, and {{ same | nats }} where all experts are the same. The
        overlap is {{ lowest | share(1) }} in layer {{ layer }} and {{ overlap | share(1) }} over all
        layers. Expert {{ expert }} is missed most ({{ missed | share(1) }} of its tokens). {%- if
        is_noisy %} Where all are the same, {{ same | nats }} is too far for bfloat16, so the experts'
        weights or their shares differ, too.{% endif %}
    """,
    threshold="""
        30 tokens with other experts are 2 times as far off as the others, and hold 20% of the squared
        log-ratio
    """,
    ruled_out="Noise at all tokens, because where the experts agree the distance is {{ same | nats }}.",
    fix="""
        {% if is_noisy -%} Compare the router on both sides (weights, biases, scale of the shares, dtype:
        --moe-router-dtype fp32) and the experts' weights. To replay the sampler's experts alone
        (--use-rollout-routing-replay) will not help here. {%- else -%} Replay the sampler's experts in the
        trainer (slime, miles: --use-rollout-routing-replay), compute the router in float32 on both sides
        (--moe-router-dtype fp32), or drop these tokens (icepop). {%- endif %}
    """,
)

# Tokens; mean |l| over that of the others; share of sum l^2.
APART_TOKENS, APART_TIMES, APART_HOLD = 30, 2.0, 0.2
NOISY = 0.025  # nats; two engines in bfloat16 stay below


def look(d: Diagnosis) -> Figures | None:
    """Finds that tokens with different experts on both sides are much further off."""
    routes, experts = d.of(Routing).overlap, d.of(Routing).experts
    lacks = (
        "the experts of both sides: rollout_routed_experts (slime, miles: --use-rollout-routing-replay) "
        "and routed_experts in the train dump"
    )
    need(len(routes), lacks)
    (m, b, t, k3), (n, a, s, _) = d.of(SameExperts).table.tolist()
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
        "explains": explained_by_tokens(d, m, k3),
    }
