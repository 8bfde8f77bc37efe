"""Plans an optimizer step before it is trained: computes the numbers that couple its samples.

``train_one_step`` gets the iterator of the step's micro-batches, with every proximal log-prob and every
advantage. So a number for a whole step (``Normalize``, ``SecondMoment``), the kept tokens of a rollout, and
whether a group is kept do not depend on the micro-batches, the ranks or the order of the samples.

Collectives per step: those of the correction's statistics and of its coupled steps. ``denominator`` and
``group`` need two more SUMs over data x context parallel ranks: the number of samples per rank, and a table
with a row per sample. No tokens are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction, plan_step
from slime_ext.core.needs import Need
from slime_ext.core.state import Plan
from slime_ext.core.steps import STEPS
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError, DataError, warn_once
from slime_ext.host import rollout_data as data_of
from slime_ext.host import staleness
from slime_ext.host.packing import pack, require_usable
from slime_ext.host.ranks import Ranks
from slime_ext.host.rollout_data import Batch, SampleRow
from slime_ext.host.step_metrics import OptimizerStep
from slime_ext.hosts.contract import INIT_FLAG, HookCall
from slime_ext.ops.segments import to_device

OTHER = -1  # ``SampleRow.step`` of samples that another optimizer step trains
NOT_PLANNED = (
    f"{{what}}: expected a plan for the whole optimizer step, got a hook call without one: add {INIT_FLAG}, "
    "because otherwise each micro-batch is treated as a whole step, and the result depends on how samples "
    "are packed"
)
UNPLANNABLE = (
    "{what}: expected the proximal policy's log-probs before the optimizer step, got none: add "
    "--get-mismatch-metrics, because without it the host does not compute them if a rollout is one step, or "
    "under --use-rollout-logprobs; and remove miles' --skip-actor-forward-only, if it is there"
)


def rollout_data_postprocess(*positional: Any, **named: Any) -> None:
    """Does nothing and warns once; launch scripts needed this function until 0.1."""
    warn_once(
        "--rollout-data-postprocess-path: expected none, got slime_ext.host.rollout_data_postprocess, which "
        f"does nothing any more: remove the flag; {INIT_FLAG} is enough"
    )


def plan_for(call: HookCall, correction: Correction, tokens: Tokens, step: OptimizerStep) -> Plan:
    """Finds the plan of a hook call. Without one it warns once, and treats the call as a whole step.

    Raises:
        ConfigError: ``group`` has no plan, so nobody knows which samples share a prompt.
    """
    device = tokens.segments.mask.device
    planned, plan = step.plan or (None, None)
    places = step.samples.places(call.loss_masks) if planned == correction else None
    if plan is None or places is None:
        return _alone(correction, tokens, call.args)
    scale, keep = (None if v is None else to_device(v[places], device) for v in (plan.scale, plan.keep))
    return Plan(plan.numbers, scale, keep)


def _alone(correction: Correction, tokens: Tokens, args: Any) -> Plan:
    """Plans a hook call as an optimizer step, with every sequence as a rollout."""
    if Need.GROUPS in correction.needs:
        raise ConfigError(
            f"slime_ext.group: expected {INIT_FLAG} beside {correction.group}, got a hook call outside of an "
            "optimizer step, where nobody knows which samples share a prompt: add the flag, or use ignore"
        )
    warn_once(NOT_PLANNED.format(what=what_couples(correction)))
    segments = tokens.segments
    plan = plan_step(correction, [tokens], segments.all_sum)
    if correction.denominator == "host":
        return plan
    outcome = correction(tokens, plan)
    kept, count = segments.sum(outcome.keep.float()), segments.sum(segments.mask.float())
    if getattr(args, "calculate_per_token_loss", False):
        kept, count = kept.sum().expand_as(kept), count.clamp_min(1).sum().expand_as(count)
    return replace(plan, scale=torch.where(kept > 0, count / kept.clamp_min(1), 1))


def what_couples(correction: Correction) -> str:
    """Lists the keys of a correction that need a plan, for messages."""
    names = {cls: name for name, cls in STEPS.items()}
    coupled = [step for step in correction.steps if Need.WHOLE_STEP in step.needs]
    steps = [names.get(type(step), type(step).__name__) for step in coupled]
    kept = ["denominator: kept"] if correction.denominator != "host" else []
    group = [f"group: {correction.group}"] if correction.group != "ignore" else []
    return ", ".join([*steps, *kept, *group])


def compute_plan(
    correction: Correction,
    args: Any,
    batch: Batch,
    here: Ranks,
    rollout: dict[str, Any] | None = None,
    rollout_id: int | None = None,
    *,
    leaves_loss_alone: bool = False,
) -> Plan:
    """Plans an optimizer step. Every rank of the last pipeline stage calls it.

    Args:
        batch: the step's micro-batches on this rank, joined.
        rollout: this rank's whole rollout; ``group: rebaseline`` writes to its advantages.
        rollout_id: finds the samples' weight versions, if the batches do not carry them.
        leaves_loss_alone: whether a guard has taken the action ``metrics_only``.

    Returns:
        The plan, on the CPU, in the order of the samples on this rank.

    Raises:
        ConfigError: the data lack the proximal or the behavior policy's log-probs, or do not show which
            samples share a prompt.
        DataError: this rank has no samples.
        NonFiniteError: a proximal log-prob is not finite at a response token.
    """
    if not batch["loss_masks"]:  # the other ranks would wait for this one's part
        raise DataError(
            "rollout_data: expected a sample on every data parallel rank, got none on rank "
            f"{here.dp_rank} of {here.dp_size}: use a --global-batch-size that gives every rank a sample, "
            f"because {what_couples(correction)} needs all ranks"
        )
    tokens = _tokens_of(correction, args, batch, rollout_id, here)
    plan = plan_step(correction, [tokens], here.all_sum)
    if correction.denominator == "host" and correction.group == "ignore":
        return plan
    share = _local_rows(correction, args, batch, tokens, plan, here)
    if correction.group != "ignore" and rollout:
        others = data_of.rest_of(rollout, batch)  # of the group, in other optimizer steps
        share = torch.cat([share, *_rows_of_others(correction, args, others, rollout_id, plan, here)])
    rows, begin = _gathered(share, here)
    local = slice(begin, begin + len(batch["loss_masks"]))
    if correction.group != "ignore":
        _refuse_broken_groups(correction, args.n_samples_per_prompt, rows)
    if correction.group == "atomic":
        plan, rows = _without_broken_groups(plan, rows, local)
    changes_loss = getattr(args, "use_tis", False) and not leaves_loss_alone
    if correction.group == "rebaseline" and rollout and changes_loss:
        _rebaseline(args, rows, local, rollout, batch["loss_masks"])
    scale = _scale(correction, args, batch, rows)
    if scale is None:
        return plan
    return replace(plan, scale=torch.tensor(scale[local], dtype=torch.float64))


def _tokens_of(
    correction: Correction, args: Any, batch: Batch, rollout_id: int | None, here: Ranks
) -> Tokens:
    """Packs samples as if they were one micro-batch."""
    if batch["log_probs"] is None:
        raise ConfigError(UNPLANNABLE.format(what=what_couples(correction)))
    tokens = pack(data_of.call_of(batch, args), here.context)
    why = "look for an overflow in the trainer's forward pass"
    require_usable("log_probs", tokens.proximal, tokens.segments, why)
    if not correction.needs_ages:
        return tokens
    samples = staleness.samples_of(batch, rollout_id)
    return staleness.with_ages(tokens, batch["loss_masks"], correction, samples)


def _local_rows(
    correction: Correction, args: Any, batch: Batch, tokens: Tokens, plan: Plan, here: Ranks, step: int = 0
) -> Tensor:
    """Makes this rank's share of its samples' rows, [samples, columns of SampleRow] float64.

    Each rank that shares a sample's tokens counts its part of them. Only the first of these ranks fills the
    other columns, because the shares are added.
    """
    count, masks = len(batch["loss_masks"]), batch["loss_masks"]
    columns = {"step": [step] * count}
    for name, keys in (("rollout", data_of.ROLLOUT_IDS), ("denominator", data_of.MASK_SUMS)):
        columns[name] = data_of.column(data_of.first_of(batch, keys), count)
    if correction.group != "ignore":
        columns["group"] = data_of.group_keys(batch, args.n_samples_per_prompt)
    if correction.group == "rebaseline":
        columns["reward"] = data_of.column(batch["rewards"], count)
    rows = torch.zeros(count, len(SampleRow._fields), dtype=torch.float64, device=masks[0].device)
    for name, values in columns.items():
        if here.context.rank == 0 and None not in values:
            rows[:, SampleRow._fields.index(name)] = torch.tensor(values, dtype=torch.float64).to(rows)
    flags = (tokens.segments.mask, correction(tokens, plan).keep)
    counts = tokens.segments.local_sums([flag.float() for flag in flags])
    rows[:, [SampleRow._fields.index(name) for name in ("tokens", "kept")]] = counts.double().T
    return rows


def _rows_of_others(
    correction: Correction, args: Any, others: Batch, rollout_id: int | None, plan: Plan, here: Ranks
) -> Iterator[Tensor]:
    """Makes this rank's share of the rows of samples in other optimizer steps."""
    if others["loss_masks"]:
        tokens = _tokens_of(correction, args, others, rollout_id, here)
        yield _local_rows(correction, args, others, tokens, plan, here, step=OTHER)


def _gathered(rows: Tensor, here: Ranks) -> tuple[list[SampleRow], int]:
    """Joins the tables of all ranks. Returns the rows, and the index of this rank's first row."""
    counts = rows.new_zeros(here.dp_size)
    counts[here.dp_rank] = len(rows) if here.context.rank == 0 else 0
    ends = list(accumulate(map(int, data_of.numbers(here.all_sum(counts))), initial=0))
    table = rows.new_zeros(ends[-1], rows.shape[1])
    table[ends[here.dp_rank] : ends[here.dp_rank + 1]] = rows
    return [SampleRow(*row) for row in data_of.numbers(here.all_sum(table))], ends[here.dp_rank]


def _without_broken_groups(plan: Plan, rows: list[SampleRow], local: slice) -> tuple[Plan, list[SampleRow]]:
    """Drops every sample of a group with a rejected sample."""
    broken = data_of.broken_groups(rows)
    keep = torch.tensor([row.group not in broken for row in rows[local]])
    return replace(plan, keep=keep), [row._replace(kept=row.kept * (row.group not in broken)) for row in rows]


def _rebaseline(
    args: Any, rows: list[SampleRow], local: slice, rollout: dict[str, Any], loss_masks: list[Tensor]
) -> None:
    """Writes advantages without the rejected samples."""
    _refuse_split_rollouts(args, rollout)
    advantages = data_of.rebaselined(rows, by_std=getattr(args, "grpo_std_normalization", True))
    data_of.set_advantages(rollout, loss_masks, advantages[local])


def _refuse_broken_groups(correction: Correction, size: int, rows: list[SampleRow]) -> None:
    """Raises ConfigError if there are too many groups, or if steps split a group.

    There are too many groups if a resumed run changed the group size. Beside statistics of a whole step, no
    group may be split, because the statistics of a step that is not trained yet are not known.
    """
    this_step, other_steps = (
        {row.group for row in rows if (row.step == OTHER) is other} for other in (False, True)
    )
    wanted, groups = len(rows) / size, this_step | other_steps
    if wanted.is_integer() and len(groups) > wanted:
        raise ConfigError(
            f"slime_ext.group: expected {wanted:g} groups of {size} samples by their sample index, got "
            f"{len(groups)}: set the --n-samples-per-prompt that the run started with, or use ignore, "
            "because the run was resumed with another one"
        )
    if Need.WHOLE_STEP in correction.needs and this_step & other_steps:
        coupled = what_couples(replace(correction, denominator="host", group="ignore"))
        raise ConfigError(
            f"slime_ext.group: expected all samples of a prompt in one optimizer step beside {coupled}, got "
            "them in several steps: make --global-batch-size a multiple of --n-samples-per-prompt, or use "
            "ignore"
        )


def _refuse_split_rollouts(args: Any, rollout: Batch) -> None:
    """Raises ConfigError if the rollout has more or fewer samples than the flags say.

    slime then takes one baseline over all samples, not one per prompt.
    """
    count, prompts = len(rollout.get("raw_reward") or ()), getattr(args, "rollout_batch_size", None)
    if count and prompts and count != (wanted := prompts * args.n_samples_per_prompt):
        raise ConfigError(
            f"slime_ext.group: expected {wanted} samples (--rollout-batch-size x --n-samples-per-prompt) for "
            f"rebaseline, got {count}: use ignore or atomic, because slime takes one baseline over all "
            "samples if rollouts are split"
        )


def _scale(correction: Correction, args: Any, batch: Batch, rows: list[SampleRow]) -> list[float] | None:
    """Computes the factors that make the host divide by kept tokens. Returns None if all are 1."""
    if correction.denominator == "host":
        return None
    if getattr(args, "calculate_per_token_loss", False):
        return data_of.factors(rows, per_token=True)
    if data_of.first_of(batch, data_of.MASK_SUMS) is not None:
        return data_of.factors(rows)
    if correction.mask_scope == "all":
        return None  # slime before v0.3.0 divides a sample by the mask that the hook returns
    return data_of.factors([row._replace(rollout=i, denominator=row.tokens) for i, row in enumerate(rows)])
