"""``center``: centers a correction's weighted score over the tokens that the sampler could have drawn.

The factor g_v of ``ops.centering`` is the product of two numbers:

- the weight f of the candidate, from the steps that read only one token's ratio;
- the factor of its score, from the surrogate. With REINFORCE it is 1. With PPO's loss it is p_v / o_v, where
  o is the proximal policy, and 0 where PPO clips that ratio at the sign of A_t.

The steps of turns and sequences give a factor m_t, which multiplies the loss and C_t:

    loss_t = m_t (f(p_y / q_y) surrogate_t + A_t C_t)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from slime_ext.core.fields import check_fields
from slime_ext.core.idle import is_ours
from slime_ext.core.needs import ANY_AGE, Need
from slime_ext.core.state import Effect, State, Step, StepInputs
from slime_ext.core.statistics import ABSENT
from slime_ext.core.steps import Normalize, Reject, Reweight
from slime_ext.core.tokens import Head, Support
from slime_ext.errors import DataError, expect
from slime_ext.ops.segments import Segments, selected

if TYPE_CHECKING:
    from torch import Tensor

    from slime_ext.ops.centering import Candidates

Run = Callable[[StepInputs, Sequence[Step]], State]
Factor: TypeAlias = (
    "Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]"  # takes target, proximal, behavior, advantages
)
NONE_PLANNED: Mapping[Step, Tensor] = MappingProxyType({})
BY_POSITION = ("by_shard", "shard_sum")  # aggregates over the tokens before a token


@dataclass(frozen=True)
class Center:
    """Subtracts the sampler's mean of the weighted score.

    The mean is over the sampler's ``top_k`` most likely tokens and a model of the rest, or over its support.

    Source: Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807; slime, --use-score-centering, whose
    default is 128.
    """

    top_k: int = 128

    def __post_init__(self) -> None:
        check_fields("center.", self, Center)
        why = "the sampler reports that many tokens"
        expect(self.top_k >= 1, "center.top_k", "a number >= 1", self.top_k, why)


def split(steps: Sequence[Step]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Splits steps into those of single tokens (f) and all others (m).

    At most one step sets weights (``core.idle``). A token-level bound goes with the weights that it bounds,
    and ``Normalize`` with the weights that it divides, whatever its ``level``. A step that
    ``sets_zero`` reads a ratio of its unit, so that unit decides.
    """
    of_tokens: list[Step] = []
    of_units: list[Step] = []
    weights = of_tokens
    for step in (part for whole in steps for part in _parts(whole)):
        by_unit = of_tokens if step.unit == "token" and not step.statistics else of_units
        if Effect.REWEIGHT in step.effects:
            weights = by_unit
        bounds = Effect.BOUND in step.effects and not step.sets_zero
        of_weights = isinstance(step, Normalize) or (bounds and by_unit is of_tokens)
        (weights if of_weights else by_unit).append(step)
    return tuple(of_tokens), tuple(of_units)


def _parts(step: Step) -> Iterator[Step]:
    """Splits a rejection of tokens that also drops old sequences into two steps.

    Any other step stays as it is.
    """
    if not (isinstance(step, Reject) and step.unit == "token" and step.needs & ANY_AGE):
        yield step
        return
    if (step.low, step.high) != (None, None):
        yield replace(step, max_staleness=None, max_staleness_steps=None)
    yield Reject("sequence", max_staleness=step.max_staleness, max_staleness_steps=step.max_staleness_steps)


def check_center(steps: Sequence[Step]) -> None:
    """Raises ConfigError at a step that cannot give the tokens of a head a weight.

    Its weight depends on earlier tokens or on what earlier steps keep, or it is a user's step of unit token
    that reads other tokens.
    """
    of_tokens = split(steps)[0]
    for i, step in enumerate(steps):
        of_before = any(key.aggregate in BY_POSITION for key in step.statistics)
        expect(
            not of_before,
            f"steps[{i}]",
            "steps of single tokens, turns or sequences beside center",
            type(step).__name__,
            "remove one of the two, because its weight depends on earlier tokens, not on its token alone",
        )
        expect(
            getattr(step, "over", "response") == "response",
            f"steps[{i}].over",
            "response beside center",
            "kept",
            "remove over or center, because the steps that multiply the center are computed without those "
            "that reject single tokens",
        )
        expect(
            is_ours(step) or all(step is not other for other in of_tokens) or not _reads_others(step),
            f"steps[{i}]",
            "unit sequence or turn beside center",
            f"unit token of {type(step).__name__}, which reads more than the token",
            "change its unit, because a token of the head belongs to no sequence",
        )


def _reads_others(step: Step) -> bool:
    """Tells whether a token's weight depends on other tokens, or on its age.

    The other tokens may be those of its sequence or those of its optimizer step.
    """
    if Need.WHOLE_STEP in step.needs or step.needs & ANY_AGE:
        return True
    p, q = torch.tensor([[-1.0, -2.5, -0.5], [-2.0, -1.0, -1.5]], dtype=torch.float64)
    there, weights = torch.ones(3, dtype=torch.bool), []
    for lengths in ([3], [1, 1, 1]):
        inputs = StepInputs(Segments.whole(lengths, there), p - q, there, p, q, advantages=torch.ones_like(p))
        state = inputs.start if Effect.REWEIGHT in step.effects else Reweight()(inputs.start, inputs)
        state = step(state, inputs)
        weights.append(torch.where(inputs.kept(state), state.weights, 0))
    return not torch.equal(*weights)


def mean_score(
    steps: Sequence[Step],
    head: Head | Support,
    advantages: Tensor,
    counts: Tensor,
    run: Run,
    top_k: int,
    *,
    numerator: Literal["proximal", "target"] = "target",
    factor: Factor | None = None,
    numbers: Mapping[Step, Tensor] = NONE_PLANNED,
) -> Tensor:
    """Computes C_t, with a gradient through the trainer's log-probs at the head alone.

    Args:
        steps: the steps of single tokens.
        advantages: [T], 0 where no token counts.
        counts: [T] bool; where False a head may hold anything, and C_t is 0.
        numerator: the policy whose ratio to the sampler the steps read.
        factor: ``score_factor`` of the surrogate; None: 1, as with REINFORCE.
        numbers: the numbers of the coupled steps in the plan.

    Returns:
        [T] nats.

    Raises:
        DataError: a head has another width than ``top_k``, or its tensors do not fit each other.
    """
    _check_shapes(head, len(counts), top_k)
    reads_advantages = any(Need.ADVANTAGES in step.needs for step in steps)

    def weight(candidates: Candidates) -> Tensor:
        log_p, log_q, log_o = (
            x.reshape(-1) for x in (candidates.trainer, candidates.sampler, candidates.proximal)
        )
        there = torch.ones_like(log_p, dtype=torch.bool)
        of_row = ABSENT
        if reads_advantages or factor is not None:
            of_row = candidates.spread(advantages).reshape(-1).to(log_p.dtype)
        weights = torch.ones_like(log_p)
        if steps:
            of = log_p if numerator == "target" else log_o
            segments = Segments.whole([len(there)], there)
            inputs = StepInputs(segments, of - log_q, there, of, log_q, advantages=of_row, plan=numbers)
            state = run(inputs, steps)
            weights = selected(state.weights, inputs.kept(state))
        if factor is not None:  # the weight is capped first, because infinity times a factor of 0 is NaN
            most = torch.finfo(weights.dtype).max
            weights = weights.clamp(max=most) * factor(log_p, log_o, log_q, of_row)
            weights = weights.clamp(max=most**0.75)  # leaves room for the advantage and log p
        return weights.view_as(candidates.trainer)

    # Not at the top: torch.autograd.Function needs torch, and a command reads configurations without it.
    from slime_ext.ops.centering import centering, exact_centering

    of_candidates = weight if steps or factor is not None else None
    if isinstance(head, Support):
        return exact_centering(head.sampler, head.trainer, head.offsets, of_candidates, counts, head.proximal)
    return centering(head.sampler, head.trainer, of_candidates, counts, head.proximal)


def _check_shapes(head: Head | Support, tokens: int, top_k: int) -> None:
    """Raises DataError unless the tensors of a head fit each other and the tokens."""
    sides = [head.sampler, head.trainer, *([] if head.proximal is None else [head.proximal])]
    shapes = [tuple(side.shape) for side in sides]
    got = " and ".join(map(str, shapes))
    if isinstance(head, Support):
        fits = head.sampler.dim() == 1 and head.offsets.shape == (tokens + 1,) and len(set(shapes)) == 1
        if not fits:
            raise DataError(
                f"support: expected log-probs [N] of the same tokens from sampler and trainer, and "
                f"{tokens + 1} offsets, got shapes {got}, and {tuple(head.offsets.shape)} for the offsets: "
                "concatenate the supports of all tokens"
            )
    elif set(shapes) != {(tokens, top_k)}:
        raise DataError(
            f"head: expected log-probs of {top_k} tokens (center.top_k) from sampler and trainer, got shapes "
            f"{got}: ask the sampler for {top_k} tokens"
        )
