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
REPEATS = 8  # steps to another token in a row that keep the same experts in all layers
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
    (``misfit``), and the same experts at many different tokens in a row (``repeated``; ``repeated_tokens`` of
    them, ``repeated_prompt`` where that is in the prompt alone). A token that repeats is routed alike for a
    good reason, so only the places count at which the token changes and its experts do not.

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
        end, steps, next_most = _longest_run(theirs, _changes(sample.ids, len(theirs)))
        if steps >= max(REPEATS, OWN * next_most):
            found["repeated"] += 1
            found["repeated_tokens"] += steps + 1
            found["repeated_prompt"] += end <= row.prompt_length
    return found


def _changes(ids: Any, rows: int) -> Tensor:
    """[rows] bool, whether a row's token is another than that of the row before; True where no ids tell."""
    changes = torch.ones(rows, dtype=torch.bool)
    try:
        tokens = torch.as_tensor([] if ids is None else ids).flatten()[:rows]
    except NO_NUMBERS:
        return changes
    changes[1 : len(tokens)] = tokens[1:] != tokens[:-1]
    return changes


def _longest_run(routed: Tensor, changes: Tensor) -> tuple[int, int, int]:
    """Where the run of equal rows with the most changes of the token ends, how many it has, and how many the
    next one has."""
    same = torch.zeros(len(routed), dtype=torch.bool)
    same[1:] = (routed[1:] == routed[:-1]).flatten(1).all(1)
    run = (~same).long().cumsum(0) - 1
    counts = torch.zeros(int(run[-1]) + 1, dtype=torch.int64).index_add_(0, run, (same & changes).long())
    at = int(counts.argmax())
    others = torch.cat([counts[:at], counts[at + 1 :], counts.new_zeros(1)])
    return int((run <= at).sum()), int(counts[at]), int(others.max())


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
