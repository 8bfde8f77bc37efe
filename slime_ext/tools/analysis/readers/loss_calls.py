"""Reads the trainer's log-probs of the same tokens from the log-prob pass and from training.

miles writes both to ``policy_loss_debug/rank_<rank>_call_<call>.pt`` beside --dump-details
(training_utils/debug_dump.py at 31f1ca9). At call 0 of a rank, no optimizer step has changed the weights yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from slime_ext.errors import DataError
from slime_ext.ops.divergences import is_log_prob
from slime_ext.tools.analysis.readers.unpickle import load_plain
from slime_ext.tools.analysis.values import NO_NUMBERS, as_tensor

LISTS = ("train_log_probs", "old_log_probs", "rollout_log_probs", "local_loss_mask")


class LossCall(NamedTuple):
    """Means over the response tokens of all ranks' first calls, nats."""

    tokens: int
    trained: float  # mean |training - log-prob pass|
    sampled: float  # mean |log-prob pass - sampler|


def first_calls(folder: Path) -> tuple[LossCall, ...]:
    """Returns the first calls of all ranks in a run's folder as one; empty if there are none."""
    parts = []
    for path in sorted(folder.glob("policy_loss_debug/rank_*_call_0.pt")):
        try:
            samples = load_plain(path)["samples"]
            parts += [torch.stack([as_tensor(s[name], torch.float32) for name in LISTS]) for s in samples]
        except (DataError, KeyError, *NO_NUMBERS):
            continue  # another kind of file, or a file without log-probs of the sampler
    if not parts:
        return ()
    train, scored, rollout, mask = torch.cat(parts, 1)
    chosen = (mask != 0) & (train + scored).isfinite() & is_log_prob(rollout)
    distances = ((a - b).abs()[chosen].double() for a, b in ((train, scored), (scored, rollout)))
    trained, sampled = (float(x.mean()) if len(x) else 0.0 for x in distances)
    return (LossCall(int(chosen.sum()), trained, sampled),)
