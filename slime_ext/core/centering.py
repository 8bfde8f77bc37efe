"""``center``: any correction's token weights, centered over the sampler's head.

Steps that read only one token's ratio give the weight f of every token of the head, as they do for the
sampled token. The factor m_t of turns and sequences multiplies C_t as it multiplies the loss:

    loss_t = m_t (-A_t f(p_y / q_y) log p_y + A_t C_t)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_ext.core.needs import ANY_AGE, Need
from slime_ext.core.scoped import ZeroOutside
from slime_ext.core.state import ABSENT, Effect, Head, State, Step, StepInputs, expect
from slime_ext.core.steps import Reject, Reweight
from slime_ext.errors import DataError
from slime_ext.ops.centering import centering
from slime_ext.ops.segments import Segments

Run = Callable[[StepInputs, Sequence[Step]], State]
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

    A token-level bound goes with the weights that it bounds. ``ZeroOutside`` reads a ratio of its own, so its
    own unit decides.
    """
    of_tokens: list[Step] = []
    of_units: list[Step] = []
    weights = of_tokens
    for step in (part for whole in steps for part in _parts(whole)):
        own = of_tokens if step.unit == "token" and not step.statistics else of_units
        if Effect.REWEIGHT in step.effects:
            weights = own
        bounds = Effect.BOUND in step.effects and not isinstance(step, ZeroOutside)
        (weights if bounds and own is of_tokens else own).append(step)
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
    """Whether a token's weight changes with the tokens that share its sequence, or with their age."""
    p, q = torch.tensor([[-1.0, -2.5, -0.5], [-2.0, -1.0, -1.5]], dtype=torch.float64)
    there, found = torch.ones(3, dtype=torch.bool), []
    for lengths in ([3], [1, 1, 1]):
        inputs = StepInputs(Segments.whole(lengths, there), p - q, there, p, q, advantages=torch.ones_like(p))
        state = inputs.start if Effect.REWEIGHT in step.effects else Reweight()(inputs.start, inputs)
        state = step(state, inputs)
        found.append(torch.where(inputs.kept(state), state.weights, 0))
    return bool(step.needs & ANY_AGE) or not torch.equal(*found)


def mean_score(
    steps: Sequence[Step], head: Head, advantages: Tensor, counts: Tensor, run: Run, top_k: int
) -> Tensor:
    """[T] C_t, with a gradient through the trainer's log-probs at the head alone.

    Args:
        steps: those of single tokens.
        advantages: [T], 0 where no token counts.
        counts: [T] bool; where False a head may hold anything, and C_t is 0.

    Raises:
        DataError: a head of another width than ``top_k``.
    """
    if head.sampler.shape != head.trainer.shape or head.sampler.shape[1:] != (top_k,):
        shapes = tuple(head.sampler.shape), tuple(head.trainer.shape)
        raise DataError(
            f"head: expected log-probs of {top_k} tokens (center.top_k) from sampler and trainer, got "
            f"{shapes[0]} and {shapes[1]}: ask the sampler for as many"
        )

    reads_advantages = any(Need.ADVANTAGES in step.needs for step in steps)

    def weight(log_p: Tensor, log_q: Tensor, rows: slice) -> Tensor:
        flat = log_p.reshape(-1), log_q.reshape(-1)
        there = torch.ones_like(flat[0], dtype=torch.bool)
        of_row = ABSENT
        if reads_advantages:
            of_row = advantages[rows, None].expand_as(log_p).reshape(-1).to(log_p.dtype)
        inputs = StepInputs(
            Segments.whole([len(there)], there), flat[0] - flat[1], there, *flat, advantages=of_row
        )
        state = run(inputs, steps)
        return torch.where(inputs.kept(state), state.weights, 0).view_as(log_p)

    return centering(head.sampler, head.trainer, weight if steps else None, counts)
