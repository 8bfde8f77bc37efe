"""What couples samples, computed once per rollout: slime's ``--rollout-data-postprocess-path`` names the
function here.

At that point every proximal log-prob, every advantage and the schedule of the optimizer steps are at hand and
nothing has been trained. So a number for a whole step (``Normalize``, ``SecondMoment``), the kept tokens of a
rollout and the fate of a group are what they are whatever the micro-batches, the ranks and the order of the
samples. The hook then finds its share by the identity of the samples' loss masks.

Collectives per rollout: those of the correction's statistics once per optimizer step, the coupled steps' own,
and, for ``denominator`` and ``group``, two SUMs over data x context parallel ranks: of the number of samples
per rank, and of one table with a row per sample. No tokens are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction, plan_step
from slime_ext.core.state import Plan, Step, Tokens
from slime_ext.core.steps import STEPS
from slime_ext.errors import ConfigError, DataError, warn_once
from slime_ext.host import rollout_data as data_of
from slime_ext.host import staleness, step_metrics
from slime_ext.host.configured import correction_of_flags
from slime_ext.host.contract import PLAN, PLAN_FLAG, HookCall
from slime_ext.host.hosts import Ranks, ranks
from slime_ext.host.packing import pack, require_finite
from slime_ext.host.rollout_data import SampleRow, samples_of
from slime_ext.ops.segments import to_device

ALONE = (
    "{what}: expected a plan for the whole optimizer step, got a hook call alone: each micro-batch is "
    f"treated as a step of its own, so the result depends on how samples are packed; set {PLAN_FLAG} {PLAN}"
)


@dataclass(frozen=True)
class RolloutPlan:
    """What was computed for the samples of one rollout on this rank; nothing of it lives on the device.

    Args:
        step_of: optimizer step of each place, -1: not trained.
        numbers: per optimizer step, the numbers of its coupled steps.
        scale, keep: one per place; None: 1, true.
    """

    correction: Correction
    step_of: Sequence[int]
    numbers: Sequence[Mapping[Step, Tensor]]
    scale: Sequence[float] | None = None
    keep: Sequence[bool] | None = None

    def of(self, places: Sequence[int], device: torch.device) -> Plan:
        """The plan of one micro-batch; its samples are of one optimizer step."""

        def taken(values: Sequence | None, dtype: torch.dtype) -> Tensor | None:
            if values is None:
                return None
            return to_device(torch.tensor([values[place] for place in places], dtype=dtype), device)

        found = self.numbers[self.step_of[places[0]]] if places else {}
        numbers = {step: to_device(number, device) for step, number in found.items()}
        return Plan(numbers, taken(self.scale, torch.float64), taken(self.keep, torch.bool))


_current: RolloutPlan | None = None


def rollout_data_postprocess(
    args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None
) -> None:
    """Computes what couples the samples of a rollout, before it is trained; slime's call since v0.2.4.

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
        data_of.remember_samples(rollout_data)
    elif planned:  # no release hands such data out; without this rank's part the others would wait
        raise DataError(
            "rollout_data: expected a sample on every data parallel rank, got none on rank "
            f"{here.dp_rank} of {here.dp_size}: {what_couples(correction)} is computed over all of them"
        )
    if planned:
        _current = compute_plan(correction, args, rollout_data, here)


def forget() -> None:
    """Forgets the plan."""
    global _current
    _current = None


def plan_for(call: HookCall, correction: Correction, tokens: Tokens) -> Plan:
    """The plan of a hook call; without one the call is an optimizer step of its own, with one warning.

    Raises:
        ConfigError: ``group`` without a plan: which samples share a prompt is not known here.
    """
    if _current is not None and _current.correction == correction:
        records = samples_of(call.loss_masks)
        if records is not None:
            return _current.of([record.place for record in records], call.pg_loss.device)
    return _alone(correction, tokens, call.args)


def _alone(correction: Correction, tokens: Tokens, args: Any) -> Plan:
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
    kept, count = segments.sum(outcome.keep.float()), segments.sum(segments.mask.float())
    if getattr(args, "calculate_per_token_loss", False):
        kept, count = kept.sum().expand_as(kept), count.clamp_min(1).sum().expand_as(count)
    return replace(plan, scale=torch.where(kept > 0, count / kept.clamp_min(1), 1))


def what_couples(correction: Correction) -> str:
    """The keys of a correction that need a plan, for messages."""
    names = {cls: name for name, cls in STEPS.items()}
    steps = [names[type(step)] for step in correction.steps if step.is_coupled]
    kept = ["denominator: kept"] if correction.denominator != "host" else []
    group = [f"group: {correction.group}"] if correction.group != "ignore" else []
    return ", ".join([*steps, *kept, *group])


def compute_plan(correction: Correction, args: Any, data: dict[str, Any], here: Ranks) -> RolloutPlan:
    """Everything that couples the samples of a rollout; every rank of the last pipeline stage calls it.

    Raises:
        ConfigError: the proximal or the behavior policy's log-probs are not in the data, or which samples
            share a prompt is not.
        NonFiniteError: a proximal log-prob is not finite at a response token.
    """
    if data.get("log_probs") is None:
        raise ConfigError(
            f"{what_couples(correction)}: expected the proximal policy's log-probs before the optimizer "
            "step, got none: slime leaves them out where a rollout is one step, and under "
            "--use-rollout-logprobs; add --get-mismatch-metrics, which makes it compute them"
        )
    relates = correction.denominator != "host" or correction.group != "ignore"
    steps = data_of.places_by_step(data, args, here.dp_size)
    step_of = [-1] * len(data["loss_masks"])
    numbers, shares = [], []
    for number, places in enumerate(steps):
        for place in places:
            step_of[place] = number
        tokens, plan = _plan_of_step(correction, args, data, places, here)
        numbers.append(data_of.on_host(plan.numbers))
        if relates:
            flags = (tokens.segments.mask, correction(tokens, plan).keep)
            shares.append((places, tokens.segments.local_sums([flag.float() for flag in flags])))
    plan = RolloutPlan(correction, step_of, numbers)
    if not relates:
        return plan
    rows, mine = _gathered(_local_rows(plan, args, data, shares, here), here)
    return _related(plan, args, data, rows, mine)


def _plan_of_step(
    correction: Correction, args: Any, data: dict[str, Any], places: Sequence[int], here: Ranks
) -> tuple[Tokens, Plan]:
    """One optimizer step's tokens on this rank, as if they were one micro-batch, and their plan."""
    call = data_of.call_of(data, args, places, advantages=correction.needs_advantages)
    tokens = pack(call, here.context)
    require_finite("log_probs", tokens.proximal, tokens.segments, "the trainer's forward pass overflowed")
    tokens = staleness.with_ages(tokens, call, required=correction.needs_ages)
    return tokens, plan_step(correction, [tokens], here.all_sum)


def _local_rows(
    plan: RolloutPlan,
    args: Any,
    data: dict[str, Any],
    shares: Sequence[tuple[Sequence[int], Tensor]],
    here: Ranks,
) -> Tensor:
    """[samples, columns of SampleRow] float64: this rank's share of its samples' rows.

    Ranks that share a sample's tokens each count their own; the first of them says the rest.

    Args:
        shares: per optimizer step its samples' places, and [2, samples] response tokens and kept tokens.
    """
    count, group = len(plan.step_of), plan.correction.group
    columns = {"step": plan.step_of}
    for name, keys in (("rollout", data_of.ROLLOUT_IDS), ("denominator", data_of.MASK_SUMS)):
        columns[name] = data_of.column(data_of.first_of(data, keys), count)
    if group != "ignore":
        columns["group"] = data_of.group_keys(data, args.n_samples_per_prompt)
    if group == "rebaseline":
        columns["reward"] = data_of.column(data["rewards"], count)
    rows = torch.zeros(count, len(SampleRow._fields), dtype=torch.float64, device=shares[0][1].device)
    for name, values in columns.items():
        if here.context.rank == 0 and None not in values:
            rows[:, SampleRow._fields.index(name)] = torch.tensor(values, dtype=torch.float64).to(rows)
    for places, share in shares:
        for name, values in zip(("tokens", "kept"), share, strict=True):
            rows[list(places), SampleRow._fields.index(name)] = values.double()
    return rows


def _gathered(rows: Tensor, here: Ranks) -> tuple[list[SampleRow], range]:
    """The table of all ranks' samples, and which of its rows are this rank's."""
    counts = rows.new_zeros(here.dp_size)
    counts[here.dp_rank] = len(rows) if here.context.rank == 0 else 0
    ends = list(accumulate(data_of.numbers(here.all_sum(counts)), initial=0))
    mine = range(int(ends[here.dp_rank]), int(ends[here.dp_rank + 1]))
    table = rows.new_zeros(int(ends[-1]), rows.shape[1])
    table[mine.start : mine.stop] = rows
    return [SampleRow(*row) for row in data_of.numbers(here.all_sum(table))], mine


def _related(
    plan: RolloutPlan, args: Any, data: dict[str, Any], rows: list[SampleRow], mine: range
) -> RolloutPlan:
    """The plan with what the rows mean for each other."""
    correction = plan.correction
    if correction.group != "ignore":
        _require_whole_groups(rows, args.n_samples_per_prompt)
    if correction.group == "atomic":
        broken = data_of.broken_groups(rows)
        rows = data_of.without_groups(rows, broken)
        plan = replace(plan, keep=[rows[i].group not in broken for i in mine])
    acts = getattr(args, "use_tis", False) and not step_metrics.current.leaves_loss_alone
    if correction.group == "rebaseline" and acts:
        _refuse_split(args, data)
        advantages = data_of.rebaselined(rows, by_std=getattr(args, "grpo_std_normalization", True))
        data["advantages"] = [
            was if advantages[i] is None else torch.full_like(was, advantages[i])
            for was, i in zip(data["advantages"], mine, strict=True)
        ]
    return plan if correction.denominator == "host" else _divided(plan, args, data, rows, mine)


def _require_whole_groups(rows: list[SampleRow], size: int) -> None:
    """As many samples as whole groups have, in more groups: the host counted on from another size."""
    wanted, found = len(rows) / size, len({row.group for row in rows})
    if wanted.is_integer() and found > wanted:
        raise ConfigError(
            f"slime_ext.group: expected {wanted:g} groups of {size} samples by their sample index, got "
            f"{found}: the run went on with another --n-samples-per-prompt than it began with; use ignore"
        )


def _refuse_split(args: Any, data: dict[str, Any]) -> None:
    """slime's baseline is a prompt's only while there are as many samples as the flags say."""
    found, prompts = len(data.get("raw_reward") or ()), getattr(args, "rollout_batch_size", None)
    if found and prompts and found != prompts * args.n_samples_per_prompt:
        wanted = prompts * args.n_samples_per_prompt
        raise ConfigError(
            f"slime_ext.group: expected {wanted} samples (--rollout-batch-size x --n-samples-per-prompt) for "
            f"rebaseline, got {found}: slime takes one baseline over all samples of split rollouts; use "
            "ignore or atomic"
        )


def _divided(
    plan: RolloutPlan, args: Any, data: dict[str, Any], rows: list[SampleRow], mine: range
) -> RolloutPlan:
    """The plan with the factors that make the host divide by the kept tokens."""
    if getattr(args, "calculate_per_token_loss", False):
        factors = data_of.token_factors(rows)
    elif data_of.first_of(data, data_of.MASK_SUMS) is not None:
        factors = data_of.rollout_factors(rows)
    elif plan.correction.mask_scope == "all":
        return plan  # the host does it itself: slime before v0.3.0 divides a sample by its returned mask
    else:
        own = [row._replace(rollout=i, denominator=row.tokens) for i, row in enumerate(rows)]
        factors = data_of.rollout_factors(own)
    return replace(plan, scale=[factors[i] for i in mine])
