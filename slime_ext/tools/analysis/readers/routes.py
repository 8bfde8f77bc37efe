"""Compares the experts that the sampler and the trainer chose.

The sampler's are ``rollout_routed_experts`` of a rollout dump (slime, miles), [tokens - 1, layers, active].
Row j routed token j, whose logits predict token j + 1. The trainer's are ``routed_experts`` of a sample in a
train dump, in the same shape. Neither host writes these by itself (docs/analyze.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_ext.tools.analysis.readers.samples import DumpedSample
from slime_ext.tools.analysis.values import NO_NUMBERS, loaded

MOST_EXPERTS = 1 << 16
REPEATS = 8  # consecutive steps to a different token that keep the experts of all layers
TIMES = 4  # times the next longest such run of the sample
# Rows of a stretch that comes again; how many of them must change, and be of other tokens; numbers of a row
# that are compared at first; log of the number of such stretches that chance may make in a sample.
STRETCH, CHANGES, COMPARED, BY_CHANCE = 4, 3, 32, math.log(1e-3)
MIXER = 0x1E3779B1  # an odd number with irregular bits, for hashes


def compared_routes(pairs: Sequence[tuple[DumpedSample, DumpedSample]]) -> dict[str, Tensor]:
    """Returns ``routes`` and ``experts`` of ``DumpedRollout``. Sets ``overlap`` of each row.

    Args:
        pairs: each row with its sample of the rollout dump.
    """
    layers, chosen = [], []
    for row, sample in pairs:
        if sample.routed is None or row.routed is None:
            continue
        sampler, trainer = (_of_response(row, routed) for routed in (sample.routed, row.routed))
        if sampler is None or trainer is None or sampler.shape != trainer.shape:
            continue
        is_shared = (sampler[..., None] == trainer[..., None, :]).any(-1)
        share = is_shared.float().mean(-1)
        row.overlap = share.mean(1)
        layers.append(torch.stack([share.sum(0), torch.full((share.shape[1],), float(len(share)))], 1))
        chosen.append(torch.stack([sampler.flatten(), ~is_shared.flatten()]))
    if not chosen:
        return {}
    expert, apart = torch.cat(chosen, 1)
    size = int(expert.max()) + 1
    counts = [torch.bincount(expert, minlength=size), torch.bincount(expert, apart, minlength=size)]
    return {"routes": sum(layers[1:], layers[0]), "experts": torch.stack([c.double() for c in counts], 1)}


def odd_routes(pairs: Sequence[tuple[DumpedSample, DumpedSample]]) -> Counter[str]:
    """Counts samples by the experts that the sampler recorded.

        routed: samples with experts
        misfit: samples whose experts belong to more or fewer tokens
        repeated: samples with the same experts at many consecutive different tokens
        repeated_tokens: number of these tokens
        repeated_prompt: samples in which this happens only in the prompt
        again: samples in which a stretch of experts comes again, at other tokens
        again_tokens: number of these tokens
        again_whole: samples in which the stretch that comes again is the first one

    Equal tokens are routed alike for a good reason, so only steps to a different token count. Sets
    ``odd_experts`` of each row with experts.

    Args:
        pairs: each row with its sample of the rollout dump.
    """
    counts: Counter[str] = Counter()
    for row, sample in pairs:
        if sample.routed is None:
            continue
        try:
            experts = torch.as_tensor(sample.routed)
        except NO_NUMBERS:
            continue
        tokens = row.prompt_length + row.response_length
        if experts.dim() != 3 or not len(experts) or row.prompt_length < 1:
            continue
        counts["routed"] += 1
        counts["misfit"] += len(experts) not in (tokens - 1, tokens)
        ids = _tokens(sample.ids, len(experts))
        end, steps, next_most = _longest_run(experts, _changes(ids, len(experts)))
        is_repeated = steps >= max(REPEATS, TIMES * next_most)
        first, size = _stretch_again(experts, ids) if not is_repeated else (0, 0)
        row.odd_experts = int(is_repeated or size > 0)
        if is_repeated:
            counts["repeated"] += 1
            counts["repeated_tokens"] += steps + 1
            counts["repeated_prompt"] += end <= row.prompt_length
        elif size:
            counts["again"] += 1
            counts["again_tokens"] += size
            counts["again_whole"] += not first
    return counts


def _tokens(ids: Any, rows: int) -> Tensor:
    """Returns the ids of the first tokens of a sample, at most [rows]; empty if they are unknown."""
    try:
        return torch.as_tensor([] if ids is None else ids).flatten()[:rows]
    except NO_NUMBERS:
        return torch.zeros(0)


def _changes(tokens: Tensor, rows: int) -> Tensor:
    """Returns whether the token of each row differs from the one before, [rows] bool; True if unknown."""
    changes = torch.ones(rows, dtype=torch.bool)
    changes[1 : len(tokens)] = tokens[1:] != tokens[:-1]
    return changes


def _stretch_again(routed: Tensor, tokens: Tensor) -> tuple[int, int]:
    """Returns the first row and the number of rows of a stretch of experts that comes again in its sample.

    (0, 0) if there is none, or if chance may make it. Text that comes again is routed alike for a good
    reason, so only rows of other tokens are evidence: if two rows agree with probability p, chance makes
    n^2 / 2 p^k stretches with k of them.

    Args:
        routed: [n, layers, active]
        tokens: [n] ids.
    """
    n = min(len(routed), len(tokens))
    if n < 2 * STRETCH:
        return 0, 0
    numbers = routed[:n].flatten(1)
    some = numbers[:, :: max(numbers.shape[1] // COMPARED, 1)].long()
    rows = ((some + 1) * MIXER ** (1 + torch.arange(some.shape[1]))).sum(1)  # modulo 2^64
    windows, texts = rows.unfold(0, STRETCH, 1), tokens[:n].unfold(0, STRETCH, 1)
    keys, order = ((windows * MIXER ** (1 + torch.arange(STRETCH))).sum(1)).sort(stable=True)
    here, there = order[:-1], order[1:]
    is_other = (texts[here] != texts[there]).sum(1) >= CHANGES
    is_varied = (windows[here, 1:] != windows[here, :-1]).sum(1) >= CHANGES
    lags = (there - here)[(keys[1:] == keys[:-1]) & is_other & is_varied]
    if not len(lags):
        return 0, 0
    lag = int(lags.mode().values)
    is_same = (numbers[lag:] == numbers[:-lag]).all(1)
    run = (~is_same).long().cumsum(0)
    others = torch.bincount(run, (is_same & (tokens[lag:n] != tokens[: n - lag])).double())
    most = int(others.argmax())
    counts = rows.unique(return_counts=True)[1].double()
    log_chance = math.log(n * n / 2) + float(others[most]) * math.log(float((counts / n).square().sum()))
    if log_chance > BY_CHANCE:
        return 0, 0
    members = (is_same & (run == most)).nonzero()[:, 0]
    return int(members[0]), len(members)


def _longest_run(routed: Tensor, changes: Tensor) -> tuple[int, int, int]:
    """Returns the end and the token changes of the longest run of equal rows.

    The third number is how many changes the next longest run has.
    """
    same = torch.zeros(len(routed), dtype=torch.bool)
    same[1:] = (routed[1:] == routed[:-1]).flatten(1).all(1)
    run = (~same).long().cumsum(0) - 1
    counts = torch.zeros(int(run[-1]) + 1, dtype=torch.int64).index_add_(0, run, (same & changes).long())
    at = int(counts.argmax())
    others = torch.cat([counts[:at], counts[at + 1 :], counts.new_zeros(1)])
    return int((run <= at).sum()), int(counts[at]), int(others.max())


def _of_response(row: DumpedSample, routed: Any) -> Tensor | None:
    """Returns the experts of a response, [response, layers, active]; None if missing or misshaped."""
    try:
        experts = torch.as_tensor(loaded(routed))[row.prompt_length - 1 :][: row.response_length].long()
    except (*NO_NUMBERS, IndexError):
        return None
    is_whole = row.prompt_length > 0 and experts.dim() == 3 and len(experts) == row.response_length
    if not is_whole or not experts.numel():
        return None
    low, high = experts.aminmax()
    return experts if low >= 0 and high < MOST_EXPERTS else None
