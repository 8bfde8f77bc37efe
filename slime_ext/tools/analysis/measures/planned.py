"""Rollouts -> what a correction reads of them, with what is computed over whole optimizer steps.

The host's own code computes the plan: it is shown the rollout as slime would hold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import NO_PLAN, Correction, Plan, Tokens
from slime_ext.core.needs import Need
from slime_ext.host.hosts import Ranks
from slime_ext.host.packing import pack
from slime_ext.host.rollout_data import KEYS, call_of
from slime_ext.host.step_plan import compute_plan
from slime_ext.tools.analysis.records import DumpedRollout

NO_ADVANTAGES = "needs advantages, which the dump does not hold"
NO_AGES = "needs the age of the sampling weights, which the dump does not hold"
NO_AGE_STEPS = "needs the optimizer steps since the sampling weights, which a dump does not hold"
NO_HEADS = (
    "center needs both policies' log-probs at the sampler's head or support, which the dump does not hold"
)
NO_GROUPS = "needs to know which samples share a prompt, which the dump does not say"
STOPS = "on_nonfinite: raise stops the run: a value of the behavior policy is no log-prob"
# Samples carry the number of their group already, and every sample is a rollout of its own.
ARGS = SimpleNamespace(n_samples_per_prompt=1, use_tis=True)
StepPart = tuple[Tensor | None, Tokens, Plan]


def missing_input(correction: Correction, rollout: DumpedRollout) -> str | None:
    """Why a correction cannot be applied to a rollout; None if it can."""
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


def steps_of(correction: Correction, rollout: DumpedRollout) -> Iterator[StepPart]:
    """Per optimizer step the places of its tokens in the rollout (None: all, in order), the tokens and the
    plan; a single part where steps make no difference."""
    # [S] float64, age of the oldest weights that sampled the sequence, as the hook has it
    ages = rollout.newest - rollout.oldest_versions() if correction.needs_ages else None
    if not correction.needs_plan:
        yield None, replace(rollout.correction_input(), ages=ages), NO_PLAN
        return
    data, steps = as_slime(rollout), rollout.steps or (0,) * rollout.count
    of_sample = torch.arange(rollout.size).split(list(rollout.lengths))
    for step in sorted(set(steps)):
        own = [place for place, of_place in enumerate(steps) if of_place == step]
        # group: rebaseline writes to the rollout's advantages
        plan = compute_plan(correction, ARGS, _taken(data, own), Ranks(), data)
        batch = _taken(data, own)
        tokens = pack(call_of(batch, ARGS))
        tokens = replace(tokens, target=tokens.proximal, ages=None if ages is None else ages[own])
        at = torch.cat([of_sample[place] for place in own])
        yield at, tokens, plan


def _taken(data: dict[str, Any], places: list[int]) -> dict[str, Any]:
    return {key: None if data.get(key) is None else [data[key][place] for place in places] for key in KEYS}


def as_slime(rollout: DumpedRollout) -> dict[str, Any]:
    """A rollout as slime's trainer holds it."""
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
        # A group's advantages are its rewards, centred and scaled: as rewards they give the same advantages.
        "rewards": [
            float(a[0]) if a.numel() else 0.0 for a in advantages or [rollout.mask[:0]] * rollout.count
        ],
    }
