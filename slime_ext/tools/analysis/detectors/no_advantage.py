"""The finding ``no_advantage``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="all advantages of a rollout are 0",
    asks="advantages, rewards, groups",
    title="""
        In {{ count }} of {{ every }} rollouts all advantages are 0: nothing is learnt from them.
    """,
    evidence="""
        {%- if wrong %} In {{ wrong }} of them samples of one prompt have different rewards, from which
        advantages should follow.{% endif %} {%- if flat %} In {{ flat }} of them all samples of each
        prompt have one reward, which leaves nothing to compare. {%- endif %}
    """,
    threshold="a rollout without an advantage; where rewards do not differ, 3 and half of the rollouts",
    ruled_out="A rejection that masks tokens: advantages are looked at before any correction.",
    fix="""
        {%- if wrong %} Look at what turns rewards into advantages: the key of the reward
        (--reward-key), a custom post-process of rewards, a group size (--n-samples-per-prompt) of 1.
        {%- else %} Drop such prompts while sampling (slime: --dynamic-sampling-filter-path
        slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std), take harder or
        easier prompts, or look whether the reward function gives one value. {%- endif %}
    """,
)
HALF, FEWEST = 0.5, 3  # share of the rollouts; rollouts


def look(d: Diagnosis) -> Figures | None:
    """Finds rollouts without an advantage."""
    found = d.statistics.estimators
    every = len(d.timeline)
    need(sum(map(len, vars(found).values())), "advantages, rewards and groups of the samples")
    wrong, flat = len(found.zero), len(found.flat)
    if not wrong and flat < max(FEWEST, HALF * every):
        return None
    ids = tuple(sorted(found.zero + found.flat))
    severity = "error" if wrong else "warning" if flat == every else "note"
    return {
        "count": wrong + flat,
        "every": every,
        "wrong": wrong,
        "flat": flat,
        "rollouts": ids,
        "severity": severity,
    }
