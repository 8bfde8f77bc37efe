"""Which sample of the rollout a hook call's tensors belong to.

A host hands the hook no identity of a sample, but the loss masks that it hands over are the very objects of
the rollout data. So a sample is found by its mask's identity. Masks are held weakly: nothing here keeps a
tensor alive, and a mask that is gone is never mistaken for another one at the same address.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime_ext.host.rollout_data import ROLLOUT_IDS, column, first_of
from slime_ext.host.versions import versions_of


@dataclass(frozen=True)
class Record:
    """One sample of this rank's rollout data.

    Args:
        place: where it stands in the rollout data's lists.
        index: the host's sample index, counted over all rollouts of the run.
        rollout_id: shared by the samples that one rollout was split into.
        position: where it stands in the whole rollout, all ranks together; slime keeps it since 681b3adca.
        weight_versions: of the weights that sampled it, one per stretch of generation; empty where the host
            does not carry them.
    """

    place: int
    index: int | None = None
    rollout_id: int | None = None
    position: int | None = None
    weight_versions: tuple[str, ...] = ()


_known: dict[int, tuple[weakref.ref[Tensor], Record]] = {}


def remember(rollout_data: Mapping[str, Any]) -> tuple[Record, ...]:
    """Takes note of a rollout's samples; forgets those of the rollout before.

    Args:
        rollout_data: the host's, lists by sample; ``loss_masks`` must be the objects that the hook will get.

    Returns:
        One record per sample of this rank, in their order.
    """
    records = records_of(rollout_data)
    _known.clear()
    for mask, record in zip(rollout_data["loss_masks"], records, strict=True):
        _known[id(mask)] = (weakref.ref(mask), record)
    return records


def of(loss_masks: Sequence[Tensor]) -> list[Record] | None:
    """The records of a hook call's samples, in its order; None unless the rollout data held every one."""
    found = []
    for mask in loss_masks:
        held, record = _known.get(id(mask), (None, None))
        if held is None or held() is not mask:
            return None
        found.append(record)
    return found


def forget() -> None:
    """Forgets every sample."""
    _known.clear()


def records_of(rollout_data: Mapping[str, Any]) -> tuple[Record, ...]:
    """One record per sample of the rollout data, from whatever keys this host's release fills in."""
    count = len(rollout_data["loss_masks"])
    columns = (
        column(rollout_data.get("sample_indices"), count),
        column(first_of(rollout_data, ROLLOUT_IDS), count),
        column(rollout_data.get("partition"), count),
    )
    versions = rollout_data.get("weight_versions") or [()] * count
    return tuple(
        Record(place, index, rollout, position, tuple(map(str, versions_of(spans))))
        for place, (index, rollout, position, spans) in enumerate(zip(*columns, versions, strict=True))
    )
