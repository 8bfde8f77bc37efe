"""The finding ``other_log_probs``."""

from __future__ import annotations

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds, whole_prompts
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "other_run"),
    what="some samples have the log-probs of another text: another sample's, or those of an attempt before",
    asks="samples of 12 tokens",
    title="""
        {{ count }} of {{ samples }} samples have the log-probs of another text: {% if swapped > count /
        2 %}another sample's.{% else %}of an attempt before, or of a sample that is not here. {%- endif
        %}
    """,
    evidence="""
        In these the sampler's log-probs do not follow the trainer's token by token (correlation below
        0.3; above 0.7 in {{ related }} others). {%- if swapped %} {{ swapped }} of them fit the tokens
        of another sample of their rollout. {%- else %} None of them fits the tokens of another sample
        of its rollout.{% endif %}
    """,
    threshold="""
        3 samples and 1.5% with a correlation below 0.3 and a mean |l| of 0.4 nats, while most are above
        0.7 and agree (k3 up to 5e-3 nats, or hardly any sample between both kinds)
    """,
    ruled_out="""
        Old or rounded weights: they change every sample a little, and likely tokens stay likely. Another
        prompt on one side: all samples of it are far off. A shift of the list (off_by_one): no place
        nearby fits.
    """,
    fix="""
        {%- if swapped > count / 2 %} Look for lists that are sorted or gathered apart from their tokens
        (asyncio results, a reorder by length, a zip of two lists). {%- else %} Look at retries: where a
        request is sent again, the log-probs must be those of the answer that is kept. Reset
        sample.rollout_log_probs before each attempt. {%- endif %} Append log-probs and tokens from one
        response of the engine, in one place.
    """,
)
AGAIN, MATTERS = 40, 0.01  # tokens of equal texts; nats by which the trainer's log-probs of these differ
EVEN = 0.01  # k3 of the least rollout over that of the largest
NOISY, LEVEL = 0.05, 3.0  # nats, median |l| that two bfloat16 engines stay below; of the least rollout's
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 of all other samples
WHOLLY = 0.8  # of the samples of far prompts that are unrelated where they have another text's log-probs
BETWEEN = 1.0  # samples of a correlation between, for each unrelated one
FEWEST, SHARE, MOST = 3, 0.015, 0.5  # samples; of all; unrelated for each related one


def look(d: Diagnosis) -> Figures | None:
    """Finds samples whose log-probs are unrelated to the trainer's beside samples whose are not."""
    found = d.statistics.samples
    need(found.unrelated + found.related >= FEWEST, "samples of 12 tokens with log-probs of both sides")
    every, between = found.correlated, found.correlated - found.unrelated - found.related
    if found.unrelated < max(FEWEST, SHARE * every) or found.unrelated > MOST * found.related:
        return None
    count, sampler, trainer, _ = d.statistics.shared.twice[1].tolist()
    if count >= AGAIN and trainer > max(MATTERS * count, sampler):  # one text, scored otherwise each time
        return None
    medians = [s.median for s in d.statistics.rollouts]
    if max(medians) > max(NOISY, LEVEL * min(medians)):  # the others do not agree in every rollout
        return None
    rollouts = [s.k3 for s in d.statistics.rollouts]
    is_uneven = min(rollouts) < EVEN * max(rollouts)  # other weights in a few rollouts look alike
    if is_uneven and 2 * found.swapped < found.unrelated:
        return None
    is_mixed = between > BETWEEN * found.unrelated + FEWEST
    others = found.sizes.sum(0)[1:] - found.far
    is_far = float(others[1]) > AGREES * float(others[0])  # so what moves these may move the unrelated ones
    if (is_mixed or (is_far and 2 * found.swapped < found.unrelated)) and two_kinds(d) is None:
        return None
    if older_are_far(d):
        return None
    prompts = whole_prompts(d)
    if prompts and found.unrelated < WHOLLY * prompts.kinds.far[0]:  # others of the same prompts are related
        return None
    return {
        "count": found.unrelated,
        "related": found.related,
        "samples": int(d.sums["sequences"]),
        "swapped": found.swapped,
    }
