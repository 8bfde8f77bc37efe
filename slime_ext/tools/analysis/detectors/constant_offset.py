"""The finding ``constant_offset``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, explained_by_rest
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=("positive_log_probs", "retokenised", "off_by_one", "greedy_sampling"),
    what="the log-probs of one side are off by the same number of nats at every token",
    asks="300 tokens",
    title="""
        The {{ "trainer's" if offset < 0 else "sampler's" }} log-probs are {{ offset | abs | nats }} too low
        at every token, or the other side's too high.
    """,
    evidence="""
        The log-ratio is {{ "%+.4g" | format(offset) }} nats at every token. Without it,
        k3 would be {{ rest | nats }}. {%- if ranks %} The offset is log {{ ranks }}.{% endif %}
    """,
    threshold="""
        one value of l leaves less than 2% of k3, and 0.02 nats; it is 0.05 nats or more; below 0, l spreads
        at most 3 times as far above its median as below
    """,
    ruled_out="""
        A grammar, top-p, top-k or a temperature, because their log-ratios depend on the token, and those
        of top-p spread only above log top_p. Old weights and noise, because then the
        probabilities of both sides would sum to 1.
    """,
    fix="""
        Look at the normaliser of one side: a log-sum-exp to which the logarithm of a number of ranks is
        added, or the sum of which runs over some vocabulary shards twice. Sum exp(log-prob) over the whole
        vocabulary at one position on each side; one of the sums is not 1.
    """,
)
FEWEST, MATTERS = 300, 0.05  # tokens; nats of the offset
LEFT, MOST_LEFT = 0.02, 0.02  # share of k3 that one value leaves; nats of k3
# Noise spreads l to both sides. Top-p keeps at least top_p, so l ends at log top_p and spreads above it only.
# The quantiles are rounded by one bin each, 0.4% of l.
EDGE, BINS_WIDE = 3.0, 0.008
EXACT, RANKS = 0.01, 1024  # nats between the offset and the logarithm of a number of ranks; most of them


def look(d: Diagnosis) -> Figures | None:
    """Finds one value of l that explains the whole distance.

    The value that fits best is the log of the mean ratio. Of policies that are both normalised it is about 0.
    """
    need_tokens(d, FEWEST)
    count, log_ratio, k3 = d.of(Ends).total[VALUES].tolist()
    if not count or not k3:
        return None
    mean = log_ratio / count
    offset = math.log(max(k3 / count + 1 + mean, 1e-30))
    rest = offset - mean
    if abs(offset) < MATTERS or rest > min(LEFT * k3 / count, MOST_LEFT):
        return None
    low, middle, high = d.sums.histogram.quantiles(0.01, 0.5, 0.99)
    if offset < 0 and high - middle > EDGE * (middle - low) + BINS_WIDE * abs(offset):
        return None
    ranks = round(math.exp(abs(offset)))
    is_of_ranks = 2 <= ranks <= RANKS and abs(math.log(ranks) - abs(offset)) < EXACT
    return {
        "offset": offset,
        "rest": rest,
        "ranks": ranks if is_of_ranks else None,
        "explains": explained_by_rest(d, k3, max(rest, 0.0) * count),
    }
