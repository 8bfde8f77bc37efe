"""The finding ``reward_collapse``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import RolloutSummary

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="the reward fell at some rollout and stayed down; the finding names what moved first",
    asks="8 rollouts with rewards",
    title="The reward collapsed at rollout {{ begin }}.",
    evidence="""
        The mean reward is {{ "%.3g" | format(before) }} over the three rollouts before, and {{ "%.3g"
        | format(after) }} since then ({{ "%.0f" | format([z, 999] | min) }} standard errors). {%- if
        moved %} The first to move was the {{ moved[0] }}, from {{ "%.3g" | format(moved[2]) }} to {{ "%.3g" |
        format(moved[3]) }} at rollout {{ moved[1] }}. {%- else %} Neither the log-ratios, the
        sampler's log-probs nor the length of responses moved before.{% endif %}
    """,
    threshold="""
        40% of the level before and 60% of the run's range of rewards are lost, by 4 standard errors,
        and never regained
    """,
    ruled_out="Noise between rollouts, because the standard errors include it.",
    fix="""
        {% if moved and moved[0] == "mean |log-ratio|" -%} The policies moved apart first: read the
        other findings, and look at the rollouts around {{ moved[1] }}. {%- elif moved -%} Read
        responses of rollout {{ moved[1] }} and before. If a policy becomes certain or long before it
        loses its reward, the cause is the optimizer (learning rate, KL, entropy) or the reward, not
        the sampler. {%- else -%} Check what changed at rollout {{ begin }}: the prompts, the reward
        function or its service, a restart. {%- endif %}
    """,
)

FEWEST = 8  # rollouts
BEFORE, AFTER = 3, 2  # rollouts on each side of the fall
SURE = 4.0  # standard errors
LOST, MOST = 0.4, 0.6  # share of the level before; share of the run's range of rewards
LARGEST = 1e100  # reward whose square does not overflow
MOVES, MATTERS = 6.0, 0.3  # mean absolute deviations from the median before; share of that median
MEASURES: dict[str, Callable[[RolloutSummary], float]] = {
    "mean |log-ratio|": lambda s: s.absolute,
    "mean -log-prob of the sampler": lambda s: s.surprise,
    "mean response length": lambda s: s.length,
}


class Fall(NamedTuple):
    """Mean rewards before and since an onset, and the number of standard errors between them."""

    onset: int
    before: float
    after: float
    z: float


def look(d: Diagnosis) -> Figures | None:
    """Finds the rollout at which the reward fell for good, and what moved first."""
    rollouts = [s for s in d.rollouts if s.reward is not None and abs(s.reward) < LARGEST]
    need(len(rollouts) >= FEWEST, f"{FEWEST} rollouts with rewards")
    falls = [_fall(rollouts, onset) for onset in range(BEFORE, len(rollouts) - AFTER + 1)]
    best = max((fall for fall in falls if fall), key=lambda fall: fall.z, default=None)
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
    """Returns the fall of the reward at an onset; None if it is no collapse."""
    rewards = [s.reward for s in rollouts if s.reward is not None]
    just_before, since = rewards[onset - BEFORE : onset], rewards[onset:]
    before, after = fmean(just_before), fmean(since)
    fall = before - after
    spread = max(abs(reward - before) for reward in just_before)
    error = math.hypot(spread, *(s.reward_error for s in rollouts[onset - BEFORE : onset])) / math.sqrt(
        BEFORE
    )
    error = math.hypot(error, math.hypot(*(s.reward_error for s in rollouts[onset:])) / len(since))
    if fall < max(LOST * abs(before), MOST * (max(rewards) - min(rewards)), SURE * error) or not fall:
        return None
    if max(since) > after + fall / 2:  # the reward came back
        return None
    return Fall(onset, before, after, fall / error if error else math.inf)


def _moved_first(rollouts: Sequence[RolloutSummary], onset: int) -> tuple[str, int, float, float] | None:
    """Returns the measure that moved first, up to the fall, and stayed away; None if none did.

    The result is its name, the rollout, its median before, and its value at the rollout.
    """
    moves = []
    for name, measure in MEASURES.items():
        values = [measure(s) for s in rollouts]
        for at in range(BEFORE, onset + 1):
            usual = median(values[:at])
            noise = fmean(abs(v - usual) for v in values[:at])
            least = max(MOVES * noise, MATTERS * abs(usual))
            if all(abs(v - usual) > least for v in values[at : onset + 1]):
                moves.append((at, name, usual, values[at]))
                break
    if not moves:
        return None
    at, name, usual, value = min(moves)
    return name, rollouts[at].rollout_id, usual, value
