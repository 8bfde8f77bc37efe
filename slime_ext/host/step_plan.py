"""What couples samples, settled once per rollout: slime's ``--rollout-data-postprocess-path`` names the
function here.

At that point every proximal log-prob, every advantage and the schedule of the optimizer steps are at hand and
nothing has been trained. So a number for a whole step (``Normalize``, ``SecondMoment``), the kept tokens of a
rollout and the fate of a group are what they are whatever the micro-batches, the ranks and the order of the
samples (``settle``). The hook then finds its share by the identity of the samples (``samples``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from slime_ext.correction import Correction, Plan, Tokens, plan_step
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import samples
from slime_ext.host.configured import correction_of_flags
from slime_ext.host.contract import PLAN, PLAN_FLAG, HookCall
from slime_ext.host.guards import warn_once
from slime_ext.host.ranks import ranks
from slime_ext.host.settle import RolloutPlan, settle, what_couples
from slime_ext.ops.segments import as_numbers

ALONE = (
    "{what}: expected a plan for the whole optimizer step, got a hook call alone: each micro-batch is "
    f"treated as a step of its own, so the result depends on how samples are packed; set {PLAN_FLAG} {PLAN}"
)


_current: RolloutPlan | None = None


def rollout_data_postprocess(
    args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None
) -> None:
    """Settles what couples the samples of a rollout, before it is trained; slime's call since v0.2.4.

    Writes to ``rollout_data`` for ``group: rebaseline`` alone: the advantages of groups with a rejected
    sample.

    Raises:
        ConfigError: the correction needs what this host or these flags do not provide.
        DataError: it couples samples and this rank has none.
    """
    global _current
    forget()
    correction = correction_of_flags(args)
    planned = correction is not None and correction.needs_plan
    if rollout_data is None:
        if planned:
            raise ConfigError(
                f"{PLAN_FLAG}: expected a call with the rollout's data, got one with the arguments alone: "
                f"{what_couples(correction)} needs slime v0.2.4 or newer; miles does not hand the data out"
            )
        return
    here = ranks()
    if not here.is_last_stage:
        return
    if rollout_data.get("loss_masks"):
        samples.remember(rollout_data)
    elif planned:  # no release hands such data out; without this rank's part the others would wait
        raise DataError(
            "rollout_data: expected a sample on every data parallel rank, got none on rank "
            f"{here.dp_rank} of {here.dp_size}: {what_couples(correction)} is settled over all of them"
        )
    if planned:
        _current = settle(correction, args, rollout_data, here)


def lookup(call: HookCall, correction: Correction) -> Plan | None:
    """The plan of a hook call's samples; None where nothing was settled for them."""
    if _current is None or _current.correction != correction:
        return None
    records = samples.of(call.loss_masks)
    if records is None:
        return None
    return _current.of([record.place for record in records], call.pg_loss.device)


def forget() -> None:
    """Forgets what was settled."""
    global _current
    _current = None


def plan_for(call: HookCall, correction: Correction, tokens: Tokens) -> Plan | None:
    """The plan of a hook call; without one the call is an optimizer step of its own, which is said once.

    Raises:
        ConfigError: ``group`` without a plan: which samples share a prompt is not known here.
    """
    if not correction.needs_plan:
        return None
    found = lookup(call, correction)
    return alone(correction, tokens, call.args) if found is None else found


def alone(correction: Correction, tokens: Tokens, args: Any) -> Plan:
    """The plan of tokens that are an optimizer step of their own, every sequence a rollout of its own."""
    if correction.group != "ignore":
        raise ConfigError(
            f"slime_ext.group: expected {PLAN_FLAG} {PLAN} beside {correction.group}, got a call without its "
            "plan: which samples share a prompt is not known there"
        )
    warn_once(ALONE.format(what=what_couples(correction)))
    segments = tokens.segments
    plan = plan_step(correction, [tokens], segments.all_sum)
    if correction.denominator == "host":
        return plan
    outcome = correction(tokens, plan)
    kept = segments.sum(as_numbers(outcome.keep, torch.float32))
    count = segments.sum(as_numbers(segments.mask, torch.float32))
    if getattr(args, "calculate_per_token_loss", False):
        kept, count = kept.sum().expand_as(kept), count.clamp_min(1).sum().expand_as(count)
    return replace(plan, scale=torch.where(kept > 0, count / kept.clamp_min(1), 1))
