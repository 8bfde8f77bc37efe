"""--rollout-data-postprocess-path: its function gets the rollout as slime keeps it, and may replace parts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import DataError
from slime_ext.host.contract import load_function
from slime_ext.launcher.megatron.batching import MicroBatch
from slime_ext.launcher.rollout.sample import TRUNCATED
from slime_ext.launcher.training_data import TrainSample

PER_SAMPLE = ("loss_masks", "total_lengths", "response_lengths", "rollout_log_probs", "advantages")
REPLACEABLE = ("loss_masks", "rollout_log_probs", "advantages")
Steps = Sequence[Sequence[Sequence[MicroBatch]]]


def postprocess(
    args: argparse.Namespace,
    rollout_id: int,
    steps: Steps,
    proximal: dict[int, Tensor],
    samples: Sequence[TrainSample],
) -> None:
    """Calls fn(args, rollout_id, rollout_data), if a flag names one, with this rank's samples.

    Args:
        steps: optimizer steps of minibatches of micro-batches; what the function replaced is put there.
        proximal: position -> [L_i] recomputed log-probs, ``log_probs`` of the data; empty: not recomputed.
        samples: the whole rollout, all ranks together, by position.

    Raises:
        DataError: the function left a tensor of another shape.
    """
    if not args.rollout_data_postprocess_path:
        return
    function = load_function(args.rollout_data_postprocess_path, "--rollout-data-postprocess-path")
    data = rollout_data(args, steps, proximal, samples)
    function(args, rollout_id, data)
    take_back([batch for step in steps for batch in chain(*step)], proximal, data)


def rollout_data(
    args: argparse.Namespace, steps: Steps, proximal: Mapping[int, Tensor], samples: Sequence[TrainSample]
) -> dict[str, Any]:
    """This rank's part of the rollout under slime's keys; ``raw_reward`` is of all ranks, as there.

    ``micro_batch_indices`` are places in this rank's lists, in the order in which they are trained.
    """
    batches = [batch for step in steps for batch in chain(*step)]
    partition = [position for batch in batches for position in batch.positions]
    own = [samples[position] for position in partition]
    data = {key: [x for batch in batches for x in getattr(batch, key)] for key in PER_SAMPLE}
    device = data["loss_masks"][0].device
    ends = accumulate((len(batch.positions) for batch in batches), initial=0)
    return {
        **data,
        **({"log_probs": [proximal[position] for position in partition]} if proximal else {}),
        "tokens": [torch.tensor(s.tokens, dtype=torch.long, device=device) for s in own],
        "rewards": [s.relative_reward for s in own],
        "local_raw_reward": [s.raw_reward for s in own],
        "truncated": [int(s.status == TRUNCATED) for s in own],
        "sample_indices": [s.position if s.index is None else s.index for s in own],
        "rollout_ids": [s.rollout_id for s in own],
        "micro_batch_indices": [list(range(start, stop)) for start, stop in pairwise(ends)],
        "num_microbatches": [sum(map(len, step)) for step in steps],
        "global_batch_sizes": [args.global_batch_size for _ in steps],
        "raw_reward": [s.raw_reward for s in samples],
        "weight_versions": [s.weight_versions for s in own],
        "returns": list(data["advantages"]),
        "rollout_mask_sums": torch.cat([batch.denominators for batch in batches]),
        "partition": partition,
    }


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
