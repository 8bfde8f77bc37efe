"""The experts that the sampler and the trainer chose, compared.

The sampler's: ``rollout_routed_experts`` of a rollout dump (slime, miles), [tokens - 1, layers, active];
row j routed token j, whose logits are of token j + 1. The trainer's: ``routed_experts`` of a train dump's
sample, in the same shape, which neither host writes by itself (docs/analyze.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.tools.analysis.readers.samples import NO_NUMBERS, DumpedSample

MOST_EXPERTS = 1 << 16


def compared_routes(pairs: Sequence[tuple[DumpedSample, DumpedSample]]) -> dict[str, Tensor]:
    """``routes`` and ``experts`` of ``DumpedRollout``; sets ``overlap`` of each row.

    Args:
        pairs: each row with its sample of the rollout dump.
    """
    layers: Tensor | float = 0.0
    chosen: list[Tensor] = []
    for row, sample in pairs:
        both = _both(row, sample.routed)
        if both is None:
            continue
        theirs, mine = both
        is_shared = (theirs[..., None] == mine[..., None, :]).any(-1)
        share = is_shared.float().mean(-1)
        row.overlap = share.mean(1)
        layers = layers + torch.stack([share.sum(0), torch.full((share.shape[1],), float(len(share)))], 1)
        chosen.append(torch.stack([theirs.flatten(), ~is_shared.flatten()]))
    if not chosen:
        return {}
    expert, apart = torch.cat(chosen, 1)
    size = int(expert.max()) + 1
    counts = [torch.bincount(expert, minlength=size), torch.bincount(expert, apart, minlength=size)]
    return {"routes": layers, "experts": torch.stack([c.double() for c in counts], 1)}


def _both(row: DumpedSample, theirs: Any) -> tuple[Tensor, Tensor] | None:
    """Experts [response, layers, active] of sampler and trainer; None where one is missing or of another
    shape."""
    if theirs is None or row.routed is None:
        return None
    try:
        found = [torch.as_tensor(x) for x in (theirs, row.routed)]
    except NO_NUMBERS:
        return None
    first = row.prompt_length - 1
    cut = [x[first : first + row.response_length].long() for x in found if x.dim() == 3 and first >= 0]
    is_whole = len(cut) == 2 and cut[0].shape == cut[1].shape and len(cut[0]) == row.response_length
    if not is_whole or not cut[0].numel():
        return None
    low, high = cut[0].aminmax()
    return (cut[0], cut[1]) if low >= 0 and high < MOST_EXPERTS else None
