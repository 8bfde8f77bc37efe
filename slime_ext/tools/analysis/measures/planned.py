"""Prepares what a correction reads of a rollout, including numbers over whole optimizer steps.

The host's own code computes these numbers: it gets the rollout in the form in which slime holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.core.correction import NO_PLAN, Correction, Plan, Tokens
from slime_ext.core.needs import Need
from slime_ext.core.state import StepInputs
from slime_ext.core.statistics import StatisticKey, tabulate
from slime_ext.ops.segments import selected
from slime_ext.tools.analysis.measures.measure import once_per_part
from slime_ext.tools.analysis.records import DumpedRollout

NO_ADVANTAGES = "needs advantages, which the dump does not hold"
NO_AGES = "needs the age of the sampling weights, which the dump does not hold"
NO_AGE_STEPS = "needs the optimizer steps since the sampling weights, which a dump does not hold"
NO_HEADS = (
    "center needs both policies' log-probs at the sampler's head or support, which the dump does not hold"
)
NO_GROUPS = "needs to know which samples answer the same prompt, which the dump does not hold"
STOPS = "on_nonfinite: raise would stop the run, because a value of the behavior policy is not a log-prob"
# Samples already have the number of their group, and each sample counts as one rollout.
ARGS = SimpleNamespace(n_samples_per_prompt=1, use_tis=True)


class StepPart(NamedTuple):
    """What a correction reads of an optimizer step.

    Attributes:
        places: of its tokens in the rollout, [T] int64; None: all of them, in order.
        host: the host's loss at ratio 1, which is also its slope, [T]; None without advantages.
    """

    places: Tensor | None
    tokens: Tokens
    inputs: StepInputs
    plan: Plan
    host: Tensor | None


def missing_input(correction: Correction, rollout: DumpedRollout) -> str | None:
    """Returns why a correction cannot be applied to a rollout; None if it can."""
    reads_advantages = any(Need.ADVANTAGES in step.needs for step in correction.steps)
    reasons = {
        NO_ADVANTAGES: rollout.advantages is None
        and (reads_advantages or correction.group == "rebaseline" or correction.center is not None),
        NO_AGES: rollout.newest is None and correction.needs_ages,
        NO_AGE_STEPS: any(Need.AGE_STEPS in step.needs for step in correction.steps),
        NO_HEADS: correction.center is not None and (rollout.candidates() is None or correction.needs_plan),
        NO_GROUPS: rollout.groups is None and correction.group != "ignore",
        STOPS: correction.on_nonfinite == "raise" and not bool(rollout.finite.equal(rollout.mask)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@once_per_part
def _shared(rollout: DumpedRollout) -> tuple[StepPart, dict[StatisticKey, Tensor]]:
    """Returns what corrections without a plan read, whatever their numerator: the target is the proximal.

    Their inputs read the table of statistics, which is empty at first.
    """
    tokens, table = replace(rollout.correction_input(), ages=_ages(rollout)), dict[StatisticKey, Tensor]()
    inputs = replace(Correction().read(tokens), table=table)
    return StepPart(None, tokens, inputs, NO_PLAN, _host(tokens)), table


def _host(tokens: Tokens) -> Tensor | None:
    return None if tokens.advantages is None else -selected(tokens.advantages, tokens.segments.mask)


def _ages(rollout: DumpedRollout) -> Tensor | None:
    """Returns the age of the oldest weights that sampled each sequence, as in the hook, [S] float64."""
    return None if rollout.newest is None else rollout.newest - rollout.oldest_versions()


def steps_of(correction: Correction, rollout: DumpedRollout) -> Iterator[StepPart]:
    """Yields what a correction reads of each optimizer step.

    If it needs no plan, the whole rollout is one step. All such corrections share what they read. The first
    correction that reads a statistic computes it for the others.
    """
    if not correction.needs_plan:
        step, table = _shared(rollout)
        table |= tabulate([key for key in correction.statistics if key not in table], step.inputs)
        yield step._replace(inputs=step.inputs.with_units(correction.units))
        return
    # Importing them imports all of host/, which takes longer than most corrections of a small run.
    from slime_ext.host.packing import pack
    from slime_ext.host.ranks import Ranks
    from slime_ext.host.rollout_data import KEYS, call_of
    from slime_ext.host.step_plan import compute_plan

    def taken(places: list[int]) -> dict[str, Any]:
        return {
            key: None if data.get(key) is None else [data[key][place] for place in places] for key in KEYS
        }

    ages = _ages(rollout) if correction.needs_ages else None
    data, steps = as_slime(rollout), rollout.steps or (0,) * rollout.count
    of_sample = torch.arange(rollout.size).split(list(rollout.lengths))
    for step in sorted(set(steps)):
        samples = [i for i, step_of_sample in enumerate(steps) if step_of_sample == step]
        # The plan comes before the batch, because group: rebaseline writes to the rollout's advantages
        plan = compute_plan(correction, ARGS, taken(samples), Ranks(), data)
        batch = taken(samples)
        tokens = pack(call_of(batch, ARGS))
        tokens = replace(tokens, target=tokens.proximal, ages=None if ages is None else ages[samples])
        at = torch.cat([of_sample[place] for place in samples])
        inputs = correction.read(tokens, correction.statistics, plan.numbers)
        yield StepPart(at, tokens, inputs, plan, _host(tokens))


def as_slime(rollout: DumpedRollout) -> dict[str, Any]:
    """Returns a rollout in the form in which slime's trainer holds it."""
    lengths = list(rollout.lengths)

    def split(values: Tensor | None) -> list[Tensor] | None:
        return None if values is None else list(values.split(lengths))

    advantages = split(rollout.advantages)
    return {
        "log_probs": split(rollout.proximal),
        "rollout_log_probs": split(rollout.behavior),
        "loss_masks": split(rollout.mask.int()),
        "advantages": advantages,
        "total_lengths": [p + n for p, n in zip(rollout.prompt_lengths, lengths, strict=True)],
        "response_lengths": lengths,
        "rollout_ids": list(range(rollout.count)),
        "rollout_mask_sums": [float(m.sum()) for m in rollout.mask.split(lengths)],
        "sample_indices": None if rollout.groups is None else list(rollout.groups),
        # A group's advantages are its centred and scaled rewards. As rewards, they give the same advantages.
        "rewards": [
            float(a[0]) if a.numel() else 0.0 for a in advantages or [rollout.mask[:0]] * rollout.count
        ],
    }
