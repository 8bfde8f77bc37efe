"""The finding ``no_advantage``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.estimators import Estimators
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="all advantages of a rollout are 0",
    asks="advantages, rewards, groups",
    title="In {{ count }} of {{ every }} rollouts all advantages are 0, so nothing is learnt from them.",
    evidence="""
        {%- if wrong %} In {{ wrong }} of them, samples of one prompt have different rewards, so
        advantages should not be 0.{% endif %} {%- if flat %} In {{ flat }} of them, all samples of
        each prompt have the same reward, so there is nothing to compare. {%- endif %}
    """,
    threshold="one such rollout; if rewards do not differ, 3 rollouts and half of all",
    ruled_out="A rejection that masks tokens, because advantages are compared before any correction.",
    fix="""
        {%- if wrong %} Check what turns rewards into advantages: the key of the reward
        (--reward-key), custom post-processing of rewards, a group size (--n-samples-per-prompt) of 1.
        {%- else %} Drop such prompts while sampling (slime: --dynamic-sampling-filter-path
        slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std), use harder or
        easier prompts, or check whether the reward function always gives the same value. {%- endif %}
    """,
)
HALF, FEWEST = 0.5, 3  # share of the rollouts; rollouts
SAMPLES = 100  # with fewer, all prompts may have one reward by chance


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which all advantages are 0."""
    estimators = d.of(Estimators)
    every = len(d.timeline)
    need(sum(map(len, vars(estimators).values())), "advantages, rewards and groups of the samples")
    wrong, flat = len(estimators.zero), len(estimators.flat)
    if not wrong and flat < max(FEWEST, HALF * every):
        return None
    ids = tuple(sorted(estimators.zero + estimators.flat))
    is_much = flat == every and d.sums.sequences >= SAMPLES
    severity = "error" if wrong else "warning" if is_much else "note"
    return {
        "count": wrong + flat,
        "every": every,
        "wrong": wrong,
        "flat": flat,
        "rollouts": ids,
        "severity": severity,
    }
