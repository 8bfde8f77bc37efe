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
from slime_ext.host.hosts import Ranks
from slime_ext.host.packing import pack
from slime_ext.host.rollout_data import call_of
from slime_ext.host.step_plan import compute_plan
from slime_ext.tools.analysis.records import DumpedRollout

NO_ADVANTAGES = "needs advantages, which the dump does not hold"
NO_AGES = "needs the age of the sampling weights, which the dump does not hold"
NO_GROUPS = "needs to know which samples share a prompt, which the dump does not say"
STOPS = "on_nonfinite: raise stops the run: a behavior log-prob is not finite"
# Samples carry the number of their group already, and every sample is a rollout of its own.
ARGS = SimpleNamespace(n_samples_per_prompt=1, use_tis=True)
StepPart = tuple[Tensor | None, Tokens, Plan]


def missing_input(correction: Correction, rollout: DumpedRollout) -> str | None:
    """Why a correction cannot be applied to a rollout; None if it can."""
    reads_advantages = any(step.reads_advantages for step in correction.steps)
    reasons = {
        NO_ADVANTAGES: rollout.advantages is None and (reads_advantages or correction.group == "rebaseline"),
        NO_AGES: rollout.newest is None and correction.needs_ages,
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
    steps = rollout.steps or (0,) * rollout.count
    places = [[i for i, s in enumerate(steps) if s == step] for step in sorted(set(steps))]
    data = as_slime(rollout, places)
    plan = compute_plan(correction, ARGS, data, Ranks())  # group: rebaseline writes to the advantages
    of_sample = torch.arange(rollout.size).split(list(rollout.lengths))
    for own in places:
        tokens = pack(call_of(data, ARGS, own, advantages=True))
        tokens = replace(tokens, target=tokens.proximal, ages=None if ages is None else ages[own])
        at = torch.cat([of_sample[place] for place in own])
        yield at, tokens, plan.of(own, at.device)


def as_slime(rollout: DumpedRollout, places: list[list[int]]) -> dict[str, Any]:
    """A rollout as the data that slime hands to its postprocess function, one micro-batch per step."""
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
        "num_microbatches": [1] * len(places),
        "micro_batch_indices": places,
        "rollout_ids": list(range(rollout.count)),
        "rollout_mask_sums": [float(m.sum()) for m in rollout.mask.split(lengths)],
        "sample_indices": None if rollout.groups is None else list(rollout.groups),
        # A group's advantages are its rewards, centred and scaled: as rewards they give the same advantages.
        "rewards": [
            float(a[0]) if a.numel() else 0.0 for a in advantages or [rollout.mask[:0]] * rollout.count
        ],
    }
