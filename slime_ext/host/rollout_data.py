"""Reads an optimizer step's samples before training, and finds them in a hook call.

A rollout is what the host counts once in its loss; slime may split it into several samples. A group is the
samples of one prompt. Everything here is read once per step, when waiting for the device does no harm.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.host.certify import PushRecord
from slime_ext.hosts.contract import HookCall, number_of, versions_of

Batch = Mapping[str, Any]  # key -> a value per sample, or None
MASK_SUMS = ("rollout_mask_sums", "group_mask_sums")  # the second only in v0.3.0
ROLLOUT_IDS = ("rollout_ids", "group_ids")
SAME = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens", "advantages")
OF_CALL = {"train_log_probs": "log_probs"} | {key: key for key in SAME}  # keyword of the hook -> of batches
OTHERS = ("sample_indices", "partition", "rewards", "weight_versions")
KEYS = (*OF_CALL.values(), *MASK_SUMS, *ROLLOUT_IDS, *OTHERS)
EPSILON = 1e-6  # slime adds it to a group's standard deviation


def read_ahead(iterator: Any, count: int) -> Batch:
    """Joins the next micro-batches of a host's ``DataIterator`` without moving it.

    A key that is missing in a micro-batch is None.

    Source: slime, backends/megatron_utils/data.py; the same since v0.2.0, and in miles.
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
    """Returns the value of the first key that the data have."""
    return next((data[key] for key in keys if data.get(key) is not None), None)


def column(values: Any, count: int) -> list[Any]:
    """Reads a list, range or tensor with a value per sample as Python numbers.

    Missing data give None for each sample.
    """
    if values is None:
        return [None] * count
    if isinstance(values, Tensor):
        return list(numbers(values))
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def numbers(values: Tensor) -> Any:
    """Reads a small table as Python numbers."""
    return values.tolist()


def rest_of(rollout: Batch, batch: Batch) -> dict[str, Any]:
    """Selects the rollout's samples that are not in a batch."""
    taken = set(map(id, batch["loss_masks"]))
    places = [i for i, mask in enumerate(rollout["loss_masks"]) if id(mask) not in taken]
    held = {key: rollout.get(key) for key in KEYS}
    return {key: None if all_ is None else [all_[i] for i in places] for key, all_ in held.items()}


def set_advantages(rollout: Batch, loss_masks: Sequence[Tensor], values: Sequence[float | None]) -> None:
    """Gives each sample with one of these masks a new advantage. None changes nothing."""
    of_mask = dict(zip(map(id, loss_masks), values, strict=True))
    rollout["advantages"][:] = [
        was if (value := of_mask.get(id(mask))) is None else torch.full_like(was, value)
        for was, mask in zip(rollout["advantages"], rollout["loss_masks"], strict=True)
    ]


def call_of(batch: Batch, args: Any, **more: Any) -> HookCall:
    """Makes the hook call of a micro-batch; ``more`` adds keywords, such as the loss."""
    keywords = {name: batch.get(key) for name, key in OF_CALL.items()}
    return HookCall.of(args, {"pg_loss": torch.zeros(0), "batch": batch} | keywords | more)


def group_keys(data: Batch, group_size: int) -> list[int]:
    """Numbers each sample's group, by its index or by its place in the rollout."""
    count = len(data["loss_masks"])
    for key in ("sample_indices", "partition"):
        indices = column(data.get(key), count)
        if None not in indices:
            return [index // group_size for index in indices]
    raise ConfigError(
        "slime_ext.group: expected sample_indices in the rollout data, got a sample without an index: keep "
        "Sample.index in your generate function, because it shows which samples share a prompt"
    )


@dataclass
class Samples:
    """Identifies the samples of one optimizer step on this rank, by their loss masks.

    A host passes no sample index to the hook, but its loss masks are the same objects as in the rollout data.
    They are held until the step ends, so that no other tensor gets the same identity.
    """

    masks: Sequence[Tensor] = ()
    indices: Sequence[int | None] = ()  # Sample.index
    versions: Sequence[int | None] = ()  # of the oldest weights that sampled it; set by ``staleness``
    pushes: PushRecord | None = None  # of the trainer; set by ``staleness``
    _places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = {id(mask): place for place, mask in enumerate(self.masks)}

    @classmethod
    def of(cls, batch: Batch) -> Samples:
        """Identifies the samples of a step's joined micro-batches."""
        masks = batch.get("loss_masks") or []
        return cls(masks, column(batch.get("sample_indices"), len(masks)))

    def places(self, loss_masks: Sequence[Tensor]) -> list[int] | None:
        """Finds the places of a hook call's samples; None unless the step has all."""
        known = [self._places[id(mask)] for mask in loss_masks if id(mask) in self._places]
        return known if len(known) == len(loss_masks) else None


class SampleRow(NamedTuple):
    """One sample of the rollout, which any rank may train.

    Attributes:
        rollout, group: keys, equal for samples of one rollout, or of one group.
        step: 0 if the planned optimizer step trains it, -1 if another step does.
        tokens: the number of response tokens in the host's mask.
        kept: the number of those that the correction keeps.
        denominator: the number by which the host divides the sample's loss.
        reward: the reward in the host's advantages; NaN if the host's baseline leaves the sample out.
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
    """Finds the groups with a rejected sample, which has response tokens and keeps none."""
    return {row.group for row in rows if row.is_rejected}


def factors(rows: Sequence[SampleRow], *, per_token: bool = False) -> list[float]:
    """Returns D / K per sample.

    D is the number by which the host divides, and K the number of kept tokens. The host divides a rollout by
    its ``denominator``. With ``per_token`` it divides an optimizer step by its number of tokens, and counts a
    sample without tokens as one token. If nothing is kept, the factor is 1, because the loss is 0 and the
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
    """Computes GRPO advantages again without the rejected samples.

    It returns None for the samples of a group without rejected samples.

    A_i = (r_i - mean) / (std + 1e-6) over the remaining samples, with the unbiased std. A rejected sample
    gets 0, and so does a sample that remains alone. The host's rewards are centred and scaled already; the
    new mean and std undo that, except for the 1e-6.

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


def oldest_of(names: Any) -> int | None:
    """Finds the oldest of a sample's versions. Returns None unless every version is a number."""
    versions = [number for name in versions_of(names) if (number := number_of(name)) is not None]
    return None if len(versions) < len(versions_of(names)) else min(versions, default=None)


def flat(samples: Iterable[Any]) -> Iterable[Any]:
    """Yields the samples of a list, or of a list of groups."""
    for entry in samples:
        if isinstance(entry, list):
            yield from flat(entry)
        else:
            yield entry
