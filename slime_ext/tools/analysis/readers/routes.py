"""The experts that the sampler and the trainer chose, compared.

The sampler's: ``rollout_routed_experts`` of a rollout dump (slime, miles), [tokens - 1, layers, active];
row j routed token j, whose logits are of token j + 1. The trainer's: ``routed_experts`` of a train dump's
sample, in the same shape, which neither host writes by itself (docs/analyze.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.tools.analysis.readers.samples import NO_NUMBERS, DumpedSample
from slime_ext.tools.analysis.readers.spilled import loaded

MOST_EXPERTS = 1 << 16
REPEATS = 8  # tokens in a row with the same experts in all layers
OWN = 4  # times the next longest such run of the sample


def compared_routes(pairs: Sequence[tuple[DumpedSample, DumpedSample]]) -> dict[str, Tensor]:
    """``routes`` and ``experts`` of ``DumpedRollout``; sets ``overlap`` of each row.

    Args:
        pairs: each row with its sample of the rollout dump.
    """
    layers, chosen = [], []
    for row, sample in pairs:
        if sample.routed is None or row.routed is None:
            continue
        theirs, mine = (_of_response(row, routed) for routed in (sample.routed, row.routed))
        if theirs is None or mine is None or theirs.shape != mine.shape:
            continue
        is_shared = (theirs[..., None] == mine[..., None, :]).any(-1)
        share = is_shared.float().mean(-1)
        row.overlap = share.mean(1)
        layers.append(torch.stack([share.sum(0), torch.full((share.shape[1],), float(len(share)))], 1))
        chosen.append(torch.stack([theirs.flatten(), ~is_shared.flatten()]))
    if not chosen:
        return {}
    expert, apart = torch.cat(chosen, 1)
    size = int(expert.max()) + 1
    counts = [torch.bincount(expert, minlength=size), torch.bincount(expert, apart, minlength=size)]
    return {"routes": sum(layers[1:], layers[0]), "experts": torch.stack([c.double() for c in counts], 1)}


def odd_routes(pairs: Sequence[tuple[DumpedSample, DumpedSample]]) -> Counter[str]:
    """How many samples have the sampler's experts (``routed``), those of more or fewer tokens than the sample
    (``misfit``), and the same experts at many tokens in a row (``repeated``; ``repeated_tokens`` of them,
    ``repeated_prompt`` where that is in the prompt alone).

    Args:
        pairs: each row with its sample of the rollout dump.
    """
    found: Counter[str] = Counter()
    for row, sample in pairs:
        if sample.routed is None:
            continue
        try:
            theirs = torch.as_tensor(sample.routed)
        except NO_NUMBERS:
            continue
        tokens = row.prompt_length + row.response_length
        if theirs.dim() != 3 or not len(theirs) or row.prompt_length < 1:
            continue
        found["routed"] += 1
        found["misfit"] += len(theirs) not in (tokens - 1, tokens)
        begin, length, next_longest = _longest_run(theirs)
        if length >= max(REPEATS, OWN * next_longest):
            found["repeated"] += 1
            found["repeated_tokens"] += length
            found["repeated_prompt"] += begin + length <= row.prompt_length
    return found


def _longest_run(routed: Tensor) -> tuple[int, int, int]:
    """Where the longest run of equal rows begins, how many it has, and how many the next longest has."""
    same = torch.ones(len(routed), dtype=torch.bool)
    same[1:] = (routed[1:] == routed[:-1]).flatten(1).all(1)
    same[0] = False
    begins = torch.cat([(~same).nonzero()[:, 0], torch.tensor([len(routed)])])
    lengths = begins.diff()
    at = int(lengths.argmax())
    others = torch.cat([lengths[:at], lengths[at + 1 :], lengths.new_zeros(1)])
    return int(begins[at]), int(lengths[at]), int(others.max())


def _of_response(row: DumpedSample, routed: Any) -> Tensor | None:
    """Experts [response, layers, active] of a sample; None where they are missing or of another shape."""
    try:
        found = torch.as_tensor(loaded(routed))[row.prompt_length - 1 :][: row.response_length].long()
    except (*NO_NUMBERS, IndexError):
        return None
    is_whole = row.prompt_length > 0 and found.dim() == 3 and len(found) == row.response_length
    if not is_whole or not found.numel():
        return None
    low, high = found.aminmax()
    return found if low >= 0 and high < MOST_EXPERTS else None
