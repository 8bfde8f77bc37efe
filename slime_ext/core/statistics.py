"""Computes statistics over turns and sequences: sums and maxima of quantities of tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import torch

from slime_ext.core.tokens import Unit
from slime_ext.errors import check_known
from slime_ext.ops import divergences
from slime_ext.ops.prefixes import response_order, shard_sums
from slime_ext.ops.segments import Segments, as_numbers, highest, identity, selected

if TYPE_CHECKING:
    from torch import Tensor

Aggregate = Literal["sum", "mean", "max"]
Share = Literal["sum", "max", "by_shard", "shard_sum"]  # what ranks add up of a statistic
ABSENT = cast("Tensor", None)  # the value of a field that is not passed
TOKEN_NAMES = ("ratio", *divergences.OF_RATIO, *divergences.OF_BOTH, "advantage", "count", "finite")


class ExceedsLimit(NamedTuple):
    """max(quantity - limit, 0) per token.

    Its sum over a unit is 0 exactly when no token exceeds the limit.
    """

    name: str
    limit: float


class ByPosition(NamedTuple):
    """A token's quantity ``name``, times the number of earlier response tokens of its sequence."""

    name: str


class StatisticKey(NamedTuple):
    """One statistic: ``aggregate`` of the quantity ``name`` over each unit's response tokens.

    ``by_shard`` and ``shard_sum`` have one number per shard of a sequence, [S, shards_per_sequence].
    ``by_shard`` is the maximum of the negative quantity, for ``prefix_min``. ``shard_sum`` is the sum of the
    quantity, for ``prefix_sums``.
    """

    aggregate: Share
    unit: Unit  # turn or sequence
    name: str | ExceedsLimit | ByPosition


@dataclass(frozen=True)
class Quantities:
    """Holds what a statistic of tokens is computed from."""

    segments: Segments
    log_ratio: Tensor  # [T] log numerator - log behavior, nats, 0 where there is none
    finite: Tensor  # [T] bool, response tokens with a behavior log-prob (``is_log_prob``)
    numerator: Tensor  # [T] log-probs, nats; anything where not finite
    behavior: Tensor  # [T] log-probs, nats; anything where not finite
    advantages: Tensor = ABSENT  # [T], anything at masked tokens

    @cached_property
    def ratio(self) -> Tensor:
        """numerator / behavior, [T]; 1 where there is no log-ratio."""
        return self.log_ratio.exp()

    def value_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        """Computes the quantity that a statistic's name means: [T], 0 at masked tokens."""
        row = self.row_of(name)
        return as_numbers(row, self.log_ratio.dtype) if row.dtype is torch.bool else row

    def row_of(self, name: str | ExceedsLimit | ByPosition) -> Tensor:
        """Computes the same as ``value_of``, but leaves flags bool.

        A sum of bool needs no copy in float32.
        """
        if name == "count":
            return self.segments.mask
        if name == "finite":
            return self.finite
        if isinstance(name, ExceedsLimit):
            return self._minus_limit(name).clamp_min_(0)
        if isinstance(name, ByPosition):
            return (response_order(self.segments) - 1) * self.value_of(name.name).double()
        if name in divergences.OF_RATIO:
            return divergences.OF_RATIO[name](self.log_ratio)
        if name in divergences.OF_BOTH:
            return selected(divergences.OF_BOTH[name](self.numerator, self.behavior), self.finite)
        if name == "advantage":
            return self.segments.zeroed(self.advantages)
        check_known("statistics", "quantity", name, TOKEN_NAMES)
        return self.log_ratio  # of which "ratio" is the exponential

    def _minus_limit(self, of: ExceedsLimit) -> Tensor:
        if of.name == "k1":  # -limit - l takes one pass less than (-l) - limit, and has the same bits
            return torch.rsub(self.log_ratio, -of.limit)
        return self.value_of(of.name) - of.limit


@functools.cache  # because ``StepInputs.total`` asks in every call of every hook
def statistics_of(unit: Unit, aggregate: Aggregate, name: str) -> tuple[StatisticKey, ...]:
    """Returns the statistics that ``StepInputs.total`` reads for the same arguments.

    Raises:
        ConfigError: an unknown unit, aggregate or quantity.
    """
    check_words(unit, aggregate)
    check_known("statistics", "quantity", name, TOKEN_NAMES)
    if unit == "token":
        return ()
    if aggregate == "mean":
        return StatisticKey("sum", unit, name), StatisticKey("sum", unit, "count")
    return (StatisticKey(aggregate, unit, name),)


def check_words(unit: str, aggregate: str, aggregates: Sequence[str] = get_args(Aggregate)) -> None:
    check_known("statistics", "unit", unit, get_args(Unit))
    check_known("statistics", "aggregate", aggregate, aggregates)


def tabulate(keys: Sequence[StatisticKey], inputs: Quantities) -> dict[StatisticKey, Tensor]:
    """Computes every statistic, one number per unit.

    It takes one pass over the tokens, and at most one call of ``all_sum``.

    Returns:
        key -> [S] or [U] float64; maxima of a unit without response tokens are -inf.
    """
    shares, all_sum = [_share(key, inputs) for key in keys], inputs.segments.all_sum
    if shares and all_sum is not identity:
        summed = all_sum(torch.cat([share.reshape(-1) for share in shares]))
        parts = torch.split(summed, [share.numel() for share in shares])
        shares = [part.view(share.shape) for part, share in zip(parts, shares, strict=True)]
    return {
        key: highest(key.unit, share) if key.aggregate == "max" else share
        for key, share in zip(keys, shares, strict=True)
    }


def _share(key: StatisticKey, inputs: Quantities) -> Tensor:
    """Computes this rank's share of a statistic."""
    segments = inputs.segments
    if key.aggregate == "sum" and key.unit == "sequence":
        return segments.local_sum(inputs.row_of(key.name))
    values = inputs.value_of(key.name)
    if key.aggregate == "sum":
        return segments.local_turn_sums(values)
    if key.aggregate == "shard_sum":
        return shard_sums(segments, values)
    values = torch.where(segments.mask, values if key.aggregate == "max" else -values, -torch.inf)
    return segments.local_turn_maxima(values) if key.unit == "turn" else segments.local_maxima(values)
