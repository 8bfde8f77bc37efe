"""The finding ``another_policy``."""

from __future__ import annotations

import math
from statistics import fmean, median

from slime_ext.tools.analysis.detectors.shared.along import rather_than_rollouts
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_noise
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
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
    ),
    what="""
        the sampler uses another policy than the trainer trains: a teacher, base weights, another
        checkpoint
    """,
    asks="weight versions that are not numbers",
    title="""
        The sampler uses another policy than the trainer trains {%- if grows %}: it is far off from
        the first rollout on, and the trainer moves away from it. {%- else %}: no rollout has the
        weight version of a push.{% endif %}
    """,
    evidence="""
        k3 {{ k3 | nats }} in the first rollouts and {{ late | nats }} in the last; mean |log-ratio|
        {{ absolute | nats }}, mean log-ratio {{ "%+.2g" | format(mean) }}. {%- if unnumbered %} No
        weight version is a number (such as default).{% endif %}
    """,
    threshold="""
        k3 above 5e-3 nats in every rollout; either no version is a number, or k3 begins above 0.02
        nats and rises by 50%; 1% of the tokens hold less than 75% of l^2
    """,
    ruled_out="""
        A lag of weights, because rollout 0 has none. Rounded weights, because their distance does not
        grow.
    """,
    fix="""
        If a teacher samples on purpose (distillation), nothing is wrong: correct with an importance
        ratio, and expect this distance. Otherwise push the weights before the first rollout, and
        compare a checksum on both sides.
    """,
)
FEWEST, MATTERS = 100, 5e-3
# k3 of the last third over that of the first third; nats in the first; standard errors.
GROWS, FAR, SURE = 1.5, 0.02, 2.0
UNTOLD = (
    "whether the sampler's weights are only rounded; to decide, ask both sides for the log-probs of one text"
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
    first, last = (fmean(s.k3 for s in part) for part in (rollouts[:third], rollouts[-third:]))
    grows = begins and _moves_away(rollouts, first, last) and two_kinds(d) is None
    grows = grows and not rather_than_rollouts(d)
    if not grows and not unnumbered:
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
    return figures if grows else figures | {"or_else": ("quantised",), "untold": UNTOLD}


def _moves_away(rollouts: list[RolloutSummary], first: float, last: float) -> bool:
    """Returns whether k3 rises over the run, beyond sampling noise."""
    error = median(s.k3_error for s in rollouts)
    is_known = len(rollouts) >= 3 and error > 0
    return is_known and first >= FAR and last * math.exp(-SURE * error) >= first and last >= GROWS * first
