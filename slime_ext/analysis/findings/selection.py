"""Who is dropped between sampling and training."""

from __future__ import annotations

import math

from slime_ext.analysis.detector_statistics import ABOUT
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, share

FEWEST_DROPPED, FEWEST_KEPT = 10, 30  # samples
SURE = 5.0  # standard errors between the groups
Sums = list[float]  # how many numbers are known, their sum, their sum of squares
# What a sample's status says of why it was dropped.
WHY = {"truncated": "cut at the length limit", "completed": "complete", "": "of unknown status"}


def _dropped(d: Diagnosis) -> str:
    kept, dropped = d.statistics.fates[:, 0, 0].tolist()
    if min(kept - FEWEST_KEPT, dropped - FEWEST_DROPPED) >= 0:
        return ""
    return (
        f"{FEWEST_DROPPED} samples of a rollout dump that the train dump lacks or masks, with their rewards"
    )


@detector(
    "warning",
    needs=_dropped,
    threshold=f"{SURE:g} standard errors between dropped and kept, in length, reward or age",
    ruled_out=(
        "Chance: samples that are dropped at random differ by less. A dump that is missing: its samples "
        "differ by their place, not by length, reward and age."
    ),
)
def selection_bias(d: Diagnosis) -> Detected | None:
    """Finds that dropped samples differ from those that are trained on in length, reward, place in the data
    or age of their weights, and what that does to the mean reward, from which advantages are counted."""
    kept, dropped = (dict(zip(ABOUT, group, strict=True)) for group in d.statistics.fates.tolist())
    known = [name for name in ABOUT if min(kept[name][0], dropped[name][0]) > 1]
    apart = {name: _apart(kept[name], dropped[name]) for name in known}
    worst = max(known, key=lambda name: abs(apart[name]))
    if max(abs(apart[name]) for name in known if name != "position") < SURE:  # a file that is missing
        return None
    (n, gain, _), (m, *_) = kept["reward"], dropped["reward"]
    mean, spread = _mean_and_spread([x + y for x, y in zip(kept["reward"], dropped["reward"], strict=True)])
    moved = gain / n - mean
    said = ", ".join(
        f"{name} {dropped[name][1] / dropped[name][0]:.3g} against {kept[name][1] / kept[name][0]:.3g}"
        for name in known
    )
    drops = d.statistics.drops.items()
    reasons = [(count, WHY.get(status, status)) for status, count in drops if count]
    return Detected(
        title=f"Samples are dropped by their {worst}: what is trained on is not what was sampled.",
        evidence=(
            f"{share(m, n + m)} of the samples are dropped ({said}; {abs(apart[worst]):.0f} standard "
            f"errors): {', '.join(f'{count} {why}' for count, why in reasons)}. The mean reward of the "
            f"others is {moved:+.3g} from that of all: {moved / spread if spread else 0:+.2g} of an "
            "advantage of one standard deviation."
        ),
        fix=(
            "Slow and hard answers are the ones that a time limit, a limit of age or length, or a "
            "rejection drops. Pace sampling instead of dropping, drop whole groups, count the advantage "
            "over all samples of the group, or give the dropped a reward."
        ),
    )


def _mean_and_spread(sums: Sums) -> tuple[float, float]:
    count, total, square = sums
    return total / count, math.sqrt(max(square / count - (total / count) ** 2, 0))


def _apart(kept: Sums, dropped: Sums) -> float:
    """Welch's t between dropped and kept samples."""
    (one, spread), (other, width) = _mean_and_spread(dropped), _mean_and_spread(kept)
    error = math.hypot(spread / math.sqrt(dropped[0]), width / math.sqrt(kept[0]))
    if not error:
        return math.copysign(math.inf, one - other) if one != other else 0.0
    return (one - other) / error


DETECTORS = (selection_bias,)
