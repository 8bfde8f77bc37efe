"""slime's rollout data, release by release: what each optimizer step trains, which sample a hook call's
tensors belong to, and what the samples of one rollout or one prompt mean for each other.

Read once per rollout, before training; where waiting for the device is no loss. A rollout is what the host
counts once in its loss (slime may split it into several samples); a group is the samples of one prompt.
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.host.contract import HookCall

Data = Mapping[str, Any]
MASK_SUMS = ("rollout_mask_sums", "group_mask_sums")  # the second in v0.3.0 alone
ROLLOUT_IDS = ("rollout_ids", "group_ids")
EPSILON = 1e-6  # what slime adds to a group's standard deviation


def first_of(data: Data, keys: Sequence[str]) -> Any:
    """The value of the first key that is there."""
    return next((data[key] for key in keys if data.get(key) is not None), None)


def column(values: Any, count: int) -> list[Any]:
    """A per-sample column as Python numbers: a list, a range or a tensor; None where the host has none."""
    if values is None:
        return [None] * count
    if isinstance(values, Tensor):
        return values.tolist()
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def numbers(values: Tensor) -> list[Any]:
    """A small table as Python numbers."""
    return values.tolist()


def on_host(values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Single numbers off the device, where they would be lost when the host puts its memory to sleep."""
    return {key: value.cpu() for key, value in values.items()}


def places_by_step(data: Data, args: Any, dp_size: int) -> list[list[int]]:
    """The places, in this rank's lists, of the samples that each optimizer step trains.

    slime since v0.3.0 hands the schedule out; before, each step took the next global_batch_size / ranks.
    """
    if "micro_batch_indices" in data:
        ends = accumulate(data["num_microbatches"], initial=0)
        return [
            [place for batch in data["micro_batch_indices"][start:stop] for place in batch]
            for start, stop in pairwise(ends)
        ]
    size = data.get("dynamic_global_batch_size", args.global_batch_size) // dp_size
    count = len(data["loss_masks"])
    return [list(range(start, start + size)) for start in range(0, count // size * size, size)]


def call_of(data: Data, args: Any, places: Sequence[int], *, advantages: bool) -> HookCall:
    """The hook call that one micro-batch of these samples would make, without a loss.

    Raises:
        ConfigError: the rollout recorded no log-probs.
    """
    keys = {"train_log_probs": "log_probs"} | {
        key: key
        for key in (
            *("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens"),
            *("weight_versions", *(["advantages"] if advantages else [])),
        )
    }
    given = {
        name: None if data.get(key) is None else [data[key][place] for place in places]
        for name, key in keys.items()
    }
    return HookCall.of(args, {"pg_loss": torch.zeros(0, device=data["loss_masks"][0].device), **given})


def group_keys(data: Data, group_size: int) -> list[int]:
    """Which samples share a prompt: by the host's sample index, or by the place in the whole rollout.

    Raises:
        ConfigError: the host's data has neither for every sample.
    """
    count = len(data["loss_masks"])
    for key in ("sample_indices", "partition"):
        indices = column(data.get(key), count)
        if None not in indices:
            return [index // group_size for index in indices]
    raise ConfigError(
        "slime_ext.group: expected sample_indices in the rollout data, got a sample without: which samples "
        "share a prompt is not known; a custom generate function has to keep Sample.index"
    )


class Record(NamedTuple):
    """One sample of this rank's rollout data: where it stands in the lists, and its index over the run."""

    place: int
    index: int | None = None


# A host hands the hook no identity of a sample, but its loss masks are the very objects of the rollout data.
# They are held weakly: a mask that is gone is never mistaken for another one at the same address.
_known: dict[int, tuple[weakref.ref[Tensor], Record]] = {}


def remember_samples(data: Data) -> None:
    """Takes note of a rollout's samples, by their loss masks; forgets those of the rollout before."""
    _known.clear()
    masks = data["loss_masks"]
    indices = column(data.get("sample_indices"), len(masks))
    for place, (mask, index) in enumerate(zip(masks, indices, strict=True)):
        _known[id(mask)] = (weakref.ref(mask), Record(place, index))


def samples_of(loss_masks: Sequence[Tensor]) -> list[Record] | None:
    """The records of a hook call's samples, in its order; None unless the rollout data held every one."""
    found = []
    for mask in loss_masks:
        held, record = _known.get(id(mask), (None, None))
        if held is None or held() is not mask:
            return None
        found.append(record)
    return found


class SampleRow(NamedTuple):
    """One sample of the rollout, on whatever rank it is trained.

    Attributes:
        rollout, group: keys, equal for samples that share them.
        step: the optimizer step that trains it, -1: none.
        tokens: response tokens by the host's mask.
        kept: those that the correction keeps.
        denominator: what the host divides the sample's loss by.
        reward: as the host's advantages have it; NaN for one that the host's baseline leaves out.
    """

    rollout: float
    group: float
    step: float
    tokens: float
    kept: float
    denominator: float
    reward: float

    @property
    def is_rejected(self) -> bool:
        return self.tokens > 0 and self.kept == 0


def broken_groups(rows: Sequence[SampleRow]) -> set[float]:
    """The groups with a rejected sample: one with response tokens of which none is kept."""
    return {row.group for row in rows if row.is_rejected}


def without_groups(rows: Sequence[SampleRow], groups: set[float]) -> list[SampleRow]:
    """The table with nothing kept of these groups."""
    return [row._replace(kept=0.0) if row.group in groups else row for row in rows]


def rollout_factors(rows: Sequence[SampleRow]) -> list[float]:
    """D / K per sample: D what the host divides a rollout by, K the tokens kept of all its samples.

    A rollout of which nothing is kept has factor 1: it contributes 0, and the host still counts it.
    """
    kept: dict[tuple[float, float], float] = defaultdict(float)
    for row in rows:
        kept[row.step, row.rollout] += row.kept
    divided = [max(row.denominator, 1.0) for row in rows]
    return [by / (kept[row.step, row.rollout] or by) for row, by in zip(rows, divided, strict=True)]


def token_factors(rows: Sequence[SampleRow]) -> list[float]:
    """N / K per sample: N the tokens that the host divides an optimizer step by, K those that are kept.

    The host counts a sample without response tokens as one token.
    """
    counted: dict[float, float] = defaultdict(float)
    kept: dict[float, float] = defaultdict(float)
    for row in rows:
        counted[row.step] += max(row.tokens, 1.0)
        kept[row.step] += row.kept
    return [counted[row.step] / (kept[row.step] or counted[row.step]) for row in rows]


def rebaselined(rows: Sequence[SampleRow], *, by_std: bool) -> list[float | None]:
    """GRPO advantages of groups with a rejected sample, computed without it; None where nothing changes.

    A_i = (r_i - mean) / (std + 1e-6) over the samples that are left, unbiased std; 0 for the rejected ones
    and for one that is left alone. The host's rewards are centred and scaled already, which this undoes but
    for the 1e-6.

    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300; the fault: verl issue 6452.
    """
    groups: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        if not row.is_rejected and not math.isnan(row.reward):
            groups[row.group].append(row.reward)
    broken = broken_groups(rows)
    return [_advantage(row, groups[row.group], by_std) if row.group in broken else None for row in rows]


def _advantage(row: SampleRow, rewards: Sequence[float], by_std: bool) -> float:
    if row.is_rejected or math.isnan(row.reward) or len(rewards) < 2:
        return 0.0
    centred = row.reward - statistics.fmean(rewards)
    return centred / (statistics.stdev(rewards) + EPSILON) if by_std else centred
