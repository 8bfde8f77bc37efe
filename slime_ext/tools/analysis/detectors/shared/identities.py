"""Tests whether the tokens were drawn from the recorded policy, by what holds for any two policies.

If tokens are drawn from q and q is recorded, the mean of the ratio p / q is 1 for any p, because the sum of
q(x) p(x) / q(x) over the vocabulary is 1. This holds in each rollout, in each part of the run and at each
place of the response. So ratios above 1 outweigh those below 1. Old weights, other weights, lower precision,
noise and other routing leave all of that as it is. Log-probs of other tokens, or from before a temperature,
bring the mean above 1. Log-probs that are renormalised to a part of the vocabulary bring it below 1, and
hardly any ratio is above 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from slime_ext.ops.segments import as_numbers
from slime_ext.tools.analysis import document
from slime_ext.tools.analysis.detectors.shared.explained import whole_run
from slime_ext.tools.analysis.detectors.shared.healthy import is_healthy
from slime_ext.tools.analysis.measures.by_sample import LABELS
from slime_ext.tools.analysis.measures.curves import PER_OCTAVE, octaves_of_places
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.means import LARGEST_RATIO, Mean
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import is_above, is_below, tabulated, zeros

PLACES = 18  # octaves of the position in the response
SUMS = 11  # of ``RatioSums``
HIGHEST = 1e4  # a ratio above this is an error of the record, not of chance
PARTS = ("engine", "data-parallel rank", "status")  # labels of the samples
FEWEST, SAMPLES = 200, 16  # tokens; samples that reach a place or are in a rollout
SURE = 6.0  # standard errors of the mean ratio from 1
ABOVE, BELOW = 0.05, 0.02  # least distance of the mean ratio from 1
# Mean l over the mean ratio minus 1, from which noise in the record alone cannot make the latter; from LOUD
# on no noise can.
LEANS, LOUD = 0.3, 0.3
HONEST: Literal["honest"] = "honest"  # sides of the split
ALTERED: Literal["altered"] = "altered"
UNKNOWN: Literal["unknown"] = "unknown"
SAID = {
    HONEST: (
        ". It is 1 if tokens were drawn from the distribution whose log-probs were recorded, so no altered "
        "record (renormalised, truncated, filled in, shifted) makes most of k3."
    ),
    ALTERED: (
        ". It would be 1 if tokens had been drawn from the distribution whose log-probs were recorded: old "
        "weights, precision, noise and routing do not change that."
    ),
    UNKNOWN: (
        ". It is 1 if tokens were drawn from the distribution whose log-probs were recorded; this is neither "
        "near enough nor far enough to tell."
    ),
}
CERTAIN = 3.0  # standard errors that the mean ratio may be farther from 1
IS_ONE = (
    ". It is 1 if tokens were drawn from the distribution whose log-probs were recorded, and here it is, "
    f"within {CERTAIN:g} standard errors"
)
HEALTHY_RUN = ". k3 is healthy, which leaves little to explain."
COARSE = ", which are too large to exclude an altered record that makes half of k3."
# A token with |l| up to LARGEST nats that an altered record moves adds at least this to the distance of the
# mean ratio from 1, for each nat of k3 that it adds: 1 - e^l over e^l - 1 - l below 0, and above 0 the ratio
# minus 1, which is at most 9, over at most 142 nats.
LEAST, LARGEST = 0.06, 15.0
HALF = 0.5  # share of k3 that an altered record would make
# Sum of ratios above 1, over that below 1, if mass is missing; tokens far above for each below.
ONE_SIDED, FAR_ABOVE = 0.1, 1e-3
MOST_FAR = 0.6  # share of the tokens of a part
FAR = 0.5  # nats, |l| of a token that is far off


class RatioSums(NamedTuple):
    """Sums over the samples of a part: a, a^2, a n, n, n^2, their number, b to f.

    a is the sum of the ratio minus 1 over the n tokens of a sample, where a ratio above LARGEST_RATIO counts
    as that. b is the sum over the tokens with a ratio above 1, where one above HIGHEST counts as that, and c
    over those below 1.
    d and e are the numbers of tokens with l above and below FAR, and f is the sum of l.

    Attributes:
        where: "rollout", or the label of the part.
        value: the rollout's number, or the label's value.
    """

    where: str
    value: str
    sums: tuple[float, ...]


class Ratios(Measure):
    """The sums of ``RatioSums`` by place in the response, [PLACES, SUMS], by rollout and by part.

    ``open`` holds those of the rollout that is being read.
    """

    version: ClassVar[int] = 2

    places: Tensor = field(default_factory=lambda: zeros(PLACES, SUMS))
    parts: list[RatioSums] = field(default_factory=list)
    open: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def add(self, part: DumpedRollout) -> None:
        if not part.size:
            return
        most, highest = (math.expm1(math.log(limit)) for limit in (LARGEST_RATIO, HIGHEST))
        ratio = part.ratio_minus_one.clamp(max=most)
        above = part.ratio_minus_one.clamp(0, highest)
        octave = (octaves_of_places(part) / PER_OCTAVE).int().clamp_(max=PLACES - 1)
        index = part.segments.ids * PLACES + octave
        is_far = (is_above(part.log_ratio, FAR), is_below(part.log_ratio, -FAR))
        far = (as_numbers(flags, torch.float64) for flags in is_far)
        rows = [ratio, part.columns[0], above, ratio.clamp(max=0), *far, part.columns[3]]
        table = tabulated(index, rows, part.count * PLACES).view(part.count, PLACES, len(rows))
        self.places += _columns(table).sum(1).T
        samples = _columns(table.sum(1, keepdim=True))
        self._count("rollout", str(part.rollout_id), samples)
        for label in PARTS:
            values = LABELS[label](part) or ()
            for value in set(values) - {""} if len(set(values)) > 1 else ():
                self._count(label, value, samples[:, [one == value for one in values]])

    def _count(self, where: str, value: str, samples: Tensor) -> None:
        self.open[where, value] = self.open.get((where, value), 0) + samples.sum(1)[:, 0]

    def close(self, rollout: DumpedRollout) -> None:
        self.parts += [RatioSums(*key, tuple(sums.tolist())) for key, sums in sorted(self.open.items())]
        self.open = {}


def _columns(table: Tensor) -> Tensor:
    """Returns what is summed over samples, from a, n and b to f of each, [S, P, 7] -> [SUMS, S, P]."""
    a, n, *others = table.unbind(2)
    return torch.stack([a, a * a, a * n, n, n * n, (n > 0).double(), *others])


class Ratio(NamedTuple):
    """The mean of the ratio minus 1 over a part of the run.

    Attributes:
        where: the part in words; empty: the whole run.
        above: sum of the ratios above 1, minus 1 each, over that below 1.
        far: numbers of tokens with l above and below FAR.
        log_ratio: mean l.
    """

    where: str
    mean: Mean
    above: float
    far: tuple[float, float]
    log_ratio: float

    @property
    def is_off(self) -> bool:
        """Whether no policy has this mean at tokens that were drawn from the recorded one.

        A mean below 1 is off only if hardly any ratio is above 1, and no token is far above. Otherwise large
        ratios may be too rare to have been drawn.
        """
        if self.mean.value > 0:
            # Noise that only the record has leaves mean l at 0, and tokens of the record have it below 0.
            least = ABOVE if self.log_ratio >= LEANS * self.mean.value else LOUD
            return self.mean.z >= SURE and self.mean.value >= least
        return self.mean.z <= -SURE and self.mean.value <= -BELOW and self.is_one_sided

    @property
    def is_one_sided(self) -> bool:
        """Whether hardly any ratio is above 1."""
        above, below = self.far
        return self.above <= ONE_SIDED and above <= FAR_ABOVE * below


def ratios(d: Diagnosis) -> Iterator[Ratio]:
    """Yields the mean ratio of the run, and of each rollout, part and place with enough samples."""
    measured, of_part = d.of(Ratios), defaultdict(lambda: zeros(SUMS))
    for part in measured.parts:
        of_part[part.where, part.value] += torch.tensor(part.sums, dtype=torch.float64)
    whole = sum((sums for (where, _), sums in of_part.items() if where == "rollout"), zeros(SUMS))
    named = [("", whole)]
    named += [(f"{where} {value}", sums) for (where, value), sums in of_part.items()]
    named += [(_place(octave), sums) for octave, sums in enumerate(measured.places)]
    for where, sums in named:
        if ratio := _ratio(where, sums.tolist()):
            yield ratio


def one_sided_rollouts(d: Diagnosis) -> frozenset[int]:
    """Returns the ids of the rollouts in which hardly any ratio is above 1, because mass is missing."""
    rollouts = ((part.value, part.sums) for part in d.of(Ratios).parts if part.where == "rollout")
    known = ((int(value), _ratio("rollout", sums)) for value, sums in rollouts)
    return frozenset(i for i, ratio in known if ratio and ratio.mean.value < 0 and ratio.is_one_sided)


def _ratio(where: str, sums: Iterable[float]) -> Ratio | None:
    """Returns the mean ratio of a part of the run; None without enough samples.

    Args:
        sums: [SUMS], of ``RatioSums``.
    """
    a, square, cross, n, n_square, samples, above, below, *far, log_ratio = sums
    if n < FEWEST or samples < SAMPLES:
        return None
    mean = a / n
    error = math.sqrt(max(square - 2 * mean * cross + mean * mean * n_square, 0.0)) / n
    of_sides = above / -below if below else math.inf
    return Ratio(where, Mean(mean, error, int(n)), of_sides, (far[0], far[1]), log_ratio / n)


class Record(NamedTuple):
    """What the recorded log-probs are.

    Attributes:
        side: ``HONEST`` if the tokens were drawn from the recorded distribution, ``ALTERED`` if not, else
            ``UNKNOWN``.
        ratio: the mean ratio that tells, the farthest from 1 if several do; None without enough samples.
        is_healthy: whether k3 and the effective sample size are.
    """

    side: Literal["honest", "altered", "unknown"]
    ratio: Ratio | None
    is_healthy: bool

    @property
    def figures(self) -> str:
        """The mean ratio that tells, as text."""
        if self.ratio is None:
            return ""
        mean, where = self.ratio.mean, self.ratio.where
        of = f" over {where}" if where else ""
        return f"the mean ratio{of} is {1 + mean.value:.4g} ± {mean.error:.1g}"

    def excludes(self, side: str) -> str:
        """Returns why a cause that lives on a side is not considered; empty if it is."""
        if self.side == ALTERED and side == HONEST:
            return f"{self.figures}, and no weights, precision or routing bring it there"
        if self.side == HONEST and side == ALTERED:
            return f"{self.figures}, and an altered record that makes most of k3 would move it"
        return ""

    def documented(self) -> document.Record:
        """Returns it for the document."""
        if self.ratio is None:
            said = f"Fewer than {FEWEST} tokens or {SAMPLES} samples, too few to test what was sampled."
            return document.Record(side=self.side, said=said)
        mean, said = self.ratio.mean, f"{self.figures[0].upper()}{self.figures[1:]}"
        return document.Record(
            side=self.side,
            mean_ratio=1 + mean.value,
            error=mean.error,
            where=self.ratio.where,
            said=f"{said}{self._meaning()}",
        )

    def _meaning(self) -> str:
        """Returns what the mean ratio says, as the end of a sentence and another one."""
        if self.side != UNKNOWN or not self.ratio or abs(self.ratio.mean.z) > CERTAIN:
            return SAID[self.side]
        return IS_ONE + (HEALTHY_RUN if self.is_healthy else COARSE)


def record_of(d: Diagnosis) -> Record:
    """Returns whether the tokens were drawn from the recorded distribution, the first split of all causes.

    The record is altered if the mean ratio of the run or of a part of it is off. An alteration moves the mean
    ratio by at least LEAST of the k3 that it makes. So the record is honest if the mean ratio of the run is
    nearer to 1 than an alteration that makes HALF of k3 would leave it.
    """
    known = list(ratios(d))
    whole, is_run_healthy = next((ratio for ratio in known if not ratio.where), None), is_healthy(d)
    if whole is None:
        return Record(UNKNOWN, None, is_run_healthy)
    # Large ratios may be missing by chance in a few tokens of an honest run, but not in all of them. If most
    # tokens are far off, as in text that damaged weights garbled, large ratios are too rare to be drawn.
    above, below = whole.far
    is_mass_missing = above <= FAR_ABOVE * below
    is_mass_missing &= all(ratio.far[1] <= MOST_FAR * ratio.mean.count for ratio in known)
    off = [ratio for ratio in known if ratio.is_off and (ratio.mean.value > 0 or is_mass_missing)]
    if off:
        return Record(ALTERED, max(off, key=lambda ratio: abs(ratio.mean.z)), is_run_healthy)
    (tokens, k3), extremes = whole_run(d), d.sums.histogram
    moved = abs(whole.mean.value) + CERTAIN * whole.mean.error
    is_small = max(-extremes.smallest, extremes.largest) <= LARGEST
    is_honest = is_small and abs(whole.mean.value) < BELOW and moved <= LEAST * HALF * k3 / tokens
    return Record(HONEST if is_honest else UNKNOWN, whole, is_run_healthy)


def _place(octave: int) -> str:
    begin = 2**octave
    return f"token {begin} of the responses" if octave == 0 else f"tokens {begin} to {2 * begin - 1}"
