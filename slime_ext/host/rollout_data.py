"""One optimizer step's samples: read off the host's iterator before they are trained, found again in a hook
call, and what those of one rollout or one prompt mean for each other.

A rollout is what the host counts once in its loss (slime may split it into several samples); a group is the
samples of one prompt. What is read here is read once per step, where waiting for the device is no loss.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.host.contract import HookCall

Batch = Mapping[str, Any]  # key -> a value per sample, or None
MASK_SUMS = ("rollout_mask_sums", "group_mask_sums")  # the second in v0.3.0 alone
ROLLOUT_IDS = ("rollout_ids", "group_ids")
SAME = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens", "advantages")
OF_CALL = {"train_log_probs": "log_probs"} | {key: key for key in SAME}  # keyword of the hook -> of batches
OTHERS = ("sample_indices", "partition", "rewards", "weight_versions")
KEYS = (*OF_CALL.values(), *MASK_SUMS, *ROLLOUT_IDS, *OTHERS)
EPSILON = 1e-6  # what slime adds to a group's standard deviation


def read_ahead(iterator: Any, count: int) -> Batch:
    """The next micro-batches of a host's ``DataIterator``, which stays where it is, as one; a key that one of
    them lacks is None.

    Source: slime, backends/megatron_utils/data.py; the same from v0.2.0 on and in miles.
    """
    at, joined = iterator.offset, dict[str, Any]()
    try:
        batches = [iterator.get_next(KEYS) for _ in range(count)]
    finally:
        iterator.offset = at
    for key in KEYS:
        parts = [part for batch in batches if (part := batch.get(key)) is not None]
        joined[key] = [value for part in parts for value in part] if len(parts) == count else None
    return joined


def first_of(data: Batch, keys: Sequence[str]) -> Any:
    """The value of the first key that is there."""
    return next((data[key] for key in keys if data.get(key) is not None), None)


def column(values: Any, count: int) -> list[Any]:
    """A per-sample column as Python numbers: a list, a range or a tensor; None where the host has none."""
    if values is None:
        return [None] * count
    if isinstance(values, Tensor):
        return list(numbers(values))
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def numbers(values: Tensor) -> Any:
    """A small table as Python numbers."""
    return values.tolist()


def rest_of(rollout: Batch, batch: Batch) -> dict[str, Any]:
    """The rollout's samples that are not in a batch."""
    taken = set(map(id, batch["loss_masks"]))
    places = [i for i, mask in enumerate(rollout["loss_masks"]) if id(mask) not in taken]
    held = {key: rollout.get(key) for key in KEYS}
    return {key: None if all_ is None else [all_[i] for i in places] for key, all_ in held.items()}


def set_advantages(rollout: Batch, loss_masks: Sequence[Tensor], values: Sequence[float | None]) -> None:
    """Gives the samples with these masks one advantage each; None leaves them as they are."""
    of_mask = dict(zip(map(id, loss_masks), values, strict=True))
    rollout["advantages"][:] = [
        was if (value := of_mask.get(id(mask))) is None else torch.full_like(was, value)
        for was, mask in zip(rollout["advantages"], rollout["loss_masks"], strict=True)
    ]


def call_of(batch: Batch, args: Any, **more: Any) -> HookCall:
    """The hook call that a micro-batch would make, with ``more`` than it has; without a loss but there."""
    keywords = {name: batch.get(key) for name, key in OF_CALL.items()}
    return HookCall.of(args, {"pg_loss": torch.zeros(0)} | keywords | more)


def group_keys(data: Batch, group_size: int) -> list[int]:
    """Which samples share a prompt: by the host's sample index, or by the place in the whole rollout."""
    count = len(data["loss_masks"])
    for key in ("sample_indices", "partition"):
        indices = column(data.get(key), count)
        if None not in indices:
            return [index // group_size for index in indices]
    raise ConfigError(
        "slime_ext.group: expected sample_indices in the rollout data, got a sample without: which samples "
        "share a prompt is not known; a custom generate function has to keep Sample.index"
    )


@dataclass
class Samples:
    """The samples of one optimizer step on this rank.

    A host tells the hook nothing that identifies a sample, but its loss masks are the very objects of the
    rollout data. They are held until the step ends, so that no other tensor gets the same identity.
    """

    masks: Sequence[Tensor] = ()
    indices: Sequence[int | None] = ()  # Sample.index
    versions: Sequence[int | None] = ()  # of the oldest weights that sampled it; filled in by ``staleness``
    _places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = {id(mask): place for place, mask in enumerate(self.masks)}

    @classmethod
    def of(cls, batch: Batch) -> Samples:
        """Those of a step's micro-batches, joined."""
        masks = batch.get("loss_masks") or []
        return cls(masks, column(batch.get("sample_indices"), len(masks)))

    def places(self, loss_masks: Sequence[Tensor]) -> list[int] | None:
        """The places of a hook call's samples, in its order; None unless the step has every one."""
        known = [self._places[id(mask)] for mask in loss_masks if id(mask) in self._places]
        return known if len(known) == len(loss_masks) else None


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


def factors(rows: Sequence[SampleRow], *, per_token: bool = False) -> list[float]:
    """D / K per sample: D what the host divides by, K the tokens that are kept of it.

    The host divides a rollout by its ``denominator``; ``per_token`` an optimizer step by all its tokens, of
    which a sample without any counts as one. Where nothing is kept the factor is 1: it contributes 0, and the
    host still counts it.
    """
    keys = [(row.step, 0.0 if per_token else row.rollout) for row in rows]
    kept: dict[tuple[float, float], float] = defaultdict(float)
    tokens: dict[tuple[float, float], float] = defaultdict(float)
    for key, row in zip(keys, rows, strict=True):
        kept[key] += row.kept
        tokens[key] += max(row.tokens, 1.0)
    divided = [
        tokens[key] if per_token else max(row.denominator, 1.0) for key, row in zip(keys, rows, strict=True)
    ]
    return [by / (kept[key] or by) for key, by in zip(keys, divided, strict=True)]


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
    broken, advantages = broken_groups(rows), list[float | None]()
    for row in rows:
        rewards = groups[row.group]
        if row.group not in broken:
            advantages.append(None)
        elif row.is_rejected or math.isnan(row.reward) or len(rewards) < 2:
            advantages.append(0.0)
        else:
            centred = row.reward - statistics.fmean(rewards)
            advantages.append(centred / (statistics.stdev(rewards) + EPSILON) if by_std else centred)
    return advantages
