"""Tests whether one side bends the logits: a soft cap c tanh(z / c), which a temperature z / T is not.

After the same text, differences of log-probs are differences of logits. A temperature makes those of both
sides proportional, with one factor everywhere. A soft cap makes the factor depend on the logit itself, which
no dump holds, so the level of each context is fitted: one number for three or more tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.contexts import LARGEST, Context, Contexts
from slime_ext.tools.analysis.detectors.shared.twice import BFLOAT16
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

ROWS, FEWEST = 400, 24  # contexts that are fitted; tokens beyond two of each context
LEAST_FREE = 10  # tokens beyond one of each context
CAPS = [5.0 * 1.25**i for i in range(16)]
AT_ONCE = 32  # contexts whose levels fit into a core's cache
FIRST = 16  # contexts, the farthest off, that show for most soft caps that they leave too much
LEVELS = torch.linspace(-10, 45, 111).double()  # logits of a token with log-prob 0
ROUNDS = 5  # of the robust fit
EDGE = 0.999  # of the cap, beyond which no logit lies
BENT, MATTERS = 0.4, 0.03  # residual of a soft cap over that of a temperature; least nats of the latter
FACTORS = torch.logspace(-1, 1, 81).double()  # of some contexts' differences of log-probs, beside 1
SURE = 6.0  # standard errors by which a factor is not 1
NEAR_ONE = 0.05  # nats of a factor that is no other temperature
SOME = 0.05  # least share of the contexts with each of two factors
ROUNDED = 1 + 1e-6  # over a sum, that rounding may add
USUAL_BENT = 0.6  # the same in the usual context, of whose residual noise is a larger share
Side = Literal["engine lacks", "engine caps", "trainer differs"]
SIDES: tuple[Side, ...] = ("engine lacks", "engine caps", "trainer differs")


def _bent(z: Tensor, cap: float, sides: Collection[Side]) -> dict[Side, Tensor]:
    """Returns what the trainer has where the sampler has the logits z, for some sides of a soft cap."""
    scaled = z / cap
    bent: dict[Side, Tensor] = {}
    if "engine lacks" in sides:
        bent["engine lacks"] = cap * scaled.tanh()
    if {"engine caps", "trainer differs"} & {*sides}:
        bent["engine caps"] = uncapped = cap * scaled.clamp(-EDGE, EDGE).atanh()
        bent["trainer differs"] = uncapped * scaled  # logit * tanh(logit / cap)
    return {side: bent[side] for side in sides}


class Bend(NamedTuple):
    """The best fit of a soft cap, and that of a temperature.

    Attributes:
        side: which side has the soft cap.
        cap: of the logits.
        bent, straight, before: residual of the fits, and without one, nats of a difference of log-ratios.
        tokens: degrees of freedom of the soft cap's residual.
        usual_bent, usual_straight: residual in the median context, which a few odd tokens do not move.
        mixed: residual if each context has one of two factors: 1, or ``factor``.
        factor: the trainer's differences of log-probs over the sampler's, in a share of the contexts.
        share: of the contexts that ``factor`` fits better.
    """

    side: Side
    cap: float
    bent: float
    straight: float
    before: float
    tokens: int
    usual_bent: float
    usual_straight: float
    mixed: float
    factor: float
    share: float

    @property
    def is_mixed(self) -> bool:
        """Whether two temperatures leave much less than one, and no more than a soft cap.

        Each context only chooses between two factors, but a soft cap fits a number to each. Temperatures are
        positive; a single context with another text before it fits a factor of any size and sign.
        """
        is_temperature = FACTORS[0] <= self.factor <= FACTORS[-1]
        is_less = self.mixed <= BENT * self.straight and self.mixed <= self.bent
        return is_temperature and is_less and SOME <= self.share <= 1 - SOME

    @property
    def is_bent(self) -> bool:
        """Whether a soft cap leaves much less than temperatures, in all contexts and in the usual one."""
        if self.is_mixed:
            return False
        is_less = self.bent <= BENT * self.straight and self.usual_bent <= USUAL_BENT * self.usual_straight
        return is_less and self.usual_straight > MATTERS


def has_contexts(d: Diagnosis) -> bool:
    """Returns whether enough samples share a context to tell a soft cap from a temperature."""
    return _beyond_two(_contexts(d)) >= FEWEST


def bend(d: Diagnosis) -> Bend | None:
    """Returns both fits.

    None if too few samples share a context, if a temperature leaves too little, or if neither a soft cap nor
    two temperatures leave much less.
    """
    return _fits(tuple(_contexts(d))) if has_contexts(d) else None


def same_text_factor(d: Diagnosis) -> float | None:
    """Returns the trainer's differences of log-probs after the same text, over the sampler's.

    None if they are alike, which a renormalised record leaves them, or if no factor makes them alike. Where
    two engines in bfloat16 would differ by as much as is left, the error of the factor decides.
    """
    rows = _contexts(d)
    sampler, trainer = _sides(rows)
    known = ~sampler.isnan()
    free = int(known.sum()) - len(rows)
    if free < LEAST_FREE:
        return None
    x, y = (_centred(values.nan_to_num(), known)[known] for values in (sampler, trainer))
    factor = _slope(x, y)
    before, left = (float((y - slope * x).square().sum() / free) ** 0.5 for slope in (1.0, factor))
    is_sure = left <= BFLOAT16 and abs(factor - 1) * float(x.square().sum()) ** 0.5 >= SURE * left
    return factor if before > MATTERS and (left <= BENT * before or is_sure) else None


def _contexts(d: Diagnosis) -> list[Context]:
    rows = d.of(Contexts).rows
    return rows[:: max(-(-len(rows) // ROWS), 1)]


def _beyond_two(rows: Sequence[Context]) -> int:
    """Returns the number of tokens beyond two of each context."""
    return sum(len(sampler) - 2 for sampler, _ in rows)


def _sides(rows: Sequence[Context]) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of both sides, [C, LARGEST]; NaN without a token."""
    sampler, trainer = (
        torch.tensor([[*row[side], *[torch.nan] * (LARGEST - len(row[side]))] for row in rows]).double()
        for side in (0, 1)
    )
    return sampler.view(-1, LARGEST), trainer.view(-1, LARGEST)


@lru_cache(1)  # of the run that is examined, in which two detectors ask
def _fits(rows: tuple[Context, ...]) -> Bend | None:
    beyond = _beyond_two(rows)
    sampler, trainer = _sides(rows)
    known = ~sampler.isnan()
    count = known.sum(1)
    x, y = (_centred(values.nan_to_num(), known) for values in (sampler, trainer))
    free = int(count.sum()) - len(rows)
    before = float((y - x).square().sum() / free) ** 0.5
    slope = _slope(x[known], y[known])
    of_line = (y - slope * x).square().sum(1)
    straight = float(of_line.sum() / free) ** 0.5
    if not straight > MATTERS:
        return None
    of_two, factor, share = _two_factors(x, y)
    mixed = float(of_two / free) ** 0.5
    sides: dict[float, Sequence[Side]] = dict.fromkeys(CAPS, SIDES)
    if mixed > BENT * straight:
        most = ROUNDED * (BENT * straight) ** 2 * beyond
        worst = of_line.topk(min(FIRST, len(rows))).indices
        firsts = _residuals(sampler[worst], y[worst], known[worst], sides)
        sides = {cap: [side for side in SIDES if float(firsts[side, cap].sum()) <= most] for cap in CAPS}
        if not any(sides.values()):
            return None
    columns = (x.split(AT_ONCE) for x in (sampler, y, known))
    parts = [_residuals(*some, sides) for some in zip(*columns, strict=True)]
    fits = {fit: torch.cat([of_some[fit] for of_some in parts]) for fit in parts[0]}
    side, cap = min(fits, key=lambda fit: float(fits[fit].sum()))
    of_cap = fits[side, cap]
    bent = float(of_cap.sum() / beyond) ** 0.5
    usual = (float((x / (count - n)).median()) ** 0.5 for x, n in ((of_cap, 2), (of_line, 1)))
    return Bend(side, cap, bent, straight, before, beyond, *usual, mixed, factor, share)


def _two_factors(x: Tensor, y: Tensor) -> tuple[Tensor, float, float]:
    """Returns the least sum of squares if each context has the factor 1 or one other, that, and its share.

    Args:
        x, y: [C, K] differences of log-probs of the sampler and of the trainer; 0 without a token.
    """
    others = FACTORS[FACTORS.log().abs() > NEAR_ONE]
    of_one = (y - x).square().sum(1)
    of_other = (y - others[:, None, None] * x).square().sum(-1)  # [F, C]
    at = int(torch.minimum(of_other, of_one).sum(1).argmin())
    # The grid is coarse, so the factor of the contexts that chose it is fitted.
    chosen = of_other[at] < of_one
    factor = float((x * y)[chosen].sum() / x[chosen].square().sum().clamp_min(1e-30))
    of_chosen = (y - factor * x).square().sum(1)
    return torch.where(chosen, of_chosen, of_one).sum(), factor, float(chosen.double().mean())


def _slope(x: Tensor, y: Tensor) -> float:
    """Returns the factor between two differences of log-probs, which a few odd tokens do not move, [N]."""
    far = x.abs() >= x.abs().median()
    slope = (y[far] / x[far]).median()
    for _ in range(ROUNDS):
        left = (y - slope * x).abs()
        # A token that fits exactly keeps its weight, also if most of them do.
        weights = (2 * left.median().clamp_min(1e-30) / left.clamp_min(1e-30)).clamp(max=1)
        slope = (weights * x * y).sum() / (weights * x * x).sum().clamp_min(1e-30)
    return float(slope)


def _centred(values: Tensor, known: Tensor) -> Tensor:
    """Returns values [..., C, K] minus their mean over the known tokens of each context; 0 elsewhere."""
    values = torch.where(known, values, 0)
    return torch.where(known, values - values.sum(-1, keepdim=True) / known.sum(-1, keepdim=True), 0)


def _residuals(
    sampler: Tensor, y: Tensor, known: Tensor, sides: Mapping[float, Sequence[Side]]
) -> dict[tuple[Side, float], Tensor]:
    """Returns the sum of squares that each soft cap leaves in each context with its best level, [C].

    Args:
        sides: of each cap that are computed.
    """
    # Tokens come first, because a sum over the last dimension, of six, takes three times as long.
    known, y, z = (x.T.contiguous()[:, None] for x in (known.double(), y, sampler.nan_to_num()))  # [K, 1, C]
    count, z = known.sum(0), z + LEVELS[:, None]
    fits = {}
    for cap, some in sides.items():
        for side, bent in _bent(z, cap, some).items() if some else ():
            mean = bent.mul_(known).sum(0) / count  # [L, C]
            left = bent.sub_(mean).sub_(y).mul_(known)
            fits[side, cap] = left.square_().sum(0).amin(0)
    return fits
