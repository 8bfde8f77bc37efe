"""The finding ``shared_value``."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import ClassVar

import torch

from slime_ext.tools.analysis.detectors.shared.clipped import clipped
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.filled import UNLIKELY, Beside, Filled
from slime_ext.tools.analysis.detectors.shared.identities import SURE, ratios
from slime_ext.tools.analysis.detectors.shared.signs import FAR, Signs
from slime_ext.tools.analysis.detectors.shared.token_ids import TokenIds
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, is_above, tabulated

KEPT = 8  # repeated values of which a part of a rollout keeps the counts
REPEATED = 3  # tokens with one value that make it a repeated value; 0 always counts as repeated
NEXT = -1e-3  # nats, a log-prob that is nearly 0
ROUNDED = 0.1  # numbers that are nearly 0, over zeros: more are no chance
ROUNDING = 1e-4  # relative difference of sums over the same tokens in another order


class Values(Measure):
    """Repeated log-probs of far tokens.

    Args:
        tokens: value -> number of tokens.
        ids: value -> largest number of different token ids in a part of a rollout.
        squares: value -> sum l^2.
        k3: value -> sum k3.
    """

    version: ClassVar[int] = 2

    tokens: Counter[float] = field(default_factory=Counter)
    ids: Counter[float] = field(default_factory=Counter)
    squares: Counter[float] = field(default_factory=Counter)
    k3: Counter[float] = field(default_factory=Counter)

    def add(self, part: DumpedRollout) -> None:
        far = part.finite & is_above(part.log_ratio.abs(), FAR)
        if not any_true(far):
            return
        behavior, (squared, near) = part.behavior[far], (row[far] for row in clipped(part)[-2:])
        values, index, counts = behavior.unique(return_inverse=True, return_counts=True)
        is_known = (counts >= REPEATED) | (values == 0)
        if not is_known.any():
            return
        kinds = part.proximal[far].mul(100).round().long() if part.tokens is None else part.tokens[far]
        # One key for both, because unique pairs of 300,000 tokens take 0.7 s, and unique keys 0.04 s.
        pairs = (index * len(kinds) + kinds.unique(return_inverse=True)[1]).unique()
        different = torch.bincount(pairs // len(kinds), minlength=len(values))
        squares, k3 = tabulated(index, (squared, near), len(values)).unbind(1)
        top = (counts * is_known).topk(min(KEPT, len(counts))).indices
        for at in top[is_known[top]].tolist():
            value = float(values[at])
            self.tokens[value] += int(counts[at])
            self.ids[value] = max(self.ids[value], int(different[at]))
            self.squares[value] += float(squares[at])
            self.k3[value] += float(k3[at])

    def merge(self, other: Values) -> None:
        most = self.ids | other.ids  # because other parts may have the same ids
        super().merge(other)
        self.ids = most


class Saturated(Measure):
    """Number of tokens that are unlikely for the trainer, and whose log-prob of the sampler is nearly 0."""

    takes_joined: ClassVar[bool] = True

    tokens: int = 0

    def add(self, part: DumpedRollout) -> None:
        next_to_zero = part.finite & is_above(part.behavior, NEXT) & ~part.is_zero
        if any_true(next_to_zero):
            self.tokens += count_true(next_to_zero & (part.proximal < UNLIKELY))


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=(
        "positive_log_probs",
        "retokenised",
        "off_by_one",
        "greedy_sampling",
        "tool_tokens",
        "constrained_decoding",
    ),
    what="log-probs of sampled tokens were lost and replaced by one value",
    asks="4 such tokens",
    title="""
        {{ count }} sampled tokens have the same log-prob, {{ "%g" | format(value) }}: it was filled
        in, not recorded.
    """,
    evidence="""
        The {% if has_ids and ids > 1 %}{{ count }} tokens have at least {{ ids }} different ids. They{%
        else %}tokens{% endif %} hold {{ held | share(1) }} of the squared log-ratio of all tokens that
        are far off. {%- if last %} {{ last | share(1) }} of the run's squared log-ratio
        lies at the last token of responses.{% endif %}
    """,
    threshold="""
        one value at 4 tokens with 3 different ids (or 0 at the last token of responses) holds half of
        the squared log-ratio of tokens beyond 0.5 nats; of a 0, the trainer is below 0.14 if the other
        tokens show that sampling kept a part of the vocabulary
    """,
    ruled_out="""
        Routing, numerics or old weights, because none of them gives different tokens the same
        log-prob to the last bit. Tool output, because the trainer finds these tokens as likely as
        sampled ones.
    """,
    fix="""
        {%- if value == 0 %} Look for `logprob or 0.0`, for accepted draft tokens of speculative
        decoding that come back without a log-prob, and for an end token that is appended by hand. {%-
        else %} Look for a clamp, or for a default that replaces a missing log-prob of the engine. {%-
        endif %} Record the engine's number, or mask these tokens until you have it.
    """,
)
FEWEST, KINDS, HELD = 4, 3, 0.5  # tokens; their ids; share of sum l^2 of far tokens
LAST = 0.5  # share of sum l^2 at the last tokens from which the finding says so


def look(d: Diagnosis) -> Figures | None:
    """Finds one log-prob that many far tokens share, and that holds most of their squared log-ratio."""
    need_tokens(d, FEWEST)
    values, ends = d.of(Values), d.of(Ends)
    if not values.tokens:
        return None
    value = max(values.squares, key=values.squares.__getitem__)
    count, ids, far = values.tokens[value], _fewest_ids(d, value), float(d.of(Signs).far[:, 3].sum())
    held = values.squares[value] / far if far else 0.0
    last = float(ends.sums[:, 0, 3].sum()) / float(ends.total[3])
    is_end = float(value) == 0 and last >= LAST  # an end token that was appended has one id
    if count < FEWEST or held < HELD or (ids < KINDS and not is_end):
        return None
    if float(value) == 0 and d.of(Filled).unlikely < FEWEST and _is_mass_missing(d):
        return None  # where sampling kept one token, its log-prob is 0
    if float(value) == 0 and _is_saturated(d):
        return None
    # Of zeros, the near ones are known as well.
    same = d.of(Filled).zeros.tolist() if float(value) == 0 else (count, values.k3[value])
    return {
        "value": float(value),
        "count": count,
        "ids": ids,
        "has_ids": bool(d.of(TokenIds).sums.any()),  # without, ``ids`` counts the trainer's log-probs
        "held": held,
        "last": last if last >= LAST else 0,
        "explains": explained_by_tokens(d, *same),
    }


def _is_saturated(d: Diagnosis) -> bool:
    """Returns whether the sampler is so sure of tokens that are unlikely for the trainer that it rounds to 0.

    Where zeros replace lost log-probs, those that were recorded agree, so none of these is nearly 0.
    """
    return d.of(Saturated).tokens > ROUNDED * d.of(Filled).unlikely


def _is_mass_missing(d: Diagnosis) -> bool:
    """Returns whether tokens whose log-prob is not 0 show that sampling kept a part of the vocabulary.

    The sum of the ratio minus 1 is that of k3 plus that of l; zeros that were filled in bring it down, too.
    """
    ratio = next((ratio for ratio in ratios(d) if not ratio.where), None)
    if ratio is None or not ratio.is_off:
        return False
    count, log_ratio, *_, k3 = d.of(Beside).sums[2].tolist()
    mean, of_zeros = ratio.mean, float(max(log_ratio + k3, -count))  # a ratio is at least 0
    return mean.value * mean.count - of_zeros <= -SURE * mean.error * mean.count


def _fewest_ids(d: Diagnosis, value: float) -> int:
    """Returns a lower bound of the number of different token ids with a value.

    It is the number in one part, or the fewest ids whose sum l^2 reaches that of the value.
    """
    values, squares = d.of(Values), d.of(TokenIds).sums[:, 3]
    reached = squares.sort(descending=True).values.cumsum(0)
    needed = int((reached < (1 - ROUNDING) * values.squares[value]).sum()) + 1
    return max(values.ids[value], min(needed, int((squares > 0).sum())))
