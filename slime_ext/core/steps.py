"""Defines the steps of a correction: frozen dataclasses whose fields are the configuration.

Calling a step runs its mathematics. A step reads log-ratios and declared statistics, always over the host's
response mask, and returns a state of weights and keep flags. Rejections therefore commute; weights depend on
the order of the list. If every ratio is 1 and every age 0, no step changes anything.

Coupled steps compute one number over the whole optimizer step before any micro-batch is trained.
``number_for_step`` gets every micro-batch of this rank and an ``all_sum`` over all ranks, so the number does
not depend on how tokens are packed or split. ``slime_ext.core.correction.plan_step`` calls it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch

from slime_ext.core.fields import check_fields
from slime_ext.core.needs import Need
from slime_ext.core.state import MODEST, Batches, Effect, State, Step, StepInputs, WeightRange
from slime_ext.core.statistics import Aggregate, ExceedsLimit, StatisticKey, statistics_of
from slime_ext.core.tokens import Level, Unit
from slime_ext.errors import expect
from slime_ext.ops.prefixes import prefix_min
from slime_ext.ops.segments import AllSum

if TYPE_CHECKING:
    from torch import Tensor

Statistic = Literal["ratio", "k1", "k2", "k3", "binary_kl", "binary_kl_max", "tv"]
When = Literal[
    "always", "negative_advantage", "positive_advantage", "outward", "outward_positive", "outward_negative"
]
KEPT = "on-policy data must be kept"
COUNT = StatisticKey("sum", "sequence", "count")
FAR = 2.0**40  # nats, above the log of every weight
TOP = 0x7FEFFFFFFFFFFFFF  # bits of the largest finite float64; for values >= 0, larger bits are larger values


class _AtLevel(Step):
    """A step that turns the importance ratio at ``level`` into weights."""

    level: Level

    effects = frozenset({Effect.REWEIGHT})

    @cached_property
    def unit(self) -> Unit:
        return "sequence" if self.level == "geometric" else self.level

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return statistics_of(self.unit, self._aggregate, "ratio")

    @cached_property
    def _aggregate(self) -> Aggregate:
        return "mean" if self.level == "geometric" else "sum"

    def weight_range(self, before: WeightRange) -> WeightRange:
        return WeightRange(0.0, math.inf, ratio_at(self.unit, self._aggregate))

    def _ratio(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Returns the ratio and its log, one per unit."""
        if self.unit == "token":
            return inputs.ratio, inputs.log_ratio
        log_ratio = inputs.total(self.unit, self._aggregate, "ratio")
        return log_ratio.exp().to(inputs.log_ratio.dtype), log_ratio


@dataclass(frozen=True)
class Reweight(_AtLevel):
    """Sets the weights to the importance ratio at ``level``.

    Level token is each token's own ratio, turn and sequence are the product over the unit, and geometric is
    the exp of the sequence's mean log-ratio. Only sequence weights are unbiased, and their variance grows
    exponentially with length.

    Source: token: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; sequence: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; turn: ST-PPO, https://arxiv.org/abs/2511.20718; geometric: GSPO,
    https://arxiv.org/abs/2507.18071.
    """

    level: Level = "token"

    def __post_init__(self) -> None:
        check_fields("reweight.", self, Reweight)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.reweight(self.unit, *self._ratio(inputs))


@dataclass(frozen=True)
class MinPrefixReweight(Step):
    """Sets the weights to w_t = rho_t times the smallest rho_i of earlier response tokens.

    The first response token of a sequence has w_t = rho_t. This replaces the product over the prefix by a
    number that does not grow with its length.

    Source: MinPRO, https://arxiv.org/abs/2601.22718. Only its abstract was available, so this definition is
    the one of our design.
    """

    unit = "sequence"
    effects = frozenset({Effect.REWEIGHT})
    statistics = (StatisticKey("by_shard", "sequence", "ratio"),)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        lowest = prefix_min(inputs.segments, inputs.log_ratio, inputs.table[self.statistics[0]])
        log_ratio = inputs.log_ratio + torch.where(lowest == torch.inf, 0, lowest)  # NaN stays
        return state.reweight("token", log_ratio.exp(), log_ratio)


@dataclass(frozen=True)
class SignedClip(_AtLevel):
    """Sets the weights to clip(ratio, low, high), one range per sign of the advantage.

    With the defaults it is TOPR: weight 1 where A >= 0, clip(sequence ratio, 0, 1) where A < 0.

    Source: Le Roux et al. 2025, https://arxiv.org/abs/2503.14286.
    """

    level: Level = "sequence"
    positive_low: float = 1.0
    positive_high: float = 1.0
    negative_low: float = 0.0
    negative_high: float = 1.0

    needs = frozenset({Need.ADVANTAGES})
    effects = frozenset({Effect.REWEIGHT, Effect.BOUND})

    def __post_init__(self) -> None:
        check_fields("signed_clip.", self, SignedClip)
        for sign in ("positive", "negative"):
            low, high = getattr(self, f"{sign}_low"), getattr(self, f"{sign}_high")
            expect(0 <= low <= 1 <= high, f"signed_clip.{sign}", "0 <= low <= 1 <= high", [low, high], KEPT)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        of_unit = self._ratio(inputs)
        ratio, log_ratio = (inputs.segments.expand_to_tokens(self.unit, values) for values in of_unit)
        positive = ratio.clamp(self.positive_low, self.positive_high)
        negative = ratio.clamp(self.negative_low, self.negative_high)
        weights = torch.where(inputs.advantages < 0, negative, positive)
        # The ratio is set before its bound, because ``bound`` records where the clip changed it.
        return state.reweight("token", ratio).bound(weights, log_ratio)

    def weight_range(self, before: WeightRange) -> WeightRange:
        low, high = (self.positive_low, self.negative_low), (self.positive_high, self.negative_high)
        return WeightRange(min(low), max(high))


@dataclass(frozen=True)
class Truncate(Step):
    """Caps the weights from above: w = min(w, high).

    Biases the gradient towards the behavior policy; in return no weight is larger than the cap.

    Source: Espeholt et al. 2018, IMPALA, https://arxiv.org/abs/1802.01561 (the clipped rho of V-trace).
    """

    high: float = 2.0

    effects = frozenset({Effect.BOUND})

    def __post_init__(self) -> None:
        check_fields("truncate.", self, Truncate)
        why = "below 1 it would shrink on-policy tokens"
        expect(self.high >= 1, "truncate.high", "a number >= 1", self.high, why)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.bound(state.weights.clamp(max=self.high), state.log_ratio)

    def weight_range(self, before: WeightRange) -> WeightRange:
        return before.clamped(0.0, self.high)


@dataclass(frozen=True)
class Clip(Step):
    """Bounds the weights on both sides: w = min(max(w, low), high).

    ``low: 0`` means no lower bound.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585 (CISPO's weight).
    """

    low: float = 0.5
    high: float = 2.0

    effects = frozenset({Effect.BOUND})

    def __post_init__(self) -> None:
        check_fields("clip.", self, Clip)
        why = "above 1 it would raise on-policy tokens, and 0 means no lower bound"
        expect(0 <= self.low <= 1, "clip.low", "a number in [0, 1]", self.low, why)
        why = "below 1 it would shrink on-policy tokens"
        expect(self.high >= 1, "clip.high", "a number >= 1", self.high, why)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.bound(state.weights.clamp(self.low, self.high), state.log_ratio)

    @property
    def raises_zero(self) -> bool:
        return self.low > 0

    def weight_range(self, before: WeightRange) -> WeightRange:
        return before.clamped(self.low, self.high)


@dataclass(frozen=True)
class Reject(Step):
    """Drops the units whose statistic leaves [low, high].

    Both ends are inside; None means no bound. ``ratio`` is aggregated before the exponential: sum is the
    product over the unit, mean the geometric mean, max the largest ratio. At unit token nothing is
    aggregated.

    ``when`` limits the rejection to some units: ``negative_advantage`` to those whose mean advantage is
    negative, ``positive_advantage`` to all others, ``outward`` to those whose mean advantage and log-ratio
    have the same sign, so that the update would push the ratio further out. ``outward_positive`` and
    ``outward_negative`` also require that sign. Two steps can give a statistic different bounds for each
    sign of the advantage.

    ``max_staleness`` also drops sequences whose weights are more than that many versions old.
    ``max_staleness_steps`` also drops those whose weights are more than that many optimizer steps old. Both
    ignore ``when``, and a sequence of unknown age stays.

    Source: token ratio: IcePop, https://arxiv.org/abs/2510.18855; sequence and geometric: Liu and Li 2025,
    https://richardli.xyz/rl-collapse; divergences: TRM, https://arxiv.org/abs/2512.23075; negative_advantage:
    DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; outward: DPPO, https://arxiv.org/abs/2602.04879.
    """

    unit: Unit = "token"
    statistic: Statistic = "ratio"
    aggregate: Literal["sum", "mean", "max"] = "mean"
    low: float | None = None
    high: float | None = None
    when: When = "always"
    max_staleness: int | None = None
    max_staleness_steps: int | None = None

    effects = frozenset({Effect.REJECT})

    def __post_init__(self) -> None:
        check_fields("reject.", self, Reject)
        bounds = [self.low, self.high]
        stale = {"max_staleness": self.max_staleness, "max_staleness_steps": self.max_staleness_steps}
        acts = [*bounds, *stale.values()] != [None] * 4
        expect(acts, "reject", "low or high or both", "neither", "nothing would be rejected")
        for name, most in stale.items():
            expect(most is None or most >= 0, f"reject.{name}", "a number >= 0", most, KEPT)
        check_interval("reject", self.statistic, self.low, self.high)
        if bounds == [None, None]:
            self._check_staleness_alone()

    def _check_staleness_alone(self) -> None:
        """Refuses fields about the ratio in a step that reads only ages."""
        fields = {
            "statistic": "ratio",
            "aggregate": "mean",
            "when": "always",
            "clamp": None,
            "over": "response",
        }
        for name, idle in fields.items():
            value = getattr(self, name, idle)
            why = f"add one, or remove {name}, because a bound on staleness alone reads no token"
            expect(value == idle, f"reject.{name}", "low or high beside it", value, why)

    @cached_property
    def needs(self) -> frozenset[Need]:
        reads = {
            Need.ADVANTAGES: self.when != "always",
            Need.AGES: self.max_staleness is not None,
            Need.AGE_STEPS: self.max_staleness_steps is not None,
        }
        return frozenset(need for need, is_read in reads.items() if is_read)

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        if not self._has_bounds:
            return ()
        of_value = statistics_of(self.unit, self.aggregate, self.statistic)
        if self._exceeds:
            of_value = (self._exceeds,)
        if self.when == "always":
            return of_value
        signs = ("advantage", "ratio") if self.when.startswith("outward") else ("advantage",)
        return of_value + tuple(key for name in signs for key in statistics_of(self.unit, "sum", name))

    def __call__(self, state: State, inputs: StepInputs) -> State:
        if self.max_staleness is not None:
            state = state.reject("sequence", ~(inputs.ages > self.max_staleness))
        if self.max_staleness_steps is not None:
            state = state.reject("sequence", ~(inputs.age_steps > self.max_staleness_steps))
        if not self._has_bounds:
            return state
        if self._exceeds:
            inside = inputs.table[self._exceeds] == 0
        else:
            low, high = self._limits
            value = inputs.total(self.unit, self.aggregate, self.statistic)
            # clamp and == take one operation less than two comparisons. NaN is outside: it equals nothing.
            inside = value <= high if low == -math.inf else value.clamp(low, high) == value
        if self.when != "always":
            inside = inside | ~applies(self.when, self.unit, inputs)
        return state.reject(self.unit, inside)

    @cached_property
    def _has_bounds(self) -> bool:
        return (self.low, self.high) != (None, None)

    @cached_property
    def _exceeds(self) -> StatisticKey | None:
        """The sum that replaces a maximum with only an upper bound.

        The maximum exceeds the bound if and only if some token does, and then this sum is above 0.
        """
        if self.unit == "token" or self.aggregate != "max" or self.low is not None:
            return None
        return StatisticKey("sum", self.unit, ExceedsLimit(self.statistic, self._limits[1]))

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The interval in the unit of the statistic: for ratios, logarithms."""
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        return (_log(low), _log(high)) if self.statistic == "ratio" else (low, high)


@dataclass(frozen=True)
class Veto(Step):
    """Drops a whole sequence if one of its ratios is below ``low`` or above ``high``.

    Source: verl PR 3984 (rollout_token_veto_threshold); SkyRL PR 849 (outlier_token_is_threshold).
    """

    low: float | None = None
    high: float | None = None

    unit = "sequence"
    effects = frozenset({Effect.REJECT})

    def __post_init__(self) -> None:
        check_fields("veto.", self, Veto)
        bounds = [self.low, self.high]
        expect(bounds != [None, None], "veto", "low or high or both", "neither", "nothing would be vetoed")
        is_ratio = self.low is None or self.low >= 0
        expect(is_ratio, "veto.low", "a number > 0", self.low, "no ratio is below 0")
        vetoes = self.low != 0 or self.high is not None
        expect(vetoes, "veto.low", "a number > 0", self.low, "nothing would be vetoed")
        low, high = 0.0 if self.low is None else self.low, math.inf if self.high is None else self.high
        expect(low <= 1 <= high, "veto", "low <= 1 <= high", bounds, KEPT)

    @cached_property
    def statistics(self) -> tuple[StatisticKey, ...]:
        low = () if self.low is None else (ExceedsLimit("k1", -_log(self.low)),)
        high = () if self.high is None else (ExceedsLimit("ratio", _log(self.high)),)
        return tuple(StatisticKey("sum", "sequence", over) for over in low + high)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        for key in self.statistics:
            state = state.reject("sequence", inputs.table[key] == 0)
        return state


@dataclass(frozen=True)
class Normalize(Step):
    """Divides the weights by their mean over the optimizer step.

    ``level`` says what has equal weight in the mean: tokens or sequences. With sequences, a token counts 1 /
    (response tokens of its sequence). Rejected tokens count, unless a non-finite behavior log-prob rejected
    them, their turn or their sequence. The result is biased, with low variance.

    The weights are divided by the largest weight before their mean is taken. Otherwise the weights of long
    sequences, such as e^-119, might all underflow in float32 although they differ.

    Source: Owen 2013, Monte Carlo theory, section 9.2; verl PR 3980 (rollout_is_batch_normalize).
    """

    level: Literal["token", "sequence"] = "token"

    needs = frozenset({Need.WHOLE_STEP})

    def __post_init__(self) -> None:
        check_fields("normalize.", self, Normalize)

    @property
    def statistics(self) -> tuple[StatisticKey, ...]:
        return () if self.level == "token" else (COUNT,)

    def number_for_step(self, batches: Batches, all_sum: AllSum) -> Tensor:
        """Computes the log of the mean weight of the step.

        Returns:
            [] float64; 0 if no weight is above 0.
        """
        logs = [_log_weights(state, inputs) for state, inputs in batches]
        largest = _largest(logs, all_sum)
        shares = (self._share(x - largest, inputs) for x, (_, inputs) in zip(logs, batches, strict=True))
        total, count = all_sum(_total(shares)).unbind()
        return torch.where(total > 0, largest + (total / count).log(), 0)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        log_weights = state.log_weights - inputs.plan[self]
        return state._replace(weights=log_weights.exp().to(state.weights.dtype), log_ratio=log_weights)

    def weight_range(self, before: WeightRange) -> WeightRange:
        # A weight is at most the number of tokens in the step. With level sequence, it is at most the longest
        # response times the number of sequences. No real step is large enough for more than MODEST.
        return WeightRange(0.0, MODEST)

    def _share(self, log_weights: Tensor, inputs: StepInputs) -> Tensor:
        """Returns the sum of e^log_weights and the number of tokens or sequences, [2]."""
        per_token = inputs.usable.double()
        if self.level == "sequence":
            count = inputs.table[COUNT].clamp_min(1)
            per_token = per_token / inputs.segments.expand_to_tokens("sequence", count)
        return torch.stack([(log_weights.exp() * per_token).sum(), per_token.sum()])


@dataclass(frozen=True)
class EssTruncate(Step):
    """Caps the weights at the step's effective sample size: w = min(w, ESS).

    ESS = (sum w)^2 / (n sum w^2) over the optimizer step's tokens, except those that a non-finite behavior
    log-prob rejects, alone or with their turn or sequence. It is in (0, 1]: 1 if all weights are equal, as
    on-policy, and small if few tokens carry the sum. The weights are divided by the largest weight first,
    because a weight such as e^89 overflows in float32.

    Source: P3O, Fakoor et al. 2026, https://arxiv.org/abs/2605.12380, equation 7 and algorithm 2; Relax PR
    234, which computes it over the optimizer step, as here.
    """

    needs = frozenset({Need.WHOLE_STEP})
    effects = frozenset({Effect.BOUND})

    def number_for_step(self, batches: Batches, all_sum: AllSum) -> Tensor:
        """Computes the effective sample size of the step as a fraction.

        Returns:
            [] float64; 1 if no token counts.
        """
        logs = [_log_weights(state, inputs) for state, inputs in batches]
        largest = _largest(logs, all_sum)
        shares = (self._share(x - largest, inputs) for x, (_, inputs) in zip(logs, batches, strict=True))
        total, square, count = all_sum(_total(shares)).unbind()
        # The scale of the weights cancels, so weights divided by the largest give the same number.
        return torch.where(square > 0, total.square() / (count * square), 1)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        cap = inputs.plan[self].to(state.weights.dtype)
        return state.bound(torch.minimum(state.weights, cap), state.log_ratio)

    def weight_range(self, before: WeightRange) -> WeightRange:
        return before.clamped(0.0, 1.0)

    @staticmethod
    def _share(log_weights: Tensor, inputs: StepInputs) -> Tensor:
        """Returns the sums of w and of w^2, and the number of tokens, [3]."""
        weights = log_weights.exp()
        return torch.stack([weights.sum(), weights.square().sum(), inputs.usable.double().sum()])


@dataclass(frozen=True)
class SecondMoment(Step):
    """Drops the tokens with the largest squared log-ratios of the optimizer step.

    It drops tokens until the mean over the rest is below ``threshold``. Tokens with equal values stay or go
    together, and the tokens with the smallest value always stay. This variant looks at all tokens; the paper
    drops only tokens that PPO would clip.

    Source: M2PO, https://arxiv.org/abs/2510.01161; AReaL (m2_threshold).
    """

    threshold: float = 0.04

    needs = frozenset({Need.WHOLE_STEP})
    effects = frozenset({Effect.REJECT})

    def __post_init__(self) -> None:
        check_fields("second_moment.", self, SecondMoment)
        why = "nothing would be kept"
        expect(self.threshold > 0, "second_moment.threshold", "a number > 0", self.threshold, why)

    def number_for_step(self, batches: Batches, all_sum: AllSum) -> Tensor:
        """Finds the largest squared log-ratio that stays.

        It searches the bits of that number byte by byte, with one SUM over ranks per byte, of 256 counts and
        256 sums. The result is exact, and no rank has to see the tokens of another.

        Returns:
            [] float64.
        """
        ranked = [_ranked(inputs) for _, inputs in batches]

        def below(cuts: Tensor) -> Tensor:
            """Counts and adds up the squared log-ratios up to each cut: [cuts, 2]."""
            return all_sum(_total(_up_to(cuts, values, sums) for values, sums in ranked))

        def none(cuts: Tensor) -> Tensor:
            return below(cuts)[:, 0] == 0

        def small(cuts: Tensor) -> Tensor:
            count, total = below(cuts).unbind(1)
            return (count == 0) | (total < self.threshold * count)

        device = batches[0][1].log_ratio.device
        smallest = _last(none, device) + 1
        return torch.maximum(_last(small, device), smallest).view(torch.float64)

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.reject("token", inputs.log_ratio.double().square() <= inputs.plan[self])


STEPS: dict[str, Callable[..., Step]] = {
    "reweight": Reweight,
    "min_prefix_reweight": MinPrefixReweight,
    "signed_clip": SignedClip,
    "truncate": Truncate,
    "clip": Clip,
    "reject": Reject,
    "veto": Veto,
    "second_moment": SecondMoment,
    "normalize": Normalize,
    "ess_truncate": EssTruncate,
}


def check_interval(where: str, statistic: str, low: float | None, high: float | None) -> None:
    """Raises ConfigError unless bounds keep on-policy data and some other data.

    Args:
        where: the step's name.
        low, high: None for no bound.
    """
    neutral, bounds = 1 if statistic == "ratio" else 0, [low, high]
    floor = -math.inf if statistic == "k1" else 0.0
    lower, upper = -math.inf if low is None else low, math.inf if high is None else high
    expect(lower <= neutral <= upper, where, f"low <= {neutral} <= high", bounds, KEPT)
    why = f"{statistic} is never below 0"
    expect(low is None or low >= floor, f"{where}.low", "a number >= 0", low, why)
    why = "only exactly on-policy data would be kept"
    expect(max(lower, floor) < upper, where, "low < high", bounds, why)


def applies(when: When, unit: Unit, inputs: StepInputs) -> Tensor:
    """Tells for each unit whether a rejection that is limited to ``when`` may act there."""
    advantage = inputs.total(unit, "sum", "advantage")
    if when == "negative_advantage":
        return advantage < 0
    if when == "positive_advantage":
        return advantage >= 0
    outward = advantage * inputs.total(unit, "sum", "ratio") > 0
    if when == "outward":
        return outward
    return outward & (advantage > 0 if when == "outward_positive" else advantage < 0)


def ratio_at(unit: Unit, aggregate: str) -> tuple[Unit, str]:
    """Returns what identifies a ratio: its unit and its aggregate.

    A token's own ratio has no aggregate.
    """
    return unit, "" if unit == "token" else aggregate


def _log_weights(state: State, inputs: StepInputs) -> Tensor:
    """Computes the log of each token's weight: [T] float64, -inf where it does not count."""
    log_weights = inputs.segments.expand_to_tokens(state.unit, state.log_weights)
    return torch.where(inputs.usable, log_weights, -torch.inf)


def _largest(micro_batches: Sequence[Tensor], all_sum: AllSum) -> Tensor:
    """Finds the largest number of all micro-batches and ranks, to within 1e-3.

    Ranks exchange only SUMs. So each rank computes how far its largest number is below ``FAR``, and the
    smallest of these distances is searched byte by byte, like the cut of ``SecondMoment``.

    Returns:
        [] float64; 0 if all numbers are -inf.
    """
    highest = torch.stack([torch.nn.functional.pad(x, (0, 1), value=-math.inf).amax() for x in micro_batches])
    distance = (FAR - highest.amax().double()).clamp_min(0)

    def none(cuts: Tensor) -> Tensor:
        return all_sum((distance <= cuts).double()) == 0

    largest = FAR - (_last(none, distance.device) + 1).view(torch.float64)
    return torch.where(largest > -torch.inf, largest, 0)


def _total(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def _ranked(inputs: StepInputs) -> tuple[Tensor, Tensor]:
    """Sorts the squared log-ratios of usable tokens, and computes their running sums.

    Tokens that are not usable become inf, so they are at the end.
    """
    values = torch.where(inputs.usable, inputs.log_ratio.double().square(), torch.inf).sort().values
    return values, torch.cat([values.new_zeros(1), values.cumsum(0)])


def _up_to(cuts: Tensor, values: Tensor, sums: Tensor) -> Tensor:
    count = torch.searchsorted(values, cuts, right=True)
    return torch.stack([count.double(), sums.index_select(0, count)], 1)


def _last(holds: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Finds the bits of the largest finite value >= 0 for which ``holds``.

    ``holds`` must be true up to some value and false beyond it.

    Returns:
        [] int64; -1 if it holds nowhere.
    """
    prefix = torch.zeros((), dtype=torch.int64, device=device)
    digits = torch.arange(256, device=device)
    for shift in range(56, -8, -8):
        bits = prefix + (digits[:128] if shift == 56 else digits) * 2**shift
        good = holds(bits.clamp(max=TOP).view(torch.float64)) & (bits <= TOP)
        last = good.sum() - 1
        prefix = bits.index_select(0, last.clamp_min(0).view(1)).squeeze(0)
    return torch.where(last < 0, -1, prefix)
