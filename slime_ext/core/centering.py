"""``center``: any correction's weighted score, centered over the tokens that the sampler could have drawn.

Steps that read only one token's ratio give the weight f of every candidate, as they do for the sampled token,
and the surrogate gives the factor of its score: 1 with REINFORCE; with PPO's loss p_v / o_v, o the proximal
policy, and 0 where the clip acts at the sign of A_t. Their product is g_v of ``ops.centering``. The factor
m_t of turns and sequences multiplies C_t as it multiplies the loss:

    loss_t = m_t (f(p_y / q_y) surrogate_t + A_t C_t)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from slime_ext.core.needs import ANY_AGE, Need
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.state import ABSENT, Effect, Head, State, Step, StepInputs, Support, expect
from slime_ext.core.steps import Normalize, Reject, Reweight
from slime_ext.errors import DataError
from slime_ext.ops.centering import Candidates, centering, exact_centering
from slime_ext.ops.segments import Segments

Run = Callable[[StepInputs, Sequence[Step]], State]
Factor = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of target, proximal, behavior, advantages [N]
NONE_PLANNED: Mapping[Step, Tensor] = MappingProxyType({})
BY_POSITION = ("by_shard", "shard_sum")  # aggregates over what comes before a token


@dataclass(frozen=True)
class Center:
    """Subtracts the sampler's mean of the weighted score, from its ``top_k`` most likely tokens.

    Source: Marek and Ryabinin 2026, https://arxiv.org/abs/2609.20807; slime, --use-score-centering, whose
    default is 128.
    """

    top_k: int = 128

    def __post_init__(self) -> None:
        why = "it is how many tokens the sampler hands out"
        expect(self.top_k >= 1, "center.top_k", "a number >= 1", self.top_k, why)


def split(steps: Sequence[Step]) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Token-level steps, which give f, and steps of turns and sequences, which give m.

    At most one step sets weights (``core.idle``). A token-level bound goes with the weights that it bounds,
    and ``Normalize`` with those that it divides, whatever its mean is over. ``ZeroOutside`` reads a ratio of
    its own, so its own unit decides.
    """
    of_tokens: list[Step] = []
    of_units: list[Step] = []
    weights = of_tokens
    for step in (part for whole in steps for part in _parts(whole)):
        own = of_tokens if step.unit == "token" and not step.statistics else of_units
        if Effect.REWEIGHT in step.effects:
            weights = own
        bounds = Effect.BOUND in step.effects and not isinstance(step, ZeroOutside)
        of_weights = isinstance(step, Normalize) or (bounds and own is of_tokens)
        (weights if of_weights else own).append(step)
    return tuple(of_tokens), tuple(of_units)


def _parts(step: Step) -> Iterator[Step]:
    """A rejection of tokens that also drops old sequences, as two; any other step as it is."""
    if not (isinstance(step, Reject) and step.unit == "token" and step.needs & ANY_AGE):
        yield step
        return
    if (step.low, step.high) != (None, None):
        yield replace(step, max_staleness=None, max_staleness_steps=None)
    yield Reject("sequence", max_staleness=step.max_staleness, max_staleness_steps=step.max_staleness_steps)


def check_center(steps: Sequence[Step]) -> None:
    """Raises ConfigError at a step that has no f: its weight depends on earlier tokens, or it is a user's
    step of tokens that reads others."""
    of_tokens = split(steps)[0]
    for i, step in enumerate(steps):
        of_before = any(key.aggregate in BY_POSITION for key in step.statistics)
        expect(
            not of_before,
            f"steps[{i}]",
            "steps of single tokens, turns or sequences beside center",
            type(step).__name__,
            "its weight depends on the tokens before, so the head has none of its own",
        )
        is_users = not type(step).__module__.startswith("slime_ext.")
        expect(
            not (is_users and any(step is other for other in of_tokens) and _reads_others(step)),
            f"steps[{i}]",
            "unit sequence or turn beside center",
            f"unit token of {type(step).__name__}, which reads more than the token",
            "the head has no sequence of its own",
        )


def _reads_others(step: Step) -> bool:
    """Whether a token's weight changes with the tokens that share its sequence or its optimizer step, or with
    their age."""
    if Need.WHOLE_STEP in step.needs:
        return True
    p, q = torch.tensor([[-1.0, -2.5, -0.5], [-2.0, -1.0, -1.5]], dtype=torch.float64)
    there, found = torch.ones(3, dtype=torch.bool), []
    for lengths in ([3], [1, 1, 1]):
        inputs = StepInputs(Segments.whole(lengths, there), p - q, there, p, q, advantages=torch.ones_like(p))
        state = inputs.start if Effect.REWEIGHT in step.effects else Reweight()(inputs.start, inputs)
        state = step(state, inputs)
        found.append(torch.where(inputs.kept(state), state.weights, 0))
    return bool(step.needs & ANY_AGE) or not torch.equal(*found)


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
    """[T] C_t, with a gradient through the trainer's log-probs at the head alone.

    Args:
        steps: those of single tokens.
        advantages: [T], 0 where no token counts.
        counts: [T] bool; where False a head may hold anything, and C_t is 0.
        numerator: whose ratio to the sampler the steps read.
        factor: ``score_factor`` of the surrogate; None: 1, as of REINFORCE.
        numbers: of the coupled steps, as the plan has them.

    Raises:
        DataError: a head of another width than ``top_k``, or sides that do not fit each other.
    """
    _check_shapes(head, len(counts), top_k)
    reads_advantages = any(Need.ADVANTAGES in step.needs for step in steps)

    def weight(given: Candidates) -> Tensor:
        log_p, log_q, log_o = (x.reshape(-1) for x in (given.trainer, given.sampler, given.proximal))
        there = torch.ones_like(log_p, dtype=torch.bool)
        of_row = ABSENT
        if reads_advantages or factor is not None:
            of_row = given.spread(advantages).reshape(-1).to(log_p.dtype)
        weights = torch.ones_like(log_p)
        if steps:
            of = log_p if numerator == "target" else log_o
            segments = Segments.whole([len(there)], there)
            inputs = StepInputs(segments, of - log_q, there, of, log_q, advantages=of_row, plan=numbers)
            state = run(inputs, steps)
            weights = torch.where(inputs.kept(state), state.weights, 0)
        if factor is not None:  # which may be 0 where the weight is infinite
            most = torch.finfo(weights.dtype).max
            weights = weights.clamp(max=most) * factor(log_p, log_o, log_q, of_row)
            weights = weights.clamp(max=most**0.75)  # leaves room for the advantage and log p
        return weights.view_as(given.trainer)

    own = weight if steps or factor is not None else None
    if isinstance(head, Support):
        return exact_centering(head.sampler, head.trainer, head.offsets, own, counts, head.proximal)
    return centering(head.sampler, head.trainer, own, counts, head.proximal)


def _check_shapes(head: Head | Support, tokens: int, top_k: int) -> None:
    """Raises DataError unless the sides of a head fit each other, and the tokens."""
    sides = [head.sampler, head.trainer, *([] if head.proximal is None else [head.proximal])]
    shapes = [tuple(side.shape) for side in sides]
    got = " and ".join(map(str, shapes))
    if isinstance(head, Support):
        fits = head.sampler.dim() == 1 and head.offsets.shape == (tokens + 1,) and len(set(shapes)) == 1
        if not fits:
            raise DataError(
                f"support: expected log-probs of the same tokens from sampler and trainer and {tokens + 1} "
                f"offsets, got {got} and offsets {tuple(head.offsets.shape)}: write one list for all tokens"
            )
    elif set(shapes) != {(tokens, top_k)}:
        raise DataError(
            f"head: expected log-probs of {top_k} tokens (center.top_k) from sampler and trainer, got "
            f"{got}: ask the sampler for as many"
        )
