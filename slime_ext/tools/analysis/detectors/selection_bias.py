"""The finding ``selection_bias``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import field

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

ABOUT = ("length", "reward", "position", "age")


class Selection(Measure):
    """Kept and dropped samples by ABOUT: number of known values, their sum, their sum of squares."""

    sums: Tensor = field(default_factory=lambda: zeros(2, len(ABOUT), 3))
    reasons: Counter[str] = field(default_factory=Counter)  # for a drop -> samples

    def close(self, rollout: DumpedRollout) -> None:
        if rollout.rewards is None or rollout.dropped is None:
            return
        lengths, positions = torch.tensor([rollout.lengths, rollout.positions], dtype=torch.float64)
        trained = torch.stack([lengths, rollout.rewards, positions, rollout.oldest_versions()], 1)
        dropped = rollout.dropped.clone()
        newest = torch.cat([trained, dropped])[:, 3].nan_to_num(-torch.inf).max()
        trained[:, 3], dropped[:, 3] = newest - trained[:, 3], newest - dropped[:, 3]
        is_rewarded = rollout.rewards.isfinite()
        is_trained = rollout.responding & is_rewarded
        masked = trained[is_rewarded & ~is_trained]
        self.sums += torch.stack([_about(trained[is_trained]), _about(torch.cat([masked, dropped]))])
        self.reasons.update(rollout.why_dropped)
        self.reasons["masked out in the train dump"] += len(masked)


def _about(rows: Tensor) -> Tensor:
    """Returns number, sum and sum of squares of the known values in rows [D, 4], [4, 3]."""
    known = rows.isfinite()
    rows = torch.where(known, rows, 0)
    return torch.stack([known.sum(0), rows.sum(0), rows.square().sum(0)], 1)


DETECTOR = Detector(
    severity="warning",
    after=("tool_tokens",),  # a wrong mask can hide whole samples
    explains=False,
    what="""
        samples are dropped by their length, reward, age or place in the data, which moves the mean
        advantage
    """,
    asks="dropped samples",
    title="Samples are dropped by their {{ worst }}, so the trained samples are not like the sampled ones.",
    evidence="""
        {{ dropped | share(samples) }} of the samples are dropped ({% for name, (theirs, ours) in
        means.items() -%} {{ name }} {{ "%.3g" | format(theirs) }} against {{ "%.3g" | format(ours)
        }}{{ ", " if not loop.last }} {%- endfor %}; {{ "%.0f" | format(z | abs) }} standard errors):
        {{ reasons | join(", ") }}. The mean reward of the kept samples differs from that of all by {{
        "%+.3g" | format(moved) }}, or {{ "%+.2g" | format(advantage) }} standard deviations.
    """,
    threshold="dropped and kept samples differ by 5 standard errors in length, reward or age",
    ruled_out="""
        Chance, because samples that are dropped at random differ by less. A missing dump, because its
        samples differ by their place in the data, not by length, reward or age.
    """,
    fix="""
        A time limit, a limit of age or length, or a rejection drops slow and hard answers most. Pace
        sampling instead of dropping, drop whole groups, compute the advantage over all samples of the
        group, or give dropped samples a reward.
    """,
)

FEWEST_DROPPED, FEWEST_KEPT = 10, 30  # samples
SURE = 5.0  # standard errors between dropped and kept samples
Sums = list[float]  # number of known values, their sum, their sum of squares
# The reason for which a sample was dropped, by its status.
WHY = {"truncated": "cut at the length limit", "completed": "complete", "": "of unknown status"}


def look(d: Diagnosis) -> Figures | None:
    """Finds that dropped samples differ from trained ones, and how much that moves the mean reward."""
    selection = d.of(Selection)
    kept, dropped = (dict(zip(ABOUT, group, strict=True)) for group in selection.sums.tolist())
    n, m = kept["length"][0], dropped["length"][0]
    what = "samples of a rollout dump that the train dump lacks or masks, with their rewards"
    need(n >= FEWEST_KEPT and m >= FEWEST_DROPPED, f"{FEWEST_DROPPED} {what}")
    known = [name for name in ABOUT if min(kept[name][0], dropped[name][0]) > 1]
    apart = {name: _apart(kept[name], dropped[name]) for name in known}
    worst = max(known, key=lambda name: abs(apart[name]))
    if max(abs(apart[name]) for name in known if name != "position") < SURE:  # only a file is missing
        return None
    (n, gain, _), (m, *_) = kept["reward"], dropped["reward"]
    mean, spread = _mean_and_spread([x + y for x, y in zip(kept["reward"], dropped["reward"], strict=True)])
    moved = gain / n - mean
    drops = selection.reasons.items()
    return {
        "worst": worst,
        "z": apart[worst],
        "dropped": m,
        "samples": n + m,
        "means": {x: (dropped[x][1] / dropped[x][0], kept[x][1] / kept[x][0]) for x in known},
        "reasons": [f"{count} {WHY.get(status, status)}" for status, count in drops if count],
        "moved": moved,
        "advantage": moved / spread if spread else 0,
    }


def _mean_and_spread(sums: Sums) -> tuple[float, float]:
    count, total, square = sums
    mean = total / count
    return mean, math.sqrt(max(square / count - mean * mean, 0))


def _apart(kept: Sums, dropped: Sums) -> float:
    (mean_dropped, spread_dropped), (mean_kept, spread_kept) = (
        _mean_and_spread(dropped),
        _mean_and_spread(kept),
    )
    error = math.hypot(spread_dropped / math.sqrt(dropped[0]), spread_kept / math.sqrt(kept[0]))
    if not error:
        return math.copysign(math.inf, mean_dropped - mean_kept) if mean_dropped != mean_kept else 0.0
    return (mean_dropped - mean_kept) / error
