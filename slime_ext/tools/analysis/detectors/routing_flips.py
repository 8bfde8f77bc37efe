"""The finding ``routing_flips``."""

from __future__ import annotations

import math
from statistics import median

from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    after=(
        "spoilt",
        "other_policy",
        "prefixes",
        "pushes",
        "resumed_wrong_weights",
        "layer",
        "stale_weights",
        "stale_cache",
        "expert_routing",
    ),
    what="""
        a few tokens are far off and all others agree; the finding guesses at expert routing and says so
    """,
    asks="300 tokens",
    title="A few tokens are far off while all others agree: in a mixture of experts, routing that flips.",
    evidence="""
        1% of the tokens hold {{ held | share(1) }} of the squared log-ratio ({{ far | nats }} each, in
        the quadratic mean); the median token is off by {{ size | nats }}. Extremes {{ "%+.3g" |
        format(lowest) }} and {{ "%+.3g" | format(highest) }}.
    """,
    threshold="1% of the tokens hold 75% of the squared log-ratio, the median below 0.02 nats",
    ruled_out="""
        Noise of low precision is spread over all tokens. A guess: without both sides' experts in the dump
        nobody can tell a flip from another corrupted token.
    """,
    fix="""
        Replay the sampler's routing in the trainer (slime: --use-rollout-routing-replay), or take these
        tokens out (icepop, trm). A dense model has this from single corrupted positions: read the worst
        tokens.
    """,
)

FEWEST = 300  # tokens
FAR, QUIET = 0.5, 0.02  # nats, of flips: the size of the 1% of the tokens that hold FEW, the median of |l|


def look(d: Diagnosis) -> Figures | None:
    """Finds that 1% of the tokens hold nearly all of the squared log-ratio, while the others agree."""
    need_tokens(d, FEWEST)
    held, size = d.statistics.top_share, median(s.median for s in d.statistics.rollouts)
    far = math.sqrt((d.sums.mean("squared") or 0.0) * held / 0.01)
    if held < FEW or size > QUIET or far < FAR:
        return None
    return {
        "held": held,
        "far": far,
        "size": size,
        "lowest": d.sums.histogram.smallest,
        "highest": d.sums.histogram.largest,
    }
