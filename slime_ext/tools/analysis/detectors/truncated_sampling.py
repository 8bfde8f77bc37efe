"""The finding ``truncated_sampling``."""

from __future__ import annotations

import math
from typing import ClassVar

from slime_ext.tools.analysis.detectors.shared.bends import same_text_factor
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_masses, is_not_renormalised
from slime_ext.tools.analysis.detectors.shared.sampling import FEWEST, SMALL, SURE, is_scaled
from slime_ext.tools.analysis.detectors.shared.signs import Signs
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import top_share
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true, is_above, is_below

EXACT = 1e-4  # nats; rounding moves equal log-probs by less


class Sides(Measure):
    """Numbers of tokens with a log-ratio above EXACT, and below -EXACT."""

    takes_joined: ClassVar[bool] = True

    above: int = 0
    below: int = 0

    def add(self, part: DumpedRollout) -> None:
        self.above += count_true(is_above(part.log_ratio, EXACT))
        self.below += count_true(is_below(part.log_ratio, -EXACT))


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="other_policy",
    after=("spoilt", "kept_mass", "penalties", "minimum_length", "soft_cap"),
    what="top-p or top-k renormalised the engine's log-probs",
    asks="300 tokens",
    title="""
        {%- if or_else is defined %} The trainer's probabilities of sampled tokens are too small, as if
        both sides normalised over different sets of tokens. {%- elif is_even %} The sampler's log-probs
        are renormalised to the tokens that top-p or top-k kept. {%- else %} The two sides normalise over
        different sets of tokens, so the trainer's probabilities of sampled tokens are too small. {%-
        endif %}
    """,
    evidence="""
        {{ below | share(count) }} of the tokens are less likely for the trainer than for the sampler,
        {{ above | share(count) }} are likelier. The mean ratio is {{ "%.4f" | format(ratio) }} ± {{
        "%.1g" | format(error) }} instead of 1. {% if factor %}After the same text, the trainer's
        differences of log-probs are {{ "%.3g" | format(factor) }} times the sampler's, but top-p and top-k
        leave them as they are. {%- elif sure is not none %}The mean log-ratio is {{ sure |
        nats }} where the sampler is sure of a token, which a kept set leaves nearly as likely. {%- else %}It
        is the probability mass that {% if is_even %}was sampled
        from{% else %}the trainer leaves to the sampler's tokens, more where it is sure{% endif %}. {%- endif
        %}{% if is_more %} That alone would make a mean log-ratio of {{ expected | nats }}, but
        it is {{ mean | nats }}: the mass varies, or the temperatures differ, too. Compare them as
        well (--rollout-temperature, sampling_params).{% endif %}
    """,
    threshold="""
        a mean ratio below 1 by 6 standard errors, with a mean log-ratio that fits it; far log-ratios are
        alike or scaled by one factor after the same text; log-ratios are
        even over the tokens, or 2.5 times as many are below 0 as above and those hold 80% of |l|, or at most
        a tenth of the far ones is above 0
    """,
    ruled_out="""
        Other weights, because the mean ratio over sampled tokens is 1 whatever the trainer's weights
        are.
    """,
    remedy="sample with --rollout-top-p 1 --rollout-top-k -1 and without min-p",
    fix="""
        Sample with --rollout-top-p 1 --rollout-top-k -1, or replay the sampling mask in the trainer
        (slime: rollout_top_p_token_ids). Min-p looks the same, and so does a minimum length
        (min_new_tokens) that no response exceeds. If all of these are off already, check the
        trainer's log-softmax, because rows that only pad the vocabulary must not count
        (verl-project/verl#2656).
    """,
)

EVEN = 0.3  # largest share of l^2 in 1% of the tokens, under top-p
# From here on l has one sign, although the missing mass depends on the context: -mean l over mean |l|; tokens
# below 0 over tokens above.
LEANS, SIGNS = 0.8, 2.5
# Share of the far tokens that may be above 0, within standard errors of their number: noise of bfloat16 has
# both signs at near tokens, whatever mass is missing at others.
ABOVE, CERTAIN = 0.1, 3.0
# Mean l over log m. Beyond ALONE, something else is wrong, too, such as the temperature. Beyond WHOLLY,
# ratios are so spread that their mean is below 1 only because large ones are rare.
ALONE, WHOLLY = 1.1, 2.0
SURE_BINS, TOKENS = 6, 50  # bins of -log behavior up to 0.01 nats; least tokens in them
KEPT = Untold(
    "which tokens sampling kept",
    "record the kept sets, or sample a rollout with --rollout-top-p 1 --rollout-top-k -1",
)
SUMMED = Untold(
    "whether the trainer's probabilities sum to 1",
    "sum them over the vocabulary at one position (if they sum to less, its log-probs are changed after the "
    "softmax, as by label smoothing; if to 1, top-p or top-k is used beside another temperature)",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean ratio significantly below 1, and a mean log-ratio that fits it.

    Both follow if probabilities are renormalised to a part of the vocabulary.
    """
    need_tokens(d, FEWEST)
    mean, size = d.sums.mean_log_ratio or 0.0, d.sums.mean_absolute or 0.0
    above_1, sides = d.means.ratio_minus_one, d.of(Sides)
    below, above = d.of(Signs).far[:, 0].tolist()
    is_one_sided = -mean >= LEANS * size and sides.below >= SIGNS * sides.above
    is_far_one_sided = above + CERTAIN * math.sqrt(above + 1) <= ABOVE * below
    is_even = top_share(d.rollouts) <= EVEN
    is_mass = is_even or is_one_sided or is_far_one_sided
    if mean > -SMALL or above_1.z > -SURE or above_1.value <= -1 or not is_mass:
        return None  # a mean ratio of 0 is no truncation, which always leaves some mass
    expected = math.log1p(above_1.value)
    if mean < WHOLLY * expected:
        return None
    is_more = mean <= ALONE * expected
    names, factor = {}, same_text_factor(d)
    if is_more and is_scaled(d):
        names["temperature"] = KEPT
    sure = None if factor else _below_where_sure(d)
    if factor or sure is not None:
        names["scaled_log_probs"] = SUMMED
    others: Figures = {"or_else": tuple(names), "untold": tuple(names.values())} if names else {}
    if not names and is_not_renormalised(d):
        return None
    if not (is_even or is_one_sided):  # few tokens have less mass, so a list may have left out their rivals
        others = {"or_else": ("constrained_decoding",), "untold": (KEPT,)}
    return {
        **others,
        "below": sides.below,
        "above": sides.above,
        "count": d.sums.finite,
        "ratio": 1 + above_1.value,
        "error": above_1.error,
        "is_more": is_more and is_even,
        "is_even": is_even,
        "mean": mean,
        "factor": factor,
        "sure": sure,
        "is_proven": True,  # no policy brings the mean ratio below 1
        "explains": explained_by_masses(d, d.of(BySurprise).sums[:, VALUES]),
        "expected": expected,
    }


def _below_where_sure(d: Diagnosis) -> float | None:
    """Returns mean l of tokens of which the sampler is sure, if it is at least as far below 0 as elsewhere.

    A kept set has the most mass where one token has nearly all of it. Labels that are smoothed over the
    vocabulary take the most there, because all other tokens are least likely.
    """
    count, log_ratio = d.of(BySurprise).sums[:SURE_BINS, :2].sum(0).tolist()
    is_enough = count >= TOKENS and log_ratio <= count * (d.sums.mean_log_ratio or 0.0)
    return log_ratio / count if is_enough else None
