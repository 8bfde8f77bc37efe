"""slime's rollout data, release by release: what each optimizer step trains, and what is known of a sample.

Read once per rollout, before training; where waiting for the device is no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.host.contract import HookCall

Data = Mapping[str, Any]
MASK_SUMS = ("rollout_mask_sums", "group_mask_sums")  # the second in v0.3.0 alone
ROLLOUT_IDS = ("rollout_ids", "group_ids")


def first_of(data: Data, keys: Sequence[str]) -> Any:
    """The value of the first key that is there."""
    return next((data[key] for key in keys if data.get(key) is not None), None)


def column(values: Any, count: int) -> list[Any]:
    """A per-sample column as Python numbers: a list, a range or a tensor; None where the host has none."""
    if values is None:
        return [None] * count
    return values.tolist() if isinstance(values, Tensor) else [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


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


def divides_by_returned_masks(data: Data) -> bool:
    """Whether the host divides a sample's loss by the masks that the hook returns (slime before v0.3.0)."""
    return first_of(data, MASK_SUMS) is None


def call_of(data: Data, args: Any, places: Sequence[int], *, advantages: bool) -> HookCall:
    """The hook call that one micro-batch of these samples would make, without a loss.

    Raises:
        ConfigError: the rollout recorded no log-probs.
    """

    def taken(key: str) -> list[Any] | None:
        values = data.get(key)
        return None if values is None else [values[place] for place in places]

    given = {
        "pg_loss": torch.zeros(0, device=data["loss_masks"][0].device),
        "train_log_probs": taken("log_probs"),
        "rollout_log_probs": taken("rollout_log_probs"),
        "loss_masks": taken("loss_masks"),
        "total_lengths": taken("total_lengths"),
        "response_lengths": taken("response_lengths"),
        "max_seq_lens": taken("max_seq_lens"),
        "advantages": taken("advantages") if advantages else None,
        "weight_versions": taken("weight_versions"),
    }
    return HookCall.of(args, given)


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
