"""Finds the value of a label whose samples have most of the distance, within the same rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.explained import BFLOAT16_K3
from slime_ext.tools.analysis.measures.by_sample import Part
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

TIMES, SURE = 4.0, 4.0  # k3 over that of the others; standard errors
HOLDS = 0.6  # share of the excess of the run's k3 over that of the others
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 up to which samples are healthy
FEWEST = 4  # samples
VAGUE = 0.5  # relative standard error of k3 above which its logarithm is meaningless


class Mean(NamedTuple):
    """Mean k3 over tokens, and its standard error over samples."""

    samples: int
    tokens: int
    k3: float
    error: float

    @property
    def relative_error(self) -> float:
        return self.error / self.k3 if self.k3 else 0.0


class FarValue(NamedTuple):
    """A value of a label whose samples are far off."""

    label: str
    value: str
    far: Mean
    others: Mean
    rollouts: tuple[int, ...]
    held: float  # share of the run's sum of k3
    choices: float = 1.0  # number of sets of rollouts, for all values, of which this was chosen by its k3

    @property
    def z(self) -> float:
        """The number of standard errors between the logarithms of both k3; 0 if one is too uncertain.

        Rollouts and value were chosen because k3 is large there. A chance p of one choice is at most n p for
        the largest of n (union bound), which takes 2 log n off z^2.

        k3 is heavy-tailed, so its error grows with it: the difference of both k3 is hardly ever more than 3
        errors, however large their ratio is. The others may have the same tail without showing it yet, so
        their relative error is at least that of the far samples, scaled to their number of tokens. If hardly
        any token of the others is off, their logarithm is meaningless; they count as two correct engines.
        """
        unseen = self.far.relative_error * math.sqrt(self.far.tokens / self.others.tokens)
        near, of_near = max(self.others.k3, 1e-30), self.others.relative_error
        if of_near > VAGUE and near + SURE * self.others.error < BFLOAT16_K3:
            near, of_near = BFLOAT16_K3, 0.0
        errors = self.far.relative_error, max(of_near, unseen)
        if max(errors) > VAGUE or not self.far.k3:
            return 0.0
        error = math.hypot(*errors)
        z = math.log(self.far.k3 / near) / error if error else math.inf
        return math.copysign(math.sqrt(max(z * z - 2 * math.log(self.choices), 0.0)), z)


def mean_of(parts: Sequence[Part]) -> Mean:
    """Returns the mean k3 over some parts of a run."""
    n = sum(p.tokens for p in parts)
    if not n:
        return Mean(0, 0, 0.0, 0.0)
    mean = sum(p.k3 for p in parts) / n
    variance = sum(p.square - 2 * mean * p.cross + mean * mean * p.lengths for p in parts)
    return Mean(sum(p.samples for p in parts), n, mean, math.sqrt(max(variance, 0.0)) / n)


def far_value(d: Diagnosis, labels: Sequence[str]) -> FarValue | None:
    """Returns the label value whose samples hold most of the run's k3.

    The other samples of the same rollouts must be healthy. None if there is no such value.
    """
    by_label = d.samples.by_label()
    candidates = []
    for label in labels:
        rollouts = by_label.get(label, {})
        values = {p.value for parts in rollouts.values() for p in parts}
        whole = sum(p.k3 for parts in rollouts.values() for p in parts)
        for value in sorted(values) if len(values) > 1 else ():
            candidate = _of_value(label, value, rollouts, whole)
            if candidate is not None:
                candidates.append(candidate)
    return max(candidates, key=lambda candidate: candidate.held, default=None)


def _of_value(label: str, value: str, rollouts: dict[int, list[Part]], whole: float) -> FarValue | None:
    far_parts, others, ids, rest = [], [], [], []
    for rollout_id, parts in rollouts.items():
        with_value = [p for p in parts if p.value == value]
        beside = [p for p in parts if p.value != value]
        if not with_value or not beside:
            rest += parts
        elif mean_of(with_value).k3 >= TIMES * mean_of(beside).k3:
            far_parts += with_value
            others += beside
            ids.append(rollout_id)
        else:
            rest += parts
    if not far_parts:
        return None
    far, near = mean_of(far_parts), mean_of(others)
    usual = mean_of(others + rest)
    excess, every = (far.k3 - usual.k3) * far.tokens, whole - usual.k3 * (far.tokens + usual.tokens)
    held = sum(p.k3 for p in far_parts) / max(whole, 1e-30)
    of_both = sum(1 < len({p.value for p in parts}) for parts in rollouts.values())
    values = len({p.value for parts in rollouts.values() for p in parts})
    choices = values * math.comb(of_both, len(ids))
    one = FarValue(label, value, far, near, tuple(sorted(ids)), held, choices)
    is_far = far.k3 > AGREES and far.k3 >= TIMES * usual.k3 and far.samples >= FEWEST and one.z >= SURE
    are_alone = near.samples >= FEWEST and (usual.k3 <= AGREES or one.held >= HOLDS)
    return one if is_far and are_alone and excess >= HOLDS * every else None
