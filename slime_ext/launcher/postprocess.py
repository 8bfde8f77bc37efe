"""slime's --rollout-data-postprocess-path: the rollout as lists by sample, handed out and taken back."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slime_ext.errors import DataError
from slime_ext.host.functions import load_function
from slime_ext.launcher.megatron.batching import MicroBatch

PER_SAMPLE = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs", "advantages")
REPLACEABLE = ("loss_masks", "rollout_log_probs", "advantages")


def postprocess(
    args: argparse.Namespace,
    rollout_id: int,
    steps: Sequence[Sequence[Sequence[MicroBatch]]],
    proximal: dict[int, Tensor],
) -> None:
    """Calls fn(args, rollout_id, rollout_data), if a flag names one, with this rank's samples.

    Args:
        steps: optimizer steps of minibatches of micro-batches; what the function replaced is put there.
        proximal: position -> [L_i] recomputed log-probs, ``log_probs`` of the data; empty: not recomputed.

    Raises:
        DataError: the function left a tensor of another shape.
    """
    if not args.rollout_data_postprocess_path:
        return
    function = load_function(args.rollout_data_postprocess_path, "--rollout-data-postprocess-path")
    mine = [batch for step in steps for minibatch in step for batch in minibatch]
    data: dict[str, Any] = {key: [x for batch in mine for x in getattr(batch, key)] for key in PER_SAMPLE}
    data["sample_indices"] = [position for batch in mine for position in batch.positions]
    if proximal:
        data["log_probs"] = [proximal[position] for position in data["sample_indices"]]
    function(args, rollout_id, data)
    take_back(mine, proximal, data)


def take_back(batches: Sequence[MicroBatch], proximal: dict[int, Tensor], data: Mapping[str, Any]) -> None:
    """Entries of ``data`` that --rollout-data-postprocess-path replaced, put where the steps read them.

    Raises:
        DataError: one of another shape than it was.
    """
    at = 0
    for batch in batches:
        for i, position in enumerate(batch.positions):
            for key in REPLACEABLE:
                getattr(batch, key)[i] = _same_shape(data, key, at, getattr(batch, key)[i])
            if position in proximal:
                proximal[position] = _same_shape(data, "log_probs", at, proximal[position])
            at += 1


def _same_shape(data: Mapping[str, Any], key: str, at: int, was: Tensor) -> Tensor:
    values = data.get(key, ())
    value = values[at] if at < len(values) else None
    if not isinstance(value, Tensor) or value.shape != was.shape:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise DataError(
            f"--rollout-data-postprocess-path: {key}[{at}]: expected a tensor of shape {list(was.shape)}, "
            f"got {got}"
        )
    return value
