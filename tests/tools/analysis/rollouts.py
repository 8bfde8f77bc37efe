"""Random rollouts as the analysis sees them, float32 as in a dump."""

from __future__ import annotations

from itertools import groupby

import torch

from slime_ext.tools.analysis.records import DumpedRollout, form_of, join


def rollout(seed=0, samples=12, rollout_id=0, noise=0.5, **changes):
    """Ragged samples (one empty), a mask with holes, log-ratios of spread ``noise``."""
    g = torch.Generator().manual_seed(seed)
    lengths = [int(n) for n in torch.randint(1, 9, (samples,), generator=g)]
    lengths[samples // 2] = 0
    size = sum(lengths)
    behavior = -torch.rand(size, generator=g) * 3
    fields = {
        "rollout_id": rollout_id,
        "source": f"{rollout_id}.pt",
        "lengths": tuple(lengths),
        "prompt_lengths": (5,) * samples,
        "positions": tuple(range(samples)),
        "behavior": behavior,
        "proximal": behavior + noise * torch.randn(size, generator=g),
        "mask": torch.rand(size, generator=g) < 0.9,
        "advantages": torch.randn(samples, generator=g).repeat_interleave(torch.tensor(lengths)),
    }
    return DumpedRollout(**fields | changes)


def joined(rollouts):
    """Rollouts of one form as ``analyze`` reads them if they are small: in one pass."""
    return [join(list(part)) for _, part in groupby(rollouts, form_of)]
