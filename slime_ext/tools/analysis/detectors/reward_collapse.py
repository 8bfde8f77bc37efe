"""The finding ``reward_collapse``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.detector_statistics import RolloutSummary
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="the reward fell from one rollout on and stayed down; what moved first is named",
    asks="8 rollouts with rewards",
    title="The reward collapsed at rollout {{ begin }}.",
    evidence="""
        Mean reward {{ "%.3g" | format(before) }} over the three rollouts before, {{ "%.3g" |
        format(after) }} since then ({{ "%.0f" | format([z, 999] | min) }} standard errors). {%- if moved
        %} First moved {{ moved[0] }}: from {{ "%.3g" | format(moved[2]) }} to {{ "%.3g" |
        format(moved[3]) }} at rollout {{ moved[1] }}. {%- else %} Neither the log-ratios, the sampler's
        log-probs nor the length of responses moved before.{% endif %}
    """,
    threshold="""
        40% of the level before and 60% of the run's range of rewards lost, by 4 standard errors, never
        regained
    """,
    ruled_out="Noise between rollouts: it is counted in the standard errors.",
    fix="""
        {% if moved and moved[0] == "mean |log-ratio|" -%} The policies parted first: look at the other
        findings, and at the rollouts around {{ moved[1] }}. {%- elif moved -%} Look at responses of
        rollout {{ moved[1] }} and before: a policy that became certain or long before it lost its reward
        is one of the optimizer (learning rate, KL, entropy) or of the reward, not of the sampler. {%-
        else -%} Look at what changed at rollout {{ begin }}: the prompts, the reward function or its
        service, a restart. {%- endif %}
    """,
)

FEWEST = 8  # rollouts
BEFORE, AFTER = 3, 2  # rollouts on each side of the fall
SURE = 4.0  # standard errors
LOST, MOST = 0.4, 0.6  # of the level before; of the run's whole range of rewards
LARGEST = 1e100  # whose squares are numbers
MOVES, MATTERS = 6.0, 0.3  # mean absolute deviations from the median before; of that median
MEASURES: dict[str, Callable[[RolloutSummary], float]] = {
    "mean |log-ratio|": lambda s: s.absolute,
    "mean -log-prob of the sampler": lambda s: s.surprise,
    "mean response length": lambda s: s.length,
}


class Fall(NamedTuple):
    """Mean rewards before and since a rollout, and how many standard errors are between."""

    onset: int
    before: float
    after: float
    z: float


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout from which on the reward is below most of what it was and does not come back, and
    what left its course first."""
    rollouts = [s for s in d.statistics.rollouts if s.reward is not None and abs(s.reward) < LARGEST]
    need(len(rollouts) >= FEWEST, f"{FEWEST} rollouts with rewards")
    found = [_fall(rollouts, onset) for onset in range(BEFORE, len(rollouts) - AFTER + 1)]
    best = max((fall for fall in found if fall), key=lambda fall: fall.z, default=None)
    if best is None:
        return None
    since = rollouts[best.onset :]
    moved = _moved_first(rollouts, best.onset)
    return {
        **best._asdict(),
        "begin": since[0].rollout_id,
        "moved": moved,
        "rollouts": tuple(s.rollout_id for s in since),
    }


def _fall(rollouts: Sequence[RolloutSummary], onset: int) -> Fall | None:
    """What lies between the rewards just before a rollout and all since; None where it is no collapse."""
    rewards = [s.reward for s in rollouts]
    mine, since = rewards[onset - BEFORE : onset], rewards[onset:]
    before, after = fmean(mine), fmean(since)
    fall = before - after
    spread = max(abs(reward - before) for reward in mine)
    error = math.hypot(spread, *(s.error for s in rollouts[onset - BEFORE : onset])) / math.sqrt(BEFORE)
    error = math.hypot(error, math.hypot(*(s.error for s in rollouts[onset:])) / len(since))
    if fall < max(LOST * abs(before), MOST * (max(rewards) - min(rewards)), SURE * error) or not fall:
        return None
    if max(since) > after + fall / 2:  # it came back
        return None
    return Fall(onset, before, after, fall / error if error else math.inf)


def _moved_first(rollouts: Sequence[RolloutSummary], onset: int) -> tuple[str, int, float, float] | None:
    """The measure that left its course first, up to the fall, and stayed away: its name, the rollout, its
    median before, its value there."""
    found = []
    for name, measure in MEASURES.items():
        values = [measure(s) for s in rollouts]
        for at in range(BEFORE, onset + 1):
            usual = median(values[:at])
            noise = fmean(abs(v - usual) for v in values[:at])
            least = max(MOVES * noise, MATTERS * abs(usual))
            if all(abs(v - usual) > least for v in values[at : onset + 1]):
                found.append((at, name, usual, values[at]))
                break
    if not found:
        return None
    at, name, usual, value = min(found)
    return name, rollouts[at].rollout_id, usual, value
