"""Finds the age of a sequence's weights, in weight versions and in optimizer steps.

The trainer counts its pushes of weights to the engines, and an engine writes the number of its push into
every answer. The answer stays in the rollout manager's process. There ``rollout_log`` publishes the oldest
version of each sample, by its index, in the key-value store of Ray's cluster. The trainer looks its samples
up there. If the host's batches carry the versions (miles; a patched slime), those are used. The trainer's own
version is that of its latest push (``certify``).

With --update-weights-interval K the engines have the latest push, and the trainer is up to K rollouts ahead
of it. So at each push the trainer also records how many optimizer steps it has taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slime_ext.core.correction import Correction
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError
from slime_ext.host import certify
from slime_ext.host.published import VERSIONS, fetch_for_trainer
from slime_ext.host.rollout_data import Batch, Samples, oldest_of
from slime_ext.hosts.contract import INIT_FLAG, LOG_FLAG
from slime_ext.ops.segments import to_device


def samples_of(batch: Batch, rollout_id: int | None = None) -> Samples:
    """Identifies a batch's samples, with the oldest version of each if known."""
    samples = replace(Samples.of(batch), pushes=certify.pushes())
    if (carried := batch.get("weight_versions")) is not None:
        return replace(samples, versions=[oldest_of(names) for names in carried])
    data = None if rollout_id is None else fetch_for_trainer(VERSIONS, rollout_id)
    known: dict[str, int | None] = json.loads(data or b"{}")  # the same on every rank
    return replace(samples, versions=[known.get(str(index)) for index in samples.indices if known])


def with_ages(
    tokens: Tokens, loss_masks: Sequence[Tensor], correction: Correction, samples: Samples
) -> Tokens:
    """Adds the ages of the sequences to the tokens.

    An age in versions is the trainer's version minus that of the oldest weights that sampled the sequence. An
    age in steps is the number of optimizer steps since the trainer pushed those weights. Both are NaN for a
    sample without versions, and for a version above the trainer's, because such a rollout comes from another
    run. The age in steps is also NaN for weights that were pushed before this process started.

    Args:
        loss_masks: show which of ``samples`` the tokens belong to.

    Raises:
        ConfigError: the correction needs the ages and no sample's is known.
    """
    places = samples.places(loss_masks) if samples.versions else None
    versions, pushes = [samples.versions[place] for place in places or ()], samples.pushes
    current = pushes.version if pushes else None
    if pushes is None or current is None or not versions:
        if correction.needs_ages:
            raise ConfigError(
                "max_staleness: expected weight versions from the trainer and the samples, got none from the "
                f"{'trainer' if current is None else 'samples'}: add {INIT_FLAG} and {LOG_FLAG}; a "
                "custom generate function has to keep Sample.index and Sample.weight_versions"
            )
        return tokens
    known = [None if v is None or v > current else v for v in versions]
    ages = [[math.nan, math.nan] if v is None else [current - v, pushes.steps_since(v)] for v in known]
    table = to_device(torch.tensor(ages, dtype=torch.float64), tokens.segments.mask.device)
    return replace(tokens, ages=table[:, 0], age_steps=table[:, 1])
