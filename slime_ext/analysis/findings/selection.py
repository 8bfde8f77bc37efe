"""Who is dropped between sampling and training."""

from __future__ import annotations

import math

from slime_ext.analysis.detector_statistics import ABOUT
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, share

FEWEST_DROPPED, FEWEST_KEPT = 10, 30  # samples
SURE = 5.0  # standard errors between the groups


def _dropped(d: Diagnosis) -> str:
    kept, dropped = d.statistics.fates[:, 0].tolist()
    if min(kept - FEWEST_KEPT, dropped - FEWEST_DROPPED) >= 0:
        return ""
    return (
        f"{FEWEST_DROPPED} samples of a rollout dump that the train dump lacks or masks, with their rewards"
    )


@detector(
    "warning",
    needs=_dropped,
    threshold=f"{SURE:g} standard errors between dropped and kept, in length or reward",
    ruled_out=(
        "Chance: samples that are dropped at random differ by less. A dump that is missing: its samples "
        "differ by their place, not by length and reward."
    ),
)
def selection_bias(d: Diagnosis) -> Detected | None:
    """Finds that dropped samples differ from those that are trained on in length, reward or place in the
    data, and what that does to the mean reward, from which advantages are counted."""
    kept, dropped = (dict(zip(ABOUT, row, strict=True)) for row in d.statistics.fates.tolist())
    names = ("length", "reward", "position")
    apart = {name: _apart(kept, dropped, name) for name in names}
    worst = max(names, key=lambda name: abs(apart[name]))
    mean = (kept["reward"] + dropped["reward"]) / (kept["count"] + dropped["count"])
    square = (kept["reward2"] + dropped["reward2"]) / (kept["count"] + dropped["count"])
    moved, spread = kept["reward"] / kept["count"] - mean, math.sqrt(max(square - mean**2, 0))
    if max(abs(apart["length"]), abs(apart["reward"])) < SURE:  # by their place alone: a file that is missing
        return None
    said = ", ".join(
        f"{name} {dropped[name] / dropped['count']:.3g} against {kept[name] / kept['count']:.3g}"
        for name in names
    )
    return Detected(
        title=f"Samples are dropped by their {worst}: what is trained on is not what was sampled.",
        evidence=(
            f"{share(dropped['count'], kept['count'] + dropped['count'])} of the samples are dropped "
            f"({said}; {abs(apart[worst]):.0f} standard errors). The mean reward of the others is "
            f"{moved:+.3g} from that of all: {moved / spread if spread else 0:+.2g} of an advantage of one "
            "standard deviation."
        ),
        fix=(
            "Slow and hard answers are the ones that a time limit, a limit of age or length, or a "
            "rejection drops. Pace sampling instead of dropping, drop whole groups, count the advantage "
            "over all samples of the group, or give the dropped a reward."
        ),
    )


def _apart(kept: dict[str, float], dropped: dict[str, float], name: str) -> float:
    """Welch's t between dropped and kept samples."""
    means, errors = [], 0.0
    for group in (dropped, kept):
        n = group["count"]
        mean = group[name] / n
        means.append(mean)
        errors += max(group[f"{name}2"] / n - mean**2, 0) / n
    apart = means[0] - means[1]
    if not errors:
        return math.copysign(math.inf, apart) if apart else 0.0
    return apart / math.sqrt(errors)


DETECTORS = (selection_bias,)
