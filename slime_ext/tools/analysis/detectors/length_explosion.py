"""The finding ``length_explosion``."""

from __future__ import annotations

from statistics import fmean

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="responses become several times as long",
    asks="6 rollouts",
    title="Responses explode: they become {{ (late / early) | factor }} as long.",
    evidence="""
        Mean length {{ "%.0f" | format(early) }} tokens in the first third of the rollouts, {{ "%.0f" |
        format(late) }} in the last{% if cut %}; {{ cut | share(1) }} of the samples are cut at the
        limit there, {{ before | share(1) }} at first {%- endif %}.{% if rewarded %} The mean reward
        went from {{ "%.3g" | format(rewarded[0]) }} to {{ "%.3g" | format(rewarded[1]) }}.{% endif %}
    """,
    threshold="""
        2.5 times the length of the first third with half of the samples cut, or 4 times, rising in each
        third
    """,
    ruled_out="A harder batch of prompts: it does not raise every third of the run.",
    fix="""
        {%- if rewarded and rewarded[1] > rewarded[0] %} If the reward pays for it, nothing; raise the
        limit before samples are cut. {%- else %} Read a few of the longest: text that repeats itself is
        a policy that comes apart. Look at how the loss is averaged (per token or per sample), at a
        penalty for length, and at what cut samples are given as a reward. {%- endif %}
    """,
)
ROLLOUTS, TIMES = 6, 2.5
ALONE, CUT = 4.0, 0.5  # times, whatever is cut; share of the last third that is cut at the limit


def look(d: Diagnosis) -> Figures | None:
    """Finds a mean length that rises to a multiple over the run."""
    rollouts = [s for s in d.statistics.rollouts if s.length]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts")
    third = len(rollouts) // 3
    parts = rollouts[:third], rollouts[third:-third], rollouts[-third:]
    early, middle, late = (fmean(s.length for s in part) for part in parts)
    if late < TIMES * early or not early < middle < late:
        return None
    cut = fmean(s.truncated for s in parts[2])
    if late < ALONE * early and cut < CUT:
        return None
    rewards = [[s.reward for s in part if s.reward is not None] for part in (parts[0], parts[2])]
    return {
        "early": early,
        "late": late,
        "before": fmean(s.truncated for s in parts[0]),
        "cut": cut,
        "rewarded": [fmean(own) for own in rewards] if all(rewards) else None,
    }
