"""The finding ``another_policy``."""

from __future__ import annotations

import math
from statistics import fmean

from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.detector import (
    FEW,
    Detector,
    Figures,
    Untold,
    need,
    need_tokens,
)
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_noise
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.rounding import TOO_LOUD, stays
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary, mean_k3, top_share

DETECTOR = Detector(
    severity="warning",
    side="honest",
    after=(
        "spoilt",
        "kept_mass",
        "truncated_sampling",
        "before_temperature",
        "penalties",
        "temperature",
        "soft_cap",
        "unlike_entropy",
        "prefixes",
        "parts",
        "pushes",
        "experts",
        "minimum_length",
        "logit_bias",
        "layer",
        "shared_place",
        "prompt_cut",
        "kv_precision",
        "expert_routing",
        "routing_flips",
        "mixed_policies",
    ),
    what="""
        the sampler uses another policy than the trainer trains: a teacher, base weights, another
        checkpoint
    """,
    asks="weight versions that are not numbers",
    title="""
        {% if or_else is defined %}The policies are far apart{% else %}The sampler uses another policy
        than the trainer trains{% endif %} {%- if grows %}: it is far off from the first rollout on, and
        the trainer moves away from it. {%- elif unnumbered %}: no rollout has the weight version of a
        push. {%- else %}: it is further off than rounding makes, from rollout 0 on. {%- endif %}
    """,
    evidence="""
        k3 {{ k3 | nats }} in the first rollouts and {{ late | nats }} in the last; mean |log-ratio|
        {{ absolute | nats }}, mean log-ratio {{ "%+.2g" | format(mean) }}. {%- if unnumbered %} No
        weight version is a number (such as default).{% endif %}
    """,
    threshold="""
        k3 above 5e-3 nats in every rollout; either no version is a number, or k3 begins above 0.02
        nats and rises by 50% and by 3 standard errors of its logarithm, or mean |l| is above the 2.5 nats
        that rounding makes at most and stays within a factor of 1.5; 1% of the tokens hold less than 75% of
        l^2
    """,
    ruled_out="""
        A lag of weights, because rollout 0 has none. Rounded weights, because their distance does not
        grow.
    """,
    remedy="push the trainer's weights before the first rollout",
    fix="""
        If a teacher samples on purpose (distillation), nothing is wrong: correct with an importance
        ratio, and expect this distance. Otherwise push the weights before the first rollout, and
        compare a checksum on both sides.
    """,
)
FEWEST, MATTERS = 100, 5e-3
# k3 of the last third over that of the first third; nats in the first; standard errors.
GROWS, FAR, SURE = 1.5, 0.02, 3.0
CERTAIN = 3.0  # standard errors of the mean ratio above 1
UNTOLD_LAYERS = Untold(
    "whether its weights differ or its arithmetic",
    "compare a checksum on both sides, or record layer outputs (layers/trainer, layers/sampler)",
)
UNTOLD = Untold(
    "whether the sampler's weights are only rounded", "ask both sides for the log-probs of one text"
)


def look(d: Diagnosis) -> Figures | None:
    """Finds a sampler that is far off from rollout 0 on, or has no version number."""
    need_tokens(d, FEWEST)
    rollouts = [s for s in d.rollouts if s.tokens >= FEWEST]
    version_parts = [p for p in d.samples.parts if p.label == "weight version"]
    unnumbered = bool(version_parts) and all(p.value == "without a number" for p in version_parts)
    begins = bool(rollouts) and rollouts[0].rollout_id == 0
    need(unnumbered or begins, "rollout 0, or versions that are not numbers")
    if not rollouts or min(s.k3 for s in rollouts) < MATTERS or top_share(d.rollouts) >= FEW:
        return None
    third = max(len(rollouts) // 3, 1)
    grows = begins and _moves_away(rollouts) and two_kinds(d) is None
    grows = grows and not rather_than_rollouts(d)
    if not grows and not unnumbered and not _is_beyond_rounding(d):
        return None
    figures = {
        "k3": mean_k3(rollouts[:third]),
        "late": mean_k3(rollouts[-third:]),
        "grows": grows,
        "unnumbered": unnumbered,
        "absolute": d.sums.mean_absolute,
        "mean": d.sums.mean_log_ratio,
        "explains": explained_by_noise(d, d.rollouts),
    }
    if unnumbered and not grows:
        return figures | {"or_else": ("quantised",), "untold": (UNTOLD,)}
    return figures if grows or d.layers else figures | {"or_else": ("layer",), "untold": (UNTOLD_LAYERS,)}


def _is_beyond_rounding(d: Diagnosis) -> bool:
    """Returns whether the distance is larger than rounding makes, from rollout 0 on, in all samples.

    The sampler draws from a far policy then, so ratios above 1 are rare, and their mean is not above 1; text
    of other tokens is likelier for the trainer as often as not.
    """
    ratio = d.means.ratio_minus_one
    is_drawn = ratio.value <= CERTAIN * ratio.error
    is_loud = (d.sums.mean_absolute or 0.0) >= TOO_LOUD and d.rollouts[0].absolute >= TOO_LOUD
    return is_loud and is_drawn and stays(d) and two_kinds(d) is None


def _moves_away(rollouts: list[RolloutSummary]) -> bool:
    """Returns whether k3 of the last third of the rollouts is above that of the first, beyond its error."""
    third = max(len(rollouts) // 3, 1)
    (first, of_first), (last, of_last) = map(_mean_and_error, (rollouts[:third], rollouts[-third:]))
    error = math.hypot(of_first / first, of_last / last)  # of the logarithm of last over first
    is_known = len(rollouts) >= 3 and error > 0
    return is_known and first >= FAR and math.log(last / first) >= max(math.log(GROWS), SURE * error)


def _mean_and_error(rollouts: list[RolloutSummary]) -> tuple[float, float]:
    """Returns the mean over rollouts of their k3, and its standard error over samples."""
    errors = (s.k3_error * s.k3 for s in rollouts)
    return fmean(s.k3 for s in rollouts), math.hypot(*errors) / len(rollouts)
