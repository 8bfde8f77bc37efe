"""Defines a correction: its ratio, its loss and its steps.

The only loop over steps is here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

import torch

from slime_ext.core.centering import Center, check_center, mean_score, split
from slime_ext.core.fields import check_fields
from slime_ext.core.idle import check_steps, name_of
from slime_ext.core.losses import (
    SURROGATES,
    Bounds,
    Delightful,
    HostLoss,
    LossInputs,
    PpoClip,
    Reinforce,
    Surrogate,
    reads_proximal,
    score_factor,
    written_out,
)
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.measure import LARGEST_RATIO, StepSums, measure
from slime_ext.core.needs import ANY_AGE, PLANNED, Need
from slime_ext.core.state import (
    MODEST,
    NO_PLAN,
    Effect,
    Outcome,
    Plan,
    SequenceStatistics,
    State,
    Step,
    StepInputs,
    check_declared,
    weight_ranges,
)
from slime_ext.core.statistics import StatisticKey, tabulate
from slime_ext.core.steps import EssTruncate, Normalize
from slime_ext.core.terms import Term
from slime_ext.core.tokens import Tokens, Unit
from slime_ext.errors import ConfigError, expect, quoted
from slime_ext.ops.divergences import compared, widened
from slime_ext.ops.segments import AllSum, identity, selected

if TYPE_CHECKING:
    from torch import Tensor

Numerator = Literal["proximal", "target"]
Denominator = Literal["host", "kept"]
Grouping = Literal["ignore", "rebaseline", "atomic"]
# The statistics that ``SequenceStatistics`` holds.
OBSERVED = tuple(StatisticKey("sum", "sequence", name) for name in ("ratio", "count"))
HOST = HostLoss()


@dataclass(frozen=True)
class Correction:
    """Corrects the policy loss of packed tokens with a numerator, a surrogate and steps.

    Args:
        numerator: the policy whose ratio to the behavior policy is corrected. ``proximal`` corrects for what
            happened before the rollout is trained on. ``target`` also corrects for the optimizer steps within
            the rollout, and needs the target's log-probs.
        surrogate: the loss that the weights multiply.
        steps: applied in order.
        mask_scope: ``policy`` removes rejected tokens from the policy loss only; ``all`` returns reduced
            masks, so that entropy and reference-KL terms lose them, too.
        on_nonfinite: what happens at a behavior log-prob that fails ``ops.is_log_prob``: ``reject`` rejects
            its token or unit, ``raise`` raises.
        denominator: ``host`` keeps the host's divisor; ``kept`` divides by the number of kept tokens instead:
            of the rollout, or of the optimizer step if the host's loss is per token.
        group: what happens to the other samples of a prompt when one is rejected: ``ignore`` does nothing,
            ``rebaseline`` computes their advantages without it, ``atomic`` rejects them, too.
        terms: losses that are added at every response token with a finite behavior log-prob.
        center: subtracts the sampler's mean of the weighted score, whatever the surrogate; needs the
            sampler's head or its support. None: no centering.

    Raises:
        ConfigError: a field has an invalid value, a step changes nothing, or the combination would count a
            ratio twice. A YAML file is refused for the same reasons.
    """

    numerator: Numerator = "proximal"
    surrogate: Surrogate = HOST
    steps: tuple[Step, ...] = ()
    mask_scope: Literal["policy", "all"] = "policy"
    on_nonfinite: Literal["reject", "raise"] = "reject"
    denominator: Denominator = "host"
    group: Grouping = "ignore"
    terms: tuple[Term, ...] = ()
    center: Center | None = None

    def __post_init__(self) -> None:
        _check_parts(self)
        check_steps(self.steps, self.units, self.statistics)
        _forbid_double_count(self)
        _check_relations(self)
        _check_added(self)
        for i, step in enumerate(self.steps):
            if Need.WHOLE_STEP in step.needs:
                _check_coupled(self, i)

    @cached_property
    def is_identity(self) -> bool:
        """Whether the host's loss stays unchanged (metrics only)."""
        return not (self.steps or self.terms or self.center) and isinstance(self.surrogate, HostLoss)

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What the correction reads or returns besides log-probs and loss.

        A place that runs it may not offer everything.
        """
        has_own_loss = not isinstance(self.surrogate, HostLoss)
        is_needed = {
            Need.TARGET: self.numerator == "target" or has_own_loss or bool(self.terms),
            Need.ADVANTAGES: has_own_loss or self.center is not None,
            Need.GROUPS: self.group != "ignore",
            Need.KEPT_COUNT: self.denominator != "host",
            Need.MASKS: self.mask_scope != "policy",
            Need.HEAD: self.center is not None,
        }
        of_steps = (step.needs for step in self.steps)
        return frozenset(need for need, is_so in is_needed.items() if is_so).union(*of_steps)

    @cached_property
    def needs_plan(self) -> bool:
        """Whether the correction needs numbers over the whole optimizer step before it begins."""
        return not self.needs.isdisjoint(PLANNED)

    @cached_property
    def needs_ages(self) -> bool:
        """Whether the correction reads the samples' ages, in weight versions or in optimizer steps."""
        return not self.needs.isdisjoint(ANY_AGE)

    @cached_property
    def needs_proximal_head(self) -> bool:
        """Whether ``center`` reads the proximal policy's log-probs at the head.

        If the rollout is one optimizer step, they equal the target's.
        """
        of_weights = self.numerator == "proximal" and bool(self.token_steps)
        return self.center is not None and (of_weights or reads_proximal(self.surrogate))

    def __call__(self, tokens: Tokens, plan: Plan | None = None, *, observe: bool = False) -> Outcome:
        """Computes weights and keep flags for packed tokens, all detached.

        Args:
            plan: numbers of the optimizer step; None treats these tokens as the whole step, with
                ``denominator: host`` and ``group: ignore``.
            observe: also return the sequences' statistics, which metrics read.
        """
        if plan is None:
            is_coupled = Need.WHOLE_STEP in self.needs
            plan = plan_step(self, [tokens], tokens.segments.all_sum) if is_coupled else NO_PLAN
        statistics = self.observed_statistics if observe else self.statistics
        return self.decide(self.read(tokens, statistics, plan.numbers), plan, observe=observe)

    def decide(self, inputs: StepInputs, plan: Plan, *, observe: bool = False) -> Outcome:
        """Computes the same from inputs that are already read (``read``)."""
        state = self.run(inputs, self.steps)
        if plan.keep is not None:  # rejects whole groups, as if it were one more step
            state = state.before_step(len(self.steps)).reject("sequence", plan.keep)
        keep = inputs.kept(state)
        sequences = None
        if observe:
            log_ratio, count = (inputs.table[key] for key in OBSERVED)
            sequences = SequenceStatistics(log_ratio, count, state.keep.get("sequence"))
        expand = inputs.segments.expand_to_tokens
        # Selected, because the weight of a rejected token may be infinite, and infinity times 0 is NaN.
        weights = selected(expand(state.unit, state.weights), keep)
        clipped = torch.zeros_like(keep) if state.clipped is None else expand(state.unit, state.clipped)
        return Outcome(
            weights=weights,
            keep=keep,
            finite=inputs.finite,
            log_ratio=inputs.log_ratio,
            ratio=inputs.ratio,
            clipped=clipped,
            factor=weights if plan.scale is None else weights * expand("sequence", plan.scale),
            step_records=state.step_records,
            sequences=sequences,
            numbers=plan.numbers,
            head_factor=None if self.center is None else self._head_factor(inputs, plan),
        )

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The turns or sequences that one non-finite behavior log-prob rejects as a whole."""
        return tuple(dict.fromkeys(step.unit for step in self.steps if step.unit != "token"))

    @cached_property
    def statistics(self) -> tuple[StatisticKey, ...]:
        """The statistics over units that the steps read."""
        finite = (StatisticKey("sum", unit, name) for unit in self.units for name in ("count", "finite"))
        return tuple(dict.fromkeys((*finite, *(key for step in self.steps for key in step.statistics))))

    @cached_property
    def observed_statistics(self) -> tuple[StatisticKey, ...]:
        """``statistics``, and the statistics of sequences that metrics read."""
        return tuple(dict.fromkeys(self.statistics + OBSERVED))

    def read(
        self,
        tokens: Tokens,
        statistics: Sequence[StatisticKey] = (),
        numbers: Mapping[Step, Tensor] = NO_PLAN.numbers,
    ) -> StepInputs:
        """Computes what steps read: log-ratios, statistics and detached advantages.

        Args:
            statistics: the keys of the statistics to compute, one number per turn or sequence.
            numbers: the plan's number of each coupled step.

        Raises:
            ConfigError: the numerator is the target, and the tokens have no log-probs of it.
        """
        numerator = tokens.target if self.numerator == "target" else tokens.proximal
        if numerator is None:
            raise ConfigError(
                "target: expected log-probs [T], got None: pass target, because numerator: target reads it"
            )
        ratios = compared(numerator, tokens.behavior, tokens.segments.mask)
        advantages = None if tokens.advantages is None else widened(tokens.advantages)
        # These may be None. Their type says Tensor, because a step reads only those that it declares in
        # ``needs``, and the hook has checked that these are there.
        optional = cast("tuple[Tensor, Tensor, Tensor]", (advantages, tokens.ages, tokens.age_steps))
        table: dict[StatisticKey, Tensor] = {}
        inputs = StepInputs(tokens.segments, *ratios, *optional, self.units, table, numbers)
        table |= tabulate(statistics, inputs)  # only now, because statistics are sums of the inputs' values
        return inputs

    @cached_property
    def token_steps(self) -> tuple[Step, ...]:
        """The steps of single tokens, which give f beside ``center``."""
        return split(self.steps)[0]

    @cached_property
    def unit_steps(self) -> tuple[Step, ...]:
        """The steps of turns and sequences, which give m_t beside ``center``."""
        return split(self.steps)[1]

    def _head_factor(self, inputs: StepInputs, plan: Plan) -> Tensor:
        """Computes m_t, the factor of C_t that steps of turns and sequences set: [T].

        It is 0 at tokens that do not count. The loss is multiplied by the same factor.
        """
        state = self.run(inputs, self.unit_steps)
        if plan.keep is not None:
            state = state.reject("sequence", plan.keep)
        return selected(inputs.segments.expand_to_tokens(state.unit, state.weights), inputs.kept(state))

    def run(self, inputs: StepInputs, steps: Sequence[Step]) -> State:
        """Runs steps from the state without weights, and returns the last state."""
        state = inputs.start
        for place, step in enumerate(steps):
            state = step(state.before_step(place), inputs)
        return state

    def loss(
        self, outcome: Outcome, tokens: Tokens, host_loss: Tensor, bounds: Bounds
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the corrected policy loss per token, and where the surrogate clipped it.

        Args:
            host_loss: [T] the host's policy loss, with grad.
            bounds: the host's clip range.

        Returns:
            [T] with grad; and [T] bool, or None for the host's loss. The loss is 0 at rejected and masked
            tokens before terms and ``center`` add theirs. The identity returns the host's loss.
        """
        if self.is_identity:
            return host_loss, None
        if isinstance(self.surrogate, HostLoss):
            loss, clipped = host_loss, None
        else:
            # A token that is not kept must not reach the graph: 0 times an infinite slope is NaN. Its
            # log-ratio and advantage read 0, so that it is not clipped either.
            loss, clipped = self.surrogate(LossInputs(tokens, outcome.keep), bounds)
        # Without a graph, as in analyze, ``selected`` gives the same bits in less time.
        loss = torch.where(outcome.keep, loss, 0) if loss.requires_grad else selected(loss, outcome.keep)
        if self.center is not None:
            loss = self._centered_loss(self.center, outcome, tokens, loss, bounds)
        else:
            factor = outcome.factor.to(loss.dtype)
            loss = loss * (factor if self.bounds_products else _limited(factor, loss))
        for added in self.added(outcome, tokens):
            loss = loss + added
        return loss, clipped

    def added(self, outcome: Outcome, tokens: Tokens) -> Iterator[Tensor]:
        """Yields what each loss term adds: [T] nats.

        It is 0 at tokens without a finite behavior log-prob.
        """
        for term in self.terms:
            yield term(LossInputs(tokens, outcome.finite), outcome.numbers)

    def _centered_loss(
        self, center: Center, outcome: Outcome, tokens: Tokens, loss: Tensor, bounds: Bounds
    ) -> Tensor:
        """Computes m_t (f_t loss_t + A_t C_t): [T].

        Where m_t must be limited, both summands get the same limit. With two limits, the sum would not be
        centered.

        Args:
            loss: [T] before its weight, with grad.
        """
        if tokens.head is None:
            raise ConfigError(
                "center: expected the sampler's head beside the tokens, got none: pass "
                "Tokens(..., head=Head(...))"
            )
        factor, head_factor = outcome.factor.to(loss.dtype), outcome.head_factor
        assert head_factor is not None
        counts = head_factor > 0
        advantages = LossInputs(tokens, counts).advantages
        surrogate = written_out(self.surrogate, bounds)
        is_plain = isinstance(surrogate, Reinforce)  # the factor of its score is 1
        term = mean_score(
            self.token_steps,
            tokens.head,
            advantages,
            counts,
            self.run,
            center.top_k,
            numerator=self.numerator,
            factor=None if is_plain else functools.partial(score_factor, surrogate, bounds),
            numbers=outcome.numbers,
        )
        if not (self.bounds_products and self._bounds_head_factor and is_plain):
            factor, head_factor = (_limited(x, loss, advantages * term) for x in (factor, head_factor))
        return loss * factor + advantages * head_factor * term

    @cached_property
    def sets_weights(self) -> bool:
        """Whether a step turns ratios into weights."""
        return any(Effect.REWEIGHT in step.effects for step in self.steps)

    @cached_property
    def bounds_weights(self) -> bool:
        """Whether every weight times a loss of ordinary size is finite."""
        return weight_ranges(self.steps)[-1].high <= MODEST

    @cached_property
    def _bounds_head_factor(self) -> bool:
        """Whether every factor of C_t is as small as ``bounds_weights`` requires."""
        return weight_ranges(self.unit_steps)[-1].high <= MODEST

    @cached_property
    def bounds_products(self) -> bool:
        """Whether every product of a weight and a loss is finite, so that ``_limited`` need not cap any.

        The weights must be bounded and the loss of ordinary size. PPO's loss is not, because the target ratio
        has no bound where the advantage is negative.
        """
        return self.bounds_weights and not (self.sets_weights and isinstance(self.surrogate, PpoClip))


def _check_parts(correction: Correction) -> None:
    """Raises ConfigError unless every part has the right type. Each part has checked its fields."""
    check_fields("", correction)
    examples = {"steps": "steps=(Reweight(), Truncate(2.0))", "terms": "terms=(SquaredLogRatio(1e-3),)"}
    for name, kind in {"steps": Step, "terms": Term}.items():
        parts, why = getattr(correction, name), f"write {examples[name]}"
        expect(isinstance(parts, tuple), name, f"a tuple of {name}", quoted(parts), why)
        for i, part in enumerate(parts):
            expect(isinstance(part, kind), f"{name}[{i}]", f"a {kind.__name__}", quoted(part), why)
    surrogate, center, terms = correction.surrogate, correction.center, correction.terms
    wanted = f"one of {', '.join(kind.__name__ for kind in SURROGATES.values())}"
    is_one = isinstance(surrogate, tuple(SURROGATES.values()))
    expect(is_one, "surrogate", wanted, quoted(surrogate), "write surrogate=Reinforce()")
    is_one = center is None or isinstance(center, Center)
    expect(is_one, "center", "Center or None", quoted(center), "write center=Center(128)")
    for i, term in enumerate(terms):
        is_new = type(term) not in map(type, terms[:i])
        why = "write one term with the sum of the coefficients"
        expect(is_new, f"terms[{i}]", "each term once", "a second", why)
    for i, step in enumerate(correction.steps):
        _check_step(step, f"steps[{i}].{name_of(step)}")


def _check_step(step: Step, here: str) -> None:
    """Raises ConfigError unless a step's declarations are valid and its fields can be hashed."""
    check_declared(step, here)
    try:
        hash(step)
    except TypeError as error:
        what = "they identify the step; use a tuple for a list"
        raise ConfigError(f"{here}: expected fields that can be hashed, got {error}: {what}") from None


def _check_coupled(correction: Correction, i: int) -> None:
    """Raises ConfigError unless the coupled step's number can be known before the optimizer step."""
    step, before = correction.steps[i], correction.steps[:i]
    expect(step not in before, f"steps[{i}]", "a coupled step once", step, "remove one of them")
    why = "use proximal, because the step's number must be known before the optimizer step begins"
    _expect_proximal(correction, str(step), why)
    low, high, _ = weight_ranges(before)[-1]
    bounded = low < high < math.inf or not isinstance(step, Normalize)
    why = "add one, because an unbounded weight would decide the mean alone"
    expect(bounded, f"steps[{i}].normalize", "a truncate or clip step before it", "none", why)


def _check_relations(correction: Correction) -> None:
    """Raises ConfigError unless ``denominator`` and ``group`` can act.

    What is rejected must be known before the optimizer step begins.
    """
    keys = ("denominator", correction.denominator, "host"), ("group", correction.group, "ignore")
    for key, value, idle in ((k, v, i) for k, v, i in keys if v != i):
        why = "nothing would be rejected"
        expect(not correction.is_identity, key, f"{idle} without steps", value, why)
        why = "use proximal, because what is rejected must be known before the optimizer step begins"
        _expect_proximal(correction, f"{key}: {value}", why)
    reads_advantages = any(Need.ADVANTAGES in step.needs for step in correction.steps)
    free = correction.group != "rebaseline" or not reads_advantages
    wanted = "ignore or atomic beside a step that reads advantages"
    why = "rebaseline would change the advantages that the rejections depend on"
    expect(free, "group", wanted, correction.group, why)


def _check_added(correction: Correction) -> None:
    """Raises ConfigError unless terms and centering can act, at rejected tokens too."""
    for name, is_there in {"terms": correction.terms, "center": correction.center}.items():
        if not is_there:
            continue
        for key, idle in {"mask_scope": "policy", "denominator": "host"}.items():
            value = getattr(correction, key)
            why = f"remove {key}, because rejected tokens also get a loss from {name}"
            expect(value == idle, key, f"{idle} beside {name}", value, why)
    has_cap = any(isinstance(step, EssTruncate) for step in correction.steps)
    for i, term in enumerate(correction.terms):
        why = "add it, because its cap is the number that the term reads"
        expect(has_cap or not term.reads_ess, f"terms[{i}]", "the step ess_truncate beside it", "none", why)
    if correction.center is not None:
        is_linear = not isinstance(correction.surrogate, Delightful)
        why = "its gate reads the probability of one token, and the tail of a head is many tokens"
        expect(is_linear, "surrogate", "another surrogate beside center", "delightful", why)
        check_center(correction.steps)


def _expect_proximal(correction: Correction, beside: str, why: str) -> None:
    ok = correction.numerator == "proximal"
    expect(ok, "numerator", f"proximal with {beside}", correction.numerator, why)


def _forbid_double_count(correction: Correction) -> None:
    anchor = getattr(correction.surrogate, "anchor", None)
    if anchor is None or not correction.sets_weights:
        return
    wanted = "proximal beside a step that sets weights"
    why = "it divides by the behavior policy already; remove the step, or write surrogate: reinforce"
    expect(anchor != "behavior", "surrogate.anchor", wanted, anchor, why)
    ok, wanted = correction.numerator != "target", "proximal with this surrogate"
    why = "target / proximal would be counted twice; use numerator: proximal, or surrogate: reinforce"
    expect(ok, "numerator", wanted, correction.numerator, why)


def largest_product(dtype: torch.dtype) -> float:
    """Returns the cap on weight times loss of one token: max(bfloat16) ** 0.75 for float32.

    A quarter of the range of exponents remains, so that sums over many tokens cannot overflow.
    """
    largest: float = torch.finfo(torch.bfloat16 if dtype is torch.float32 else dtype).max ** 0.75
    return largest


def _limited(factor: Tensor, *losses: Tensor) -> Tensor:
    """Caps factors so that each product with a loss is at most ``largest_product``: [T].

    An infinite factor times 0 would be NaN.
    """
    largest = functools.reduce(torch.maximum, (loss.detach().abs() for loss in losses))
    # A loss below 1 counts as 1, so that the factor alone cannot overflow either.
    most = largest_product(largest.dtype) / largest.clamp_min(1)
    return torch.minimum(factor, most)


def plan_step(correction: Correction, batches: Sequence[Tokens], all_sum: AllSum = identity) -> Plan:
    """Computes the numbers of the coupled steps over all micro-batches and ranks of a step.

    Args:
        batches: the micro-batches of the optimizer step on this rank; every rank must have at least one.
        all_sum: SUM over all ranks that train the step, each token once (data x context parallel).

    Returns:
        A plan with the numbers. Each number includes the effect of the coupled steps before it.
    """
    numbers: dict[Step, Tensor] = {}
    # Every batch reads the same mapping of numbers, which grows from one coupled step to the next.
    batches_read = [correction.read(tokens, correction.statistics, numbers) for tokens in batches]
    for i, step in enumerate(correction.steps):
        if Need.WHOLE_STEP in step.needs:
            before = [(correction.run(inputs, correction.steps[:i]), inputs) for inputs in batches_read]
            numbers[step] = step.number_for_step(before, all_sum)
    return Plan(numbers)


@dataclass(frozen=True)
class HookInputs:
    """The tokens of one hook call, and everything else that decides the result.

    Args:
        host_loss: [T] the host's policy loss, with grad.
        plan: numbers of the optimizer step; None treats the tokens as the whole step.
        bounds: the host's clip range.
        changes_loss: whether to apply the correction; if not, only measure and return the host's loss.
        layout: the layout of the metrics to measure; None measures nothing.
        counts_sequences: whether this rank counts the sequences that it shares with others; one rank does.
    """

    tokens: Tokens
    host_loss: Tensor
    plan: Plan | None = None
    bounds: Bounds = field(default_factory=Bounds)
    changes_loss: bool = True
    layout: MetricsLayout | None = None
    counts_sequences: bool = True


@dataclass(frozen=True)
class HookResult:
    """The result of a hook call.

    ratio, clipped and rejected go to the host's own metrics.
    """

    loss: Tensor  # [T] with grad, as ``Correction.loss`` returns it, or the host's own
    finite: Tensor  # [T] bool, response tokens whose behavior log-prob is finite
    weights: Tensor  # [T] 0 at rejected and masked tokens
    ratio: Tensor  # [T] float32, 0 where there is none
    clipped: Tensor  # [T] float32, 1 where a bound or the surrogate acted
    rejected: Tensor  # [T] float32, 1 at response tokens that do not stay in the policy loss
    measured: StepSums | None = None


def apply(correction: Correction, inputs: HookInputs) -> HookResult:
    """Corrects the loss of a hook call, and measures the tokens."""
    tokens, layout = inputs.tokens, inputs.layout
    outcome = correction(tokens, inputs.plan, observe=layout is not None)
    loss, by_surrogate = inputs.host_loss, None
    if inputs.changes_loss:
        loss, by_surrogate = correction.loss(outcome, tokens, inputs.host_loss, inputs.bounds)
    clipped = outcome.clipped & outcome.finite
    clipped = clipped if by_surrogate is None else clipped | by_surrogate
    # The host averages the ratio over tokens in float32, and one infinite ratio would make the mean infinite.
    ratio = outcome.ratio.clamp(max=LARGEST_RATIO[4])
    measured = None
    if layout is not None:
        terms = [value.detach() for value in correction.added(outcome, tokens)] if correction.terms else []
        counts_sequences = inputs.counts_sequences
        measured = measure(tokens, outcome, layout, by_surrogate, terms, counts_sequences=counts_sequences)
    return HookResult(
        loss,
        outcome.finite,
        outcome.weights,
        ratio.float().mul_(outcome.finite),
        clipped.float(),
        (tokens.segments.mask > outcome.keep).float(),  # mask and not keep, in one operation
        measured,
    )
