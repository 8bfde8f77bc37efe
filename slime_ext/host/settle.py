"""Settles what couples the samples of a rollout, over all micro-batches, steps and ranks.

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

from slime_ext.correction import Correction, Plan, Tokens, plan_step
from slime_ext.errors import ConfigError
from slime_ext.facts import Step
from slime_ext.host import ages, siblings, step_metrics
from slime_ext.host import rollout_data as data_of
from slime_ext.host.guards import require_finite
from slime_ext.host.packing import pack
from slime_ext.host.ranks import Ranks
from slime_ext.host.siblings import Row
from slime_ext.ops.segments import as_numbers


@dataclass(frozen=True)
class RolloutPlan:
    """What was settled for the samples of one rollout on this rank; nothing of it lives on the device.

    Args:
        step_of: optimizer step of each place, -1: not trained.
        numbers: per optimizer step, what its coupled steps settled.
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
            return _on(device, torch.tensor([values[place] for place in places], dtype=dtype))

        numbers = self.numbers[self.step_of[places[0]]] if places else {}
        numbers = {step: _on(device, number) for step, number in numbers.items()}
        return Plan(numbers, taken(self.scale, torch.float64), taken(self.keep, torch.bool))


def what_couples(correction: Correction) -> str:
    """The keys of a correction that need a plan, for messages."""
    steps = [_snake(type(step).__name__) for step in correction.steps if step.is_coupled]
    kept = ["denominator: kept"] if correction.denominator != "host" else []
    group = [f"group: {correction.group}"] if correction.group != "ignore" else []
    return ", ".join([*steps, *kept, *group])


def settle(correction: Correction, args: Any, data: dict[str, Any], here: Ranks) -> RolloutPlan:
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
    steps = data_of.places_by_step(data, args, here.dp_size)
    relates = correction.denominator != "host" or correction.group != "ignore"
    looks = [_look(correction, args, data, places, here, counts=relates) for places in steps]
    step_of = [-1] * len(data["loss_masks"])
    for number, places in enumerate(steps):
        for place in places:
            step_of[place] = number
    plan = RolloutPlan(correction, step_of, [look.numbers for look in looks])
    if not relates:
        return plan
    rows, mine = _gathered(_local_rows(correction, args, data, step_of, looks, here), here)
    return _related(plan, args, data, rows, mine)


@dataclass(frozen=True)
class _Look:
    """One optimizer step's samples on this rank: settled numbers, and this rank's share of their tokens."""

    places: Sequence[int]
    numbers: Mapping[Step, Tensor]
    shares: Tensor | None = None  # [samples, 2] float64: response tokens, kept tokens


def _look(
    correction: Correction,
    args: Any,
    data: dict[str, Any],
    places: Sequence[int],
    here: Ranks,
    *,
    counts: bool,
) -> _Look:
    """Looks at one optimizer step as if it were one micro-batch; ``counts``: also at what would be kept."""
    call = data_of.call_of(data, args, places, advantages=correction.needs_advantages)
    packed = pack(call, here.context)
    require_finite("log_probs", packed.proximal, packed.segments, "the trainer's forward pass overflowed")
    aged = ages.ages_of(call)
    if correction.needs_ages:
        ages.require(call, aged)
    tokens = Tokens(
        packed.segments, packed.proximal, packed.behavior, advantages=packed.advantages, ages=aged
    )
    plan = plan_step(correction, [tokens], here.all_sum)
    look = _Look(places, data_of.on_host(plan.numbers))
    if not counts:
        return look
    flags = (packed.segments.mask, correction(tokens, plan).keep)
    return replace(look, shares=packed.segments.sum_shares([as_numbers(f, torch.float32) for f in flags]))


def _local_rows(
    correction: Correction,
    args: Any,
    data: dict[str, Any],
    step_of: Sequence[int],
    looks: Sequence[_Look],
    here: Ranks,
) -> Tensor:
    """[samples, columns of Row] float64: this rank's share of its samples' rows.

    Ranks that share a sample's tokens each count their own; the first of them says the rest.
    """
    count = len(step_of)
    nothing = [0.0] * count
    wanted = {
        "rollout": data_of.column(data_of.first_of(data, data_of.ROLLOUT_IDS), count),
        "group": data_of.group_keys(data, args.n_samples_per_prompt)
        if correction.group != "ignore"
        else nothing,
        "step": step_of,
        "denominator": data_of.column(data_of.first_of(data, data_of.MASK_SUMS), count),
        "reward": data_of.column(data["rewards"], count) if correction.group == "rebaseline" else nothing,
    }
    first = here.context.rank == 0
    listed = {name: values if first and None not in values else nothing for name, values in wanted.items()}
    device = looks[0].shares.device
    rows = torch.tensor([listed.get(name, nothing) for name in Row._fields], dtype=torch.float64).T.to(device)
    for look in looks:
        rows[list(look.places), Row._fields.index("tokens")] = look.shares[:, 0]
        rows[list(look.places), Row._fields.index("kept")] = look.shares[:, 1]
    return rows


def _gathered(rows: Tensor, here: Ranks) -> tuple[list[Row], range]:
    """The table of all ranks' samples, and which of its rows are this rank's."""
    counts = rows.new_zeros(here.dp_size)
    counts[here.dp_rank] = len(rows) if here.context.rank == 0 else 0
    ends = list(accumulate(data_of.numbers(here.all_sum(counts)), initial=0))
    mine = range(int(ends[here.dp_rank]), int(ends[here.dp_rank + 1]))
    table = rows.new_zeros(int(ends[-1]), rows.shape[1])
    table[mine.start : mine.stop] = rows
    return [Row(*row) for row in data_of.numbers(here.all_sum(table))], mine


def _related(plan: RolloutPlan, args: Any, data: dict[str, Any], rows: list[Row], mine: range) -> RolloutPlan:
    """The plan with what the rows mean for each other."""
    correction = plan.correction
    if correction.group != "ignore":
        _require_whole_groups(rows, args.n_samples_per_prompt)
    if correction.group == "atomic":
        broken = siblings.broken_groups(rows)
        rows = siblings.without(rows, broken)
        plan = replace(plan, keep=[rows[i].group not in broken for i in mine])
    acts = getattr(args, "use_tis", False) and not step_metrics.leaves_loss_alone()
    if correction.group == "rebaseline" and acts:
        _refuse_split(args, data)
        advantages = siblings.rebaselined(rows, by_std=getattr(args, "grpo_std_normalization", True))
        data["advantages"] = [
            was if advantages[i] is None else torch.full_like(was, advantages[i])
            for was, i in zip(data["advantages"], mine, strict=True)
        ]
    return plan if correction.denominator == "host" else _divided(plan, args, data, rows, mine)


def _require_whole_groups(rows: list[Row], size: int) -> None:
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


def _divided(plan: RolloutPlan, args: Any, data: dict[str, Any], rows: list[Row], mine: range) -> RolloutPlan:
    """The plan with the factors that make the host divide by the kept tokens."""
    if getattr(args, "calculate_per_token_loss", False):
        factors = siblings.token_factors(rows)
    elif not data_of.divides_by_returned_masks(data):
        factors = siblings.rollout_factors(rows)
    elif plan.correction.mask_scope == "all":
        return plan  # the host does it itself: slime before v0.3.0 divides a sample by its returned mask
    else:
        own = [row._replace(rollout=i, denominator=row.tokens) for i, row in enumerate(rows)]
        factors = siblings.rollout_factors(own)
    return replace(plan, scale=[factors[i] for i in mine])


def _on(device: torch.device, values: Tensor) -> Tensor:
    """From the host's memory to the device, without waiting for it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
