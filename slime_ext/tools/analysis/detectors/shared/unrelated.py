"""Counts samples whose log-probs on both sides are unrelated, as those of two texts are."""

from __future__ import annotations

from itertools import chain
from typing import ClassVar, NamedTuple

from torch import Tensor

from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout

LEAST_TOKENS = 12  # least tokens of a sample for a correlation
UNRELATED, RELATED = 0.3, 0.7  # correlation of both sides' log-probs over a sample
APART = 0.4  # nats, mean |l| of a sample with another text's log-probs; a token counts at most 1 nat
LEAST = -8.0  # nats; smaller log-probs count as this, so that single far tokens hide no agreement
TRIED = 64  # unrelated samples of a part that are looked at further


class Unrelated(Measure):
    """Numbers of samples: with a correlation of both sides' log-probs, with a low one, with a high one."""

    takes_joined: ClassVar[bool] = True

    correlated: int = 0
    unrelated: int = 0
    related: int = 0

    def add(self, part: DumpedRollout) -> None:
        counted = relation_of(part)
        self.correlated += int(counted.known.sum())
        self.unrelated += int(counted.unrelated.sum())
        self.related += int(counted.related.sum())


class Relation(NamedTuple):
    """Which samples of a part have a correlation, a low one, a high one, and a far mean |l|, [S] bool each.

    ``unrelated`` are those with a low correlation and a far mean |l|.
    """

    known: Tensor
    unrelated: Tensor
    related: Tensor
    apart: Tensor


@once_per_part
def relation_of(part: DumpedRollout) -> Relation:
    """Returns how the two sides' log-probs are correlated over each sample of a part.

    A sample counts as unrelated only if it is also far off.
    """
    b, p = (part.compared(x).double().clamp(min=LEAST) for x in (part.behavior, part.proximal))
    products = (x * y for x, y in ((b, b), (p, p), (b, p)))  # one after another, in the same memory
    count, sb, sp, bb, pp, bp = part.sums(chain((part.columns[0], b, p), products))
    n = count.clamp_min(1)
    of_b, of_p, of_both = bb - sb * sb / n, pp - sp * sp / n, bp - sb * sp / n
    correlation = of_both / (of_b * of_p).clamp_min(1e-30).sqrt()
    known = (count >= LEAST_TOKENS) & (of_b > 1e-6) & (of_p > 1e-6)
    (size,) = part.sums([part.log_ratio.abs().clamp(max=1.0)])
    apart = known & (size / n > APART)
    return Relation(known, apart & (correlation < UNRELATED), known & (correlation > RELATED), apart)
